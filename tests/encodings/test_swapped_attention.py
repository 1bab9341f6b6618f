"""What the attention of a swapped model makes of masks, precisions, adapters and unlike models."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from transformers import DynamicCache

import ropepatch
from ropepatch import ENCODINGS, RopepatchError
from ropepatch.encodings.attention import places_of

REQUIRED = {"normalised": {"length": 64}, "nope-layers": {"every": 2}}
# Of the second half of a row, after a first half in the cache.
MASKS = {
    "padded behind": [[1] * 12, [1] * 9 + [0] * 3],
    "a hole in the cache": [[1] * 12, [1] * 4 + [0] * 2 + [1] * 6],
    "a hole and padding ahead": [[1] * 12, [0] * 2 + [1] * 2 + [0] * 2 + [1] * 6],
    "one token alone": [[1] * 12, [0] * 11 + [1]],
}


@pytest.fixture(scope="module")
def model():
    """Whoever changes it changes it back."""
    return tiny_model("llama")


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", [*ENCODINGS])
@torch.no_grad()
def test_tokens_stand_where_their_position_ids_say_whatever_is_padding(model, ids, name, mask):
    mask = torch.tensor(mask)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with ropepatch.swap(model, name, **REQUIRED.get(name, {})):
        cache = DynamicCache(config=model.config)
        parts = [
            model(
                ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                past_key_values=cache,
                use_cache=True,
            ).logits
            for begin, end in ((0, 6), (6, 12))
        ]
        for row in range(2):
            real = mask[row].bool()
            alone = model(ids[row][real][None], use_cache=False).logits[0]
            assert torch.allclose(torch.cat(parts, 1)[row][real], alone, atol=2e-4)


def test_an_empty_row_and_a_static_cache_leave_the_other_rows_alone():
    mask = torch.zeros(2, 1, 3, 8, dtype=torch.bool)
    mask[1, 0] = torch.ones(3, 8).tril(2).bool()
    query, key = torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 8, 4)
    places = places_of(query, key, mask, torch.tensor([[2, 3, 4]]))
    assert places.keys[1, :5].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["alibi", "t5", "shaw", "transformer-xl"])
@torch.no_grad()
def test_large_scores_in_half_precision_stay_finite(ids, name):
    model = tiny_model("llama").half()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(60)
        layer.self_attn.k_proj.weight.mul_(60)
    with ropepatch.swap(model, name):
        assert model(ids).logits.isfinite().all()


@pytest.mark.parametrize("name", ["alibi", "t5", "shaw", "transformer-xl"])
@torch.no_grad()
def test_biases_are_float32_under_autocast(model, ids, name, monkeypatch):
    seen = []
    scores = ropepatch.encodings.attention._ScoredAttention._scores

    def recorded(attention, query, rows):
        seen.append(attention.attended.bias(rows).dtype)
        return scores(attention, query, rows)

    monkeypatch.setattr(ropepatch.encodings.attention._ScoredAttention, "_scores", recorded)
    with ropepatch.swap(model, name), torch.autocast("cpu", torch.bfloat16):
        model(ids)
    assert set(seen) == {torch.float32}


def test_peft_cannot_train_a_copy_that_attention_does_not_see():
    model = tiny_model("llama")
    ropepatch.swap(model, "t5")
    with pytest.raises(RopepatchError, match="not copied without it") as error:
        get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["rotary_emb"]))
    assert "rotary_emb.module" in error.value.hint


def test_the_positions_of_a_copied_model_are_its_own(ids):
    model = tiny_model("llama")
    ropepatch.swap(model, "t5")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = model(ids).logits
        twin.model.rotary_emb.module.table.add_(3 * torch.randn(32, 4))
        assert torch.equal(model(ids).logits, before)
        assert not torch.allclose(twin(ids).logits, before, atol=1e-3)


@pytest.mark.parametrize("family", ["gemma", "granite"])
def test_absolute_positions_are_not_added_to_embeddings_that_the_model_scales(family):
    model = tiny_model(family)
    if family == "granite":
        model.config.embedding_multiplier = 12.0
    with pytest.raises(RopepatchError, match=f"{family} scales its embeddings"):
        ropepatch.swap(model, "sinusoidal")
    ropepatch.swap(model, "alibi").remove()


def test_parameters_follow_the_tokens_to_another_device():
    """On the meta device, where a tensor of another device would be an error."""
    model = tiny_model("llama")
    ropepatch.swap(model, "t5")
    module = model.model.rotary_emb.module
    assert module.bias(torch.zeros(2, 2, dtype=torch.long, device="meta")).device.type == "meta"
