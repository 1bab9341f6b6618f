"""Remapped and swapped models give the same logits in chunks, with padding, packed, or in one pass."""

import pytest
import torch
from loss_models import Largest
from swaps import IDS, ONE, apart, every_change, logits, put, sliding
from tiny_models import into
from transformers import DynamicCache, StaticCache

from ropepatch import ENCODINGS
from ropepatch.attention import REMAPPINGS
from ropepatch.attention import modeling_position_remapping as modeling

CHUNKS = [13, 1, 1, 9, 16]
TOKENS = 30
MASKS = {  # of the second row
    "left padding": [0] * 11 + [1] * 19,
    "right padding": [1] * 24 + [0] * 6,
    "a hole in the cache": [1] * 4 + [0] * 2 + [1] * 24,
    "a hole and left padding": [0] * 2 + [1] * 2 + [0] * 2 + [1] * 24,
    "a single token": [0] * 29 + [1],
}


def cached(model, sizes, cache=None):
    """The logits of `ONE`, processed in pieces with a KV cache."""
    cache = cache or DynamicCache(config=model.config)
    return torch.cat(
        [logits(model, piece, **into(cache)) for piece in ONE.split(sizes, 1)], 1
    )


@every_change
def test_logits_in_cached_chunks_equal_those_of_one_pass(model, name):
    put(model, name)
    expected = logits(model)
    for cache in (None, StaticCache(config=model.config, max_cache_len=56)):
        assert apart(cached(model, CHUNKS, cache), expected) < 5e-5


@pytest.mark.parametrize(
    "name", [*REMAPPINGS, "learned", "alibi", "shaw", "rope", "xpos"]
)
def test_generation_with_padding_matches_each_unpadded_row(model, name):
    """Rows of 24 and 17 tokens, the shorter one padded on the left; 9 tokens are generated."""
    put(model, name)
    mask = (torch.arange(24) >= torch.tensor([[7], [0]])).long()
    for cache in ({}, {"cache_implementation": "static", "disable_compile": True}):
        out = model.generate(
            IDS[:, :24] * mask, attention_mask=mask, max_new_tokens=9, do_sample=False, eos_token_id=None,
            pad_token_id=0, output_logits=True, return_dict_in_generate=True, **cache,
        )  # fmt: skip
        generated = torch.stack(out.logits, 1)
        for row, padding in enumerate((7, 0)):
            unpadded = logits(model, out.sequences[row : row + 1, padding:])[0, -10:-1]
            assert apart(generated[row], unpadded) < 5e-5
            assert torch.equal(unpadded.argmax(-1), out.sequences[row, -9:])


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        *(
            (name, mask)
            for name in ("self-extend", "alibi", "rope")
            for mask in MASKS.values()
        ),
        *(
            (name, MASKS["a hole and left padding"])
            for name in ("dca", "lampe", *ENCODINGS)
        ),
    ],
    ids=str,
)
def test_padding_and_holes_change_no_logits_of_real_tokens(model, name, mask):
    """Processed in two parts; with a remapping also in one pass, and token by token."""
    put(model, name)
    ids, seen = IDS[:, :TOKENS], torch.tensor([[1] * TOKENS, mask])
    positions = (seen.cumsum(-1) - 1).masked_fill(
        seen == 0, 1
    )  # as `generate` fills them
    for ends in [(15, 30)] + [(30,), (15, *range(16, 31))] * (name in REMAPPINGS):
        cache, parts = DynamicCache(config=model.config), []
        for begin, end in zip((0, *ends), ends, strict=False):
            where = {
                "attention_mask": seen[:, :end],
                "position_ids": positions[:, begin:end],
            }
            parts.append(logits(model, ids[:, begin:end], **where, **into(cache)))
        for row, text, real in zip(torch.cat(parts, 1), ids, seen.bool(), strict=True):
            alone = logits(model, text[real][None], use_cache=False)[0]
            assert apart(row[real], alone) < 2e-4


