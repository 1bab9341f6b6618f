"""Attention by bands equals softmax over all pairs, written down in float64, forward and backward."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from map_oracle import ORACLE, SMALL, attention, distances
from torch import Tensor

from ropepatch.attention.bands import WHOLE, Band, behind, layout, same
from ropepatch.attention.kernels import banded
from ropepatch.attention.maps import MAPS, make_map

INV_FREQ = 10000.0 ** -(torch.arange(4).double() / 4)


def turn(x: Tensor, places: Tensor) -> Tensor:
    angle = places.double()[:, None] * INV_FREQ
    first, second = x.chunk(2, -1)
    return torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1
    )


def drawn(queries: int, keys: int, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, n, 8, generator=draw, dtype=torch.float64) for n in (queries, keys, keys)]


def read(bands: tuple[Band, ...], tensors: list[Tensor], first: int = 0, window: int | None = None) -> Tensor:
    query, key, value = tensors
    n = torch.arange(first, first + key.shape[2])
    m = n[key.shape[2] - query.shape[2] :]
    turned = [(turn(query, band.query(m)), turn(key, band.key(n))) for band in bands]
    pieces = layout(bands, query.shape[2], key.shape[2], first, window)
    return banded(turned, value, pieces, 0.35)


def covered(
    bands: tuple[Band, ...], queries: int, keys: int, first: int, window: int | None
) -> list[np.ndarray]:
    """How often the pieces of each band cover every pair."""
    tables = []
    for pieces in layout(bands, queries, keys, first, window):
        table = np.zeros((queries, keys), dtype=int)
        for piece in pieces:
            shape = piece.last_row - piece.first_row, piece.last_key - piece.first_key
            assert min(shape) > 0
            assert piece.kind == "all" or shape[0] == shape[1]
            own = {"all": np.ones, "lower": lambda s: np.tri(*s), "upper": lambda s: np.tri(*s).T}[
                piece.kind
            ](shape)
            table[piece.rows, piece.keys] += own.astype(int)
        tables.append(table)
    return tables


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_pieces_of_a_band_cover_its_pairs_once_whatever_the_geometry(data):
    name = data.draw(st.sampled_from([*MAPS, "whole"]))
    keys = data.draw(st.integers(1, 70))
    queries = data.draw(st.integers(1, keys))
    first = data.draw(st.integers(0, 30))
    window = data.draw(st.none() | st.integers(1, 40))
    bands = WHOLE if name == "whole" else make_map(name, **SMALL[name]).bands()
    n = torch.arange(first, first + keys)
    m = n[keys - queries :]
    age = m[:, None] - n
    for band, table in zip(bands, covered(bands, queries, keys, first, window), strict=True):
        holds = band.holds(m, n) & (age < (window or keys))
        assert np.array_equal(table, holds.numpy().astype(int))


@pytest.mark.parametrize("name", MAPS)
def test_attention_by_a_map_is_softmax_over_its_effective_distances(name):
    tensors = drawn(64, 64)
    one = make_map(name, **SMALL[name])
    table = distances(ORACLE[name](**SMALL[name]), 64)
    expected = attention(*(x.numpy() for x in tensors), table, INV_FREQ.numpy(), 0.35)
    np.testing.assert_allclose(read(one.bands(), tensors).numpy(), expected, atol=1e-12)
    last = [tensors[0][:, :, -9:], *tensors[1:]]
    np.testing.assert_allclose(read(one.bands(), last).numpy(), expected[:, :, -9:], atol=1e-12)


def test_one_band_of_all_keys_is_attention_as_it_is():
    query, key, value = drawn(33, 33)
    places = torch.arange(33)
    plain = torch.nn.functional.scaled_dot_product_attention(
        turn(query, places), turn(key, places), value, is_causal=True, scale=0.35
    )
    assert torch.allclose(read(WHOLE, [query, key, value]), plain, atol=1e-12)


@pytest.mark.parametrize("name", ["self-extend", "dca", "lampe", "lambda"])
@pytest.mark.parametrize("window", [None, 13])
def test_gradients_are_those_of_the_scores_written_down(name, window):
    bands = make_map(name, **SMALL[name]).bands()

    def written_down(tensors: list[Tensor]) -> Tensor:
        query, key, value = tensors
        places = torch.arange(40)
        scores = torch.full((2, 3, 40, 40), -torch.inf, dtype=torch.float64)
        for band in bands:
            own = turn(query, band.query(places)) @ turn(key, band.key(places)).mT * 0.35
            seen = band.holds(places, places) & (places[:, None] - places < (window or 40))
            scores = torch.where(seen, own, scores)
        return scores.softmax(-1) @ value

    grads = []
    for attend in (lambda x: read(bands, x, window=window), written_down):
        tensors = [x.requires_grad_() for x in drawn(40, 40)]
        output = attend(tensors)
        output.square().sum().backward()
        grads.append([output.detach(), *(x.grad for x in tensors)])
    for one, other in zip(*grads, strict=True):
        assert torch.allclose(one, other, atol=1e-11)


def test_a_query_that_sees_nothing_reads_zeros_and_gives_no_gradient():
    bands = (Band(behind(9), behind(3), same, same),)
    tensors = [x.requires_grad_() for x in drawn(6, 6)]
    output = read(bands, tensors)
    output.sum().backward()
    assert (output[:, :, :3] == 0).all()
    assert (output[:, :, 3:] != 0).all()
    assert all(x.grad.isfinite().all() for x in tensors)


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_parts_are_merged_in_float32(dtype, apart):
    bands = make_map("self-extend", **SMALL["self-extend"]).bands()
    tensors = drawn(64, 64)
    query, key, value = tensors
    places = torch.arange(64)
    turned = [(turn(query, b.query(places)).to(dtype), turn(key, b.key(places)).to(dtype)) for b in bands]
    output = banded(turned, value.to(dtype), layout(bands, 64, 64, 0, None), 0.35)
    assert output.dtype == dtype
    assert (output.double() - read(bands, tensors)).abs().max() < apart
