"""A model of another attention reads a text in pieces, padded, by a cache or at once: always the same."""

from collections.abc import Iterable
from typing import Any

import torch
from caches import into
from swaps import IDS, ONE, apart, logits
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

CHUNKS = [13, 1, 1, 9, 16]
TOKENS = 30
# Of the second row, read in several parts.
MASKS = {
    "padded ahead": [0] * 11 + [1] * 19,
    "padded behind": [1] * 24 + [0] * 6,
    "a hole in the cache": [1] * 4 + [0] * 2 + [1] * 24,
    "a hole and padding ahead": [0] * 2 + [1] * 2 + [0] * 2 + [1] * 24,
    "one token alone": [0] * 29 + [1],
}


def cached(model: PreTrainedModel, sizes: list[int], cache: Any = None) -> Tensor:
    """The logits of `ONE` that is read in pieces."""
    cache = cache or DynamicCache(config=model.config)
    return torch.cat([logits(model, piece, **into(cache)) for piece in ONE.split(sizes, 1)], 1)


def check_caches(model: PreTrainedModel) -> None:
    """Reading through a cache of either kind equals reading at once."""
    expected = logits(model)
    for sizes in (CHUNKS, [1] * 40):
        static = StaticCache(config=model.config, max_cache_len=56)
        for cache in (None, static):
            assert apart(cached(model, sizes, cache), expected) < 5e-5


def check_padding(model: PreTrainedModel, mask: list[int], ways: Iterable[tuple[int, ...]]) -> None:
    """Tokens stand where their position ids say, whatever is padding; a way is where each part ends."""
    ids, seen = IDS[:, :TOKENS], torch.tensor([[1] * TOKENS, mask])
    positions = (seen.cumsum(-1) - 1).clamp(min=0)
    for ends in ways:
        cache, parts = DynamicCache(config=model.config), []
        for begin, end in zip((0, *ends), ends, strict=False):
            where = {"attention_mask": seen[:, :end], "position_ids": positions[:, begin:end]}
            parts.append(logits(model, ids[:, begin:end], **where, **into(cache)))
        for row, text, real in zip(torch.cat(parts, 1), ids, seen.bool(), strict=True):
            assert apart(row[real], logits(model, text[real][None], use_cache=False)[0]) < 2e-4


def check_generation(model: PreTrainedModel) -> None:
    """Generated logits are those of each row read alone, whatever the padding and the cache.

    Rows of 24 and 17 tokens, the shorter one padded on the left; 9 tokens are generated.
    """
    mask = (torch.arange(24) >= torch.tensor([[7], [0]])).long()
    for cache in ({}, {"cache_implementation": "static", "disable_compile": True}):
        out = model.generate(
            IDS[:, :24] * mask, attention_mask=mask, max_new_tokens=9, do_sample=False, eos_token_id=None,
            pad_token_id=0, output_logits=True, return_dict_in_generate=True, **cache,
        )  # fmt: skip
        said = torch.stack(out.logits, 1)
        for row, padding in enumerate((7, 0)):
            alone = logits(model, out.sequences[row : row + 1, padding:])[0, -10:-1]
            assert apart(said[row], alone) < 5e-5
            assert torch.equal(alone.argmax(-1), out.sequences[row, -9:])


@torch.no_grad()
def check_weights(model: PreTrainedModel, expected: Tensor) -> None:
    """A model within eager attention returns its weights, and the logits that sdpa gave."""
    out = model(ONE, output_attentions=True)
    assert apart(out.logits, expected) < 1e-5
    assert [weights.shape for weights in out.attentions] == [(1, 4, 40, 40)] * 2
    for weights in out.attentions:
        assert apart(weights.sum(-1), torch.ones(1, 4, 40)) < 1e-5
        assert weights.triu(1).abs().max() == 0


def shut_out(window: int) -> Tensor:
    """The mask [1, 1, T, T] that shows a query the last `window` keys."""
    age = torch.arange(40)[:, None] - torch.arange(40)
    return ((age >= 0) & (age < window))[None, None]


def check_sliding(model: PreTrainedModel, expected: Tensor) -> None:
    """A sliding window gives the logits of its mask, through a cache too."""
    assert apart(logits(model), expected) < 5e-5
    assert apart(cached(model, CHUNKS), expected) < 5e-5