@pytest.mark.parametrize("sliding_window", [None, 20])
@pytest.mark.parametrize(
    "name", ["self-extend", "alibi", "shaw", "transformer-xl", "sinusoidal", "rope"]
)
def test_packed_documents_have_the_logits_of_separate_documents(
    name, sliding_window, monkeypatch
):
    """Rows of two, one and three documents, in one block and in blocks of seven queries."""
    model = sliding(sliding_window)
    put(model, name)
    lengths = [[18, 22], [40], [5, 1, 34]]
    ids = torch.cat((IDS, IDS[:1].flip(1)))
    positions = torch.stack(
        [torch.cat([torch.arange(n) for n in row]) for row in lengths]
    )
    for scores in (modeling.SCORES["cpu"], 3 * 4 * 40 * 7):
        monkeypatch.setitem(modeling.SCORES, "cpu", scores)
        packed = logits(model, ids, position_ids=positions, use_cache=False)
        for row, text, parts in zip(packed, ids, lengths, strict=True):
            separate = [
                logits(model, part[None], use_cache=False) for part in text.split(parts)
            ]
            assert apart(row[None], torch.cat(separate, 1)) < 5e-5


CONSECUTIVE = torch.arange(384)
PADDED = (torch.tensor([[7], [0]]) <= CONSECUTIVE).long()
PACKED = torch.cat((CONSECUTIVE[:150], CONSECUTIVE[:234])).expand(2, -1)
A_GAP = (CONSECUTIVE + (CONSECUTIVE > 9)).expand(2, -1)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("self-extend", {"attention_mask": PADDED}),
        ("dca", {"position_ids": PACKED}),
        ("rope", {}),
        ("t5", {"position_ids": PACKED}),
        ("shaw", {"attention_mask": PADDED}),
        *(
            (name, {"position_ids": A_GAP, "attention_mask": torch.ones_like(A_GAP)})
            for name in ("t5", "transformer-xl")
        ),
    ],
)
def test_no_tensor_reaches_the_size_of_the_full_attention_matrix(
    model, name, inputs, monkeypatch
):
    monkeypatch.setitem(modeling.SCORES, "cpu", 1 << 17)
    put(model, name)
    ids = torch.randint(3, 120, (2, 384), generator=torch.Generator().manual_seed(0))
    with Largest() as largest:
        out = model(ids, **inputs, use_cache=False, logits_to_keep=1)
        out.logits.sum().backward()
    assert largest.numel < 384 * 384


@pytest.mark.parametrize(
    "name",
    ["self-extend", "dca", "lampe", "learned", "alibi", "t5", "shaw", "transformer-xl"],
)
def test_gradients_do_not_depend_on_blocks_or_checkpointing(model, name, monkeypatch):
    """A forward pass of another text before the backward pass changes none of them."""

    def gradients(forward_between=False):
        model.zero_grad()
        loss = model(IDS, labels=IDS, use_cache=False).loss
        if forward_between:
            logits(model, ONE, use_cache=False)
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    put(model, name)
    model.train()
    one_block = gradients()
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})
    for one, other in zip(gradients(forward_between=True), one_block, strict=True):
        assert torch.equal(one, other)
    monkeypatch.setitem(modeling.SCORES, "cpu", 2 * 4 * 40 * 7)
    for one, other in zip(gradients(), one_block, strict=True):
        assert apart(one, other) < 1e-4 * float(other.abs().max()) + 1e-6


@pytest.mark.parametrize(
    "name", ["self-extend", "dca", "lambda", "learned", "alibi", "shaw", "rope"]
)
def test_a_sliding_window_equals_an_explicit_mask_of_older_keys(name):
    whole, model = sliding(None), sliding(20)
    put(whole, name)
    put(model, name)
    age = torch.arange(40)[:, None] - torch.arange(40)
    expected = logits(whole, attention_mask=((age >= 0) & (age < 20))[None, None])
    assert apart(logits(whole), expected) > 1e-2
    assert apart(logits(model), expected) < 5e-5
    assert apart(cached(model, CHUNKS), expected) < 5e-5
