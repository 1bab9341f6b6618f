"""Scores that are written down for a block of queries at a time end where its last query does."""

from typing import Any

import pytest
import torch
from swaps import apart, logits
from swaps import put as put_encoding
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from ropepatch.attention import map_attention, scored

TOKENS, ROWS, HEADS, LAYERS = 64, 8, 4, 2
IDS = torch.randint(3, 120, (1, TOKENS), generator=torch.Generator().manual_seed(1))


class Written(TorchDispatchMode):
    """Counts the scores that softmax reads, and those that products of matrices write in all."""

    softmax = products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._softmax.default:
            self.softmax += out.numel()
        if func is torch.ops.aten.bmm.default:
            self.products += out.numel()
        return out


@pytest.fixture(params=["alibi", "shaw", "t5", "rerope", "self-extend", "dca"])
def model(request, monkeypatch) -> PreTrainedModel:
    """A model whose scores are all written down, in blocks of `ROWS` queries."""
    model = tiny_model("llama")
    if request.param in ("alibi", "shaw", "t5"):
        put_encoding(model, request.param)
    else:
        map_attention(model, request.param, to=4 * model.config.max_position_embeddings)
    for user in ("ropepatch.attention.mapped_attention", "ropepatch.encodings.attention"):
        monkeypatch.setattr(f"{user}.DEVICES", set())
    whole = logits(model, IDS, use_cache=False)
    monkeypatch.setattr(scored, "SCORES", HEADS * TOKENS * ROWS)
    model.whole = whole
    return model


def test_a_block_writes_no_score_behind_its_last_query(model):
    with Written() as written:
        got = logits(model, IDS, use_cache=False)
    ends = sum(range(ROWS, TOKENS + 1, ROWS))
    assert 0 < written.softmax <= LAYERS * HEADS * ROWS * ends
    assert apart(got, model.whole) < 5e-5


@torch.no_grad()
def test_eager_attention_returns_weights_of_all_columns(monkeypatch):
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    put_encoding(model, "alibi")
    expected = model(IDS, output_attentions=True).attentions
    monkeypatch.setattr(scored, "SCORES", HEADS * TOKENS * ROWS)
    for one, other in zip(model(IDS, output_attentions=True).attentions, expected, strict=True):
        assert one.shape == (1, HEADS, TOKENS, TOKENS)
        assert apart(one, other) < 1e-6


def test_a_band_of_near_keys_multiplies_no_others(monkeypatch):
    """By a window of 8 a block of 8 queries sees 15 keys; the far band holds those before them."""
    model = tiny_model("llama")
    model.config.max_position_embeddings = 16
    map_attention(model, "rerope", to=TOKENS, window=8)
    monkeypatch.setattr("ropepatch.attention.mapped_attention.DEVICES", set())
    monkeypatch.setattr(scored, "SCORES", HEADS * TOKENS * ROWS)
    with Written() as written:
        logits(model, IDS, use_cache=False)
    near = ROWS * (2 * ROWS - 1) * TOKENS // ROWS
    far = ROWS * sum(range(ROWS, TOKENS, ROWS))
    read = TOKENS * model.config.head_dim
    assert written.products <= LAYERS * HEADS * (near + far + read)
