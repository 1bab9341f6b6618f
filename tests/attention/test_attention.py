"""Remapped attention equals a float64 softmax over all pairs, forward and backward."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from remapping_oracle import ORACLE, SMALL, attention, distances
from swaps import apart, logits
from swaps import put as put_encoding
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from ropepatch.attention import REMAPPINGS, make_remapping, remap_positions
from ropepatch.attention import modeling_position_remapping as modeling

INV_FREQ = 10000.0 ** -(torch.arange(4).double() / 4)


class Rotary(nn.Module):
    """Float64 cos and sin tables of positions, which may be fractional."""

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = (positions.double()[..., None] * INV_FREQ).repeat(1, 1, 2)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def attention_module(name: str | None, original: int = 1000, wants_weights: bool = False) -> nn.Module:
    """An attention module of LLaMA that holds a remapping and its rotation."""
    module = nn.Module()
    module.__class__ = type("Attention", (nn.Module,), {"__module__": modeling_llama.__name__})
    rope = modeling.RemappedRotation()
    rope.stock, rope.wants_weights = Rotary(), wants_weights
    parameters = SMALL[name] | {"log_n": False, "attention_factor": 1.0}
    rope.set_remapping(None, {"name": name, "parameters": parameters, "window": original})
    module.__dict__[modeling.POSITIONS_SLOT] = rope
    return module


def drawn(queries: int, keys: int, heads: int = 3, shared: int = 3) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = (heads, queries), (shared, keys), (shared, keys)
    return [torch.randn(2, *size, 8, generator=draw, dtype=torch.float64) for size in sizes]


def short_mask_of(first: int, keys: int, window: int = 0) -> Tensor:
    """The mask that `short_mask` returns for a sequence without padding."""
    return torch.tensor([1] * keys + [first, window])[None, None, None]


def remapped_attention(name: str, tensors: list[Tensor], window: int = 0) -> Tensor:
    query, key, value = tensors
    first = key.shape[2] - query.shape[2]
    positions = torch.arange(first, key.shape[2])[None]
    mask = short_mask_of(first, key.shape[2], window)
    # An original length below the sliding window, so that attention is remapped.
    module = attention_module(name, original=min(window - 1, 1000))
    return modeling.attend(module, query, key, value, mask, 0.35, position_ids=positions)[0].transpose(1, 2)


def set_block_rows(monkeypatch: pytest.MonkeyPatch, rows: int, keys: int, heads: int = 3) -> None:
    monkeypatch.setitem(modeling.SCORES, "cpu", 2 * heads * keys * rows)


def oracle_attention(name: str, tensors: list[Tensor], window: int = 0) -> np.ndarray:
    """The oracle's output for equal numbers of queries and keys."""
    keys = tensors[1].shape[2]
    table = distances(ORACLE[name](**SMALL[name]), keys)
    if window:
        table[np.subtract.outer(np.arange(keys), np.arange(keys)) >= window] = np.nan
    return attention(*(x.numpy() for x in tensors), table, INV_FREQ.numpy(), 0.35)


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("name", REMAPPINGS)
def test_remapped_attention_equals_softmax_over_its_effective_distances(name, window, monkeypatch):
    """In one block and in several, for all queries, the last nine, and the last one."""
    tensors = drawn(64, 64, heads=6)
    expected = oracle_attention(name, tensors, window)
    for rows in (64, 7):
        set_block_rows(monkeypatch, rows, 64, heads=6)
        for queries in (64, 9, 1):
            output = remapped_attention(name, [tensors[0][:, :, -queries:], *tensors[1:]], window)
            np.testing.assert_allclose(output.numpy(), expected[:, :, -queries:], atol=1e-12)


@pytest.mark.parametrize("name", ["self-extend", "dca", "lampe", "lambda"])
@pytest.mark.parametrize("rows", [40, 7])
def test_gradients_of_remapped_attention_equal_those_of_the_full_score_matrix(name, rows, monkeypatch):
    bands = make_remapping(name, **SMALL[name]).bands()
    set_block_rows(monkeypatch, rows, 40)

    def rotated(x: Tensor, places: Tensor) -> Tensor:
        return modeling.rotate(attention_module(name), x, *Rotary()(x, places[None]))

    def whole_matrix(tensors: list[Tensor]) -> Tensor:
        query, key, value = tensors
        places = torch.arange(40)
        scores = torch.full((2, 3, 40, 40), -torch.inf, dtype=torch.float64)
        for band in bands:
            own = rotated(query, band.query(places)) @ rotated(key, band.key(places)).mT * 0.35
            seen = band.holds(places, places) & (places[:, None] - places < 13)
            scores = torch.where(seen, own, scores)
        return scores.softmax(-1) @ value

    grads = []
    for attend in (lambda x: remapped_attention(name, x, window=13), whole_matrix):
        tensors = [x.requires_grad_() for x in drawn(40, 40)]
        output = attend(tensors)
        output.square().sum().backward()
        grads.append([output.detach(), *(x.grad for x in tensors)])
    for one, other in zip(*grads, strict=True):
        assert torch.allclose(one, other, atol=1e-11)


