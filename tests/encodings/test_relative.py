"""Attention with relative biases and vectors equals softmax over all pairs, forward and backward."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from ropepatch.attention import modeling_position_remapping as modeling
from ropepatch.attention.interchange import POSITIONS_SLOT
from ropepatch.encodings.attention import attend
from ropepatch.encodings.encoding import Relative

# Numbers of queries, keys and distances in the tables, and the sliding window
SIZES = [
    (50, 50, 7, 0),
    (50, 50, 60, 0),  # one entry per distance
    (13, 50, 50, 0),
    (13, 50, 9, 0),
    (50, 50, 9, 20),
    (50, 50, 9, 5),
    (50, 50, 50, 20),
    (1, 50, 9, 0),
    (50, 50, 1, 0),  # one bias for all distances, which does not change a softmax
]
KINDS = {"numbers": (), "vectors": ("vectors",), "values": ("vectors", "values")}


def drawn(queries: int, keys: int, reach: int, kind: str, dtype: torch.dtype) -> list[Tensor]:
    """Random queries, keys, values, and tables of a kind."""
    draw = torch.Generator().manual_seed(0)
    sizes = [(2, 3, n, 8) for n in (queries, keys, keys)] + [(3, reach)]
    sizes += [{"vectors": (1, 8, reach), "values": (8, reach)}[table] for table in KINDS[kind]]
    return [torch.randn(size, generator=draw, dtype=torch.float64).to(dtype) for size in sizes]


def blocked_attention(tensors: list[Tensor], window: int = 0) -> Tensor:
    query, key, value, *tables = tensors
    module = nn.Module()
    module.layer_idx = 0
    encode = partial(replace, relative=Relative(*tables))
    module.__dict__[POSITIONS_SLOT] = SimpleNamespace(encoded=encode, wants_weights=False)
    keys = key.shape[2]
    mask = torch.tensor([1] * keys + [keys - query.shape[2], window])[None, None, None]
    return attend(module, query, key, value, mask, 0.35)[0].transpose(1, 2)


def whole_matrix(tensors: list[Tensor], window: int = 0) -> Tensor:
    query, key, value, numbers, *more = tensors
    distances = torch.arange(key.shape[2])[-query.shape[2] :, None] - torch.arange(key.shape[2])
    at = distances.clamp(0, numbers.shape[-1] - 1)
    scores = query @ key.mT * 0.35 + numbers[:, at]
    if more:
        scores = scores + torch.einsum("bhqe,eqk->bhqk", query, more[0][0][:, at])
    unseen = (distances < 0) | (distances >= (window or len(distances.T)))
    weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    output = weights @ value
    return output + torch.einsum("bhqk,eqk->bhqe", weights, more[1][:, at]) if len(more) > 1 else output


def with_gradients(attention, tensors: list[Tensor], window: int = 0) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    output = attention(leaves, window)
    return [output.detach(), *torch.autograd.grad(output.sin().sum(), leaves)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_attention_and_gradients_equal_those_of_the_full_score_matrix(sizes, kind, monkeypatch):
    monkeypatch.setitem(modeling.SCORES, "cpu", 2 * 3 * 60 * 7)
    *sizes, window = sizes
    tensors = drawn(*sizes, kind, torch.float64)
    results = [with_gradients(attention, tensors, window) for attention in (blocked_attention, whole_matrix)]
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-11)


def test_large_negative_biases_match_the_full_matrix_without_nan():
    """Weights of far keys are denormal numbers or 0."""
    for slope in (1.5, 150.0):
        numbers = -slope * torch.arange(300.0).expand(3, -1)
        tensors = [*drawn(300, 300, 1, "numbers", torch.float32)[:3], numbers]
        results = [with_gradients(attention, tensors) for attention in (blocked_attention, whole_matrix)]
        for one, other in zip(*results, strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 5e-6), (torch.bfloat16, 5e-2)])
def test_float32_and_bfloat16_results_stay_close_to_float64(dtype, apart):
    tensors = drawn(300, 300, 20, "values", dtype)
    tables = [x.float() for x in tensors[3:]]
    output = blocked_attention([*tensors[:3], *tables])
    assert output.dtype == dtype
    exact = whole_matrix([x.double() for x in (*tensors[:3], *tables)])
    assert (output.double() - exact).abs().max() < apart


def test_autocast_does_not_change_outputs_or_gradients():
    tensors = drawn(300, 300, 20, "values", torch.float32)
    wanted = with_gradients(blocked_attention, tensors)

    def under_autocast(*given) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return blocked_attention(*given)

    got = with_gradients(under_autocast, tensors)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
