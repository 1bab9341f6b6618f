"""Remapped and encoded attention computes only the scores of visible keys."""

import pytest
import torch
from swaps import apart, logits, put
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

import ropepatch
from ropepatch.attention import modeling_position_remapping as modeling

TOKENS, ROWS, HEADS, LAYERS = 64, 8, 4, 2
IDS = torch.randint(3, 120, (1, TOKENS), generator=torch.Generator().manual_seed(1))


class Computed(TorchDispatchMode):
    """Counts the elements of all softmax results and of all batched matrix products."""

    softmax = products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._softmax.default:
            self.softmax += out.numel()
        if (
            func is torch.ops.aten.bmm.default and args[0].shape[-1] > 1
        ):  # not a position times a frequency
            self.products += out.numel()
        return out


@pytest.fixture(params=["alibi", "shaw", "rerope", "dca"])
def model(request):
    model = tiny_model("llama", max_position_embeddings=16)
    put(model, request.param)
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
        logits(
            model, IDS, position_ids=torch.arange(16).repeat(4)[None], use_cache=False
        )
    assert computed.softmax <= LAYERS * HEADS * 4 * ROWS * (8 + 16)


def test_each_band_of_rerope_multiplies_only_its_own_keys(monkeypatch):
    """With window=8, a block of 8 queries attends to 15 near keys; the far band covers earlier keys."""
    model = tiny_model("llama")
    model.config.max_position_embeddings = 16
    ropepatch.patch(model, "rerope", to=TOKENS, window=8)
    monkeypatch.setitem(modeling.SCORES, "cpu", HEADS * TOKENS * ROWS)
    with Computed() as computed:
        logits(model, IDS, use_cache=False)
    near = ROWS * (2 * ROWS - 1) * TOKENS // ROWS
    far = ROWS * sum(range(ROWS, TOKENS, ROWS))
    outputs = TOKENS * model.config.head_dim
    assert computed.products <= LAYERS * HEADS * (near + far + outputs)