def test_padded_queries_have_finite_outputs_and_zero_query_gradients():
    query, key, value = (x.requires_grad_() for x in drawn(6, 6))
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0])[None, None, None]
    positions = (mask[0, 0, :, :6].cumsum(-1) - 1).clamp(min=0)
    output, _ = modeling.attend(attention_module("rerope"), query, key, value, mask, position_ids=positions)
    output.sum().backward()
    assert output.isfinite().all()
    assert torch.equal(query.grad[:, :, :2], torch.zeros(2, 3, 2, 8, dtype=torch.float64))
    assert all(x.grad.isfinite().all() for x in (query, key, value))


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_float32_and_bfloat16_attention_stay_close_to_float64(dtype, apart):
    tensors = drawn(64, 64)
    output = remapped_attention("self-extend", [x.to(dtype) for x in tensors])
    assert output.dtype == dtype
    assert (output.double() - remapped_attention("self-extend", tensors)).abs().max() < apart


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_log_n_and_the_attention_factor_multiply_the_scores(factor):
    query, key, value = drawn(64, 64)
    module = attention_module("rerope", original=16)
    module.__dict__[modeling.POSITIONS_SLOT].modifiers = {"log_n": True, "attention_factor": factor}
    scale = [max(1.0, math.log(m + 1) / math.log(16)) * factor**2 for m in range(64)]
    expected = oracle_attention(
        "rerope", [query * torch.tensor(scale, dtype=torch.float64)[:, None], key, value]
    )
    output, _ = modeling.attend(module, query, key, value, None, 0.35)
    np.testing.assert_allclose(output.transpose(1, 2).numpy(), expected, atol=1e-12)


def test_attention_weights_cover_all_keys_for_any_block_size(monkeypatch):
    found = []
    for rows in (64, 7):
        set_block_rows(monkeypatch, rows, 64)
        module = attention_module("self-extend", wants_weights=True)
        output, weights = modeling.attend(module, *drawn(64, 64), None, 0.35)
        assert torch.allclose(weights @ drawn(64, 64)[2], output.transpose(1, 2), atol=1e-12)
        found.append(weights)
    assert found[0].shape == (2, 3, 64, 64)
    assert torch.allclose(*found, atol=1e-14)


# The scores that are computed

TOKENS, ROWS, HEADS, LAYERS = 64, 8, 4, 2
IDS = torch.randint(3, 120, (1, TOKENS), generator=torch.Generator().manual_seed(1))


class Computed(TorchDispatchMode):
    """Counts the elements of all softmax results and of all batched matrix products."""

    softmax = products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._softmax.default:
            self.softmax += out.numel()
        if func is torch.ops.aten.bmm.default and args[0].shape[-1] > 1:  # not a position times a frequency
            self.products += out.numel()
        return out


@pytest.fixture(params=["alibi", "shaw", "t5", "rerope", "self-extend", "dca"])
def model(request) -> PreTrainedModel:
    model = tiny_model("llama")
    if request.param in ("alibi", "shaw", "t5"):
        put_encoding(model, request.param)
    else:
        model.config.max_position_embeddings = 16
        remap_positions(model, request.param, to=TOKENS)
    return model


def test_a_block_computes_no_scores_after_its_last_query(model, monkeypatch):
    whole = logits(model, IDS, use_cache=False)
    monkeypatch.setitem(modeling.SCORES, "cpu", HEADS * TOKENS * ROWS)
    with Computed() as computed:
        got = logits(model, IDS, use_cache=False)
    ends = sum(range(ROWS, TOKENS + 1, ROWS))
    assert 0 < computed.softmax <= LAYERS * HEADS * ROWS * ends
    assert apart(got, whole) < 5e-5


def test_packed_documents_reduce_the_number_of_computed_scores(model, monkeypatch):
    """Four documents of 16 tokens need only the blocks on or below the diagonal of each."""
    monkeypatch.setitem(modeling.SCORES, "cpu", HEADS * TOKENS * ROWS)
    with Computed() as computed:
        logits(model, IDS, position_ids=torch.arange(16).repeat(4)[None], use_cache=False)
    assert computed.softmax <= LAYERS * HEADS * 4 * ROWS * (8 + 16)


def test_each_band_of_rerope_multiplies_only_its_own_keys(monkeypatch):
    """With window=8, a block of 8 queries attends to 15 near keys; the far band covers earlier keys."""
    model = tiny_model("llama")
    model.config.max_position_embeddings = 16
    remap_positions(model, "rerope", to=TOKENS, window=8)
    monkeypatch.setitem(modeling.SCORES, "cpu", HEADS * TOKENS * ROWS)
    with Computed() as computed:
        logits(model, IDS, use_cache=False)
    near = ROWS * (2 * ROWS - 1) * TOKENS // ROWS
    far = ROWS * sum(range(ROWS, TOKENS, ROWS))
    outputs = TOKENS * model.config.head_dim
    assert computed.products <= LAYERS * HEADS * (near + far + outputs)
