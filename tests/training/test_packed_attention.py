from contextlib import suppress

import pytest
import torch
from loss_models import Largest
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from ropepatch.errors import RopepatchError
from ropepatch.training import packed_attention as attention
from ropepatch.training.adapter import can_offload, recompute_activations
from ropepatch.training.packed_attention import packed_attention, segments

SLIDING = {"sliding_window": 7}
FAMILIES = {
    "llama": {},
    "llama with as many keys as queries": {"num_key_value_heads": 4},
    "qwen2 with windows": SLIDING
    | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2},
    "qwen3": {},
    "mistral": SLIDING,
    "gemma3_text": SLIDING,
    "phi3": SLIDING,
    "granite": {},
}
DOCUMENTS = [13, 1, 22]


def build(family="llama", *, seed=0, **changes):
    return tiny_model(
        family.split()[0], seed=seed, **FAMILIES.get(family, {}) | changes
    )


def tokens(count=36, rows=1):
    return torch.randint(
        3, 120, (rows, count), generator=torch.Generator().manual_seed(1)
    )


def packed(lengths, positions=None):
    """What a row is passed with, positions included."""
    each = torch.cat([torch.arange(length) for length in lengths])
    places = {"position_ids": (each if positions is None else positions)[None]}
    return {"use_cache": False, **places, **segments(lengths)}


def alone(model, ids, lengths):
    """Logits [1, T, V] of each document run separately."""
    return torch.cat(
        [model(one, use_cache=False).logits for one in ids.split(lengths, 1)], 1
    )


def gradients(model, logits):
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad((logits * weights).mean(), trained))


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0, atol=1e-5 * max(1, other.abs().max().item())
        )


# What it computes


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(
    ("family", "lengths", "block"),
    [
        *((family, DOCUMENTS, 1024) for family in FAMILIES),
        ("llama", [12] * 3, 1024),
        ("mistral", [36], 1024),
        ("mistral", [36], 5),  # a window in several blocks
        ("mistral", DOCUMENTS, 5),
    ],
)
def test_packed_documents_are_read_as_each_alone(
    family, lengths, block, recomputed, monkeypatch
):
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    model = build(family).train()
    expected = alone(model, tokens(), lengths)
    slopes = gradients(model, expected)
    if recomputed:
        recompute_activations(model)
    with packed_attention(model):
        got = model(tokens(), **packed(lengths)).logits
        assert_same([got, *gradients(model, got)], [expected, *slopes])
        if len(lengths) > 1:
            positions = packed(lengths)["position_ids"][0]
            assert (
                model(tokens(), **packed([36], positions)).logits - got
            ).abs().max() > 0.1


@pytest.mark.skipif(not can_offload(), reason="transformers cannot offload")
def test_activations_held_on_the_host_give_the_same_gradients(monkeypatch):
    held = []

    def on_host(**given):
        held.append(given)
        return torch.autograd.graph.save_on_cpu()  # pinned memory needs a GPU

    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", on_host)
    model = build("llama").train()
    expected = gradients(model, model(tokens()).logits)
    recompute_activations(model, offload=True)
    assert_same(gradients(model, model(tokens()).logits), expected)
    assert len(held) == model.config.num_hidden_layers


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_checkpointed_backward_pass_outside_of_the_block_fails(family):
    model = build(family).train()
    recompute_activations(model)
    with packed_attention(model):
        logits = model(tokens(), **packed([13, 23])).logits
    with pytest.raises(RuntimeError):
        logits.sum().backward()


@pytest.mark.parametrize(
    ("family", "lengths"),
    [("llama", [4096]), ("mistral", [4096]), ("mistral", [100, 3900, 96])],
    ids=str,
)
def test_no_tensor_grows_with_the_square_of_the_tokens(family, lengths, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", 64)
    model = build(family, vocab_size=128, num_hidden_layers=1)
    with Largest() as counter, packed_attention(model):
        model(tokens(sum(lengths)), **packed(lengths)).logits.sum().backward()
    assert counter.numel == 4096 * 128  # the logits


# Errors


@pytest.mark.parametrize(
    "changes",
    [
        {"cu_seq_lens_q": None},
        {"attention_mask": torch.ones(1, 36, dtype=torch.long)},
        {"attention_mask": torch.zeros(1, 1, 36, 36)},
        *({name: torch.ones(1)} for name in ("softcap", "s_aux", "position_bias")),
    ],
)
def test_what_is_no_packed_row_is_refused(changes):
    model = build()
    refused = pytest.raises(RopepatchError, match="packed attention got")
    with packed_attention(model), torch.no_grad(), refused:
        model(**{"input_ids": tokens()} | packed([36]) | changes)


def not_causal():
    config = build().config
    config.is_causal = False
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_model("llama4_text"),  # chunked attention
        lambda: tiny_model(
            "gemma2"
        ),  # newer releases refuse sdpa, older ones drop the cap of scores
        not_causal,
    ],
)
def test_models_that_do_more_than_attend_causally_are_refused(make):
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(RopepatchError, match="packed rows"), packed_attention(model):
        pytest.fail("entered")
    assert model.config._attn_implementation == before


# Switching


def test_other_models_are_left_alone_and_errors_restore_one(tmp_path):
    model, other = build(), build(seed=1)
    with torch.no_grad():
        expected = [one(tokens()).logits for one in (model, other)]
        with suppress(ZeroDivisionError), packed_attention(model):
            assert torch.equal(other(tokens()).logits, expected[1])
            with packed_attention(other):
                pass
            names = [one.config._attn_implementation for one in (model, other)]
            assert names == [attention.NAME, "sdpa"]
            model.save_pretrained(tmp_path)
            _ = 1 / 0
        assert torch.equal(model(tokens()).logits, expected[0])
    assert attention.NAME not in (tmp_path / "config.json").read_text()
