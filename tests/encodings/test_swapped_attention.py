"""Attention of swapped models: masks, precisions, adapters, devices and other architectures."""

import pytest
import torch
from swaps import IDS, put
from tiny_models import tiny_model

import ropepatch
from ropepatch import RopepatchError
from ropepatch.attention.modeling_position_remapping import Sight
from ropepatch.encodings.encoding import AttentionInputs


def test_a_fully_masked_row_changes_no_key_positions_of_others():
    mask = torch.zeros(2, 1, 3, 8, dtype=torch.bool)
    mask[1, 0] = torch.ones(3, 8).tril(2).bool()
    query, key = torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 8, 4)
    sight = Sight.of(mask, query, key, torch.tensor([[2, 3, 4]]))
    assert sight.keys[1, :5].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["alibi", "t5", "shaw", "transformer-xl"])
@torch.no_grad()
def test_large_attention_scores_in_float16_give_finite_logits(name):
    model = tiny_model("llama").half()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(60)
        layer.self_attn.k_proj.weight.mul_(60)
    with ropepatch.swap(model, name):
        assert model(IDS).logits.isfinite().all()


@pytest.mark.parametrize("family", ["gemma", "granite"])
def test_swap_rejects_absolute_encodings_where_the_model_scales_its_embeddings(family):
    model = tiny_model(family)
    if family == "granite":
        model.config.embedding_multiplier = 12.0
    with pytest.raises(RopepatchError, match=f"{family} scales its embeddings"):
        ropepatch.swap(model, "sinusoidal")
    ropepatch.swap(model, "alibi").remove()


@pytest.mark.parametrize("name", ["t5", "alibi"])
def test_encoding_tensors_follow_the_tokens_to_another_device(model, name):
    """On the meta device, a tensor of another device would raise an error."""
    module, positions = put(model, name).module, torch.zeros(1, 2, dtype=torch.long)
    inputs = AttentionInputs(
        *torch.zeros(3, 1, 4, 2, 16, device="meta"), positions, positions, 0, 1.0
    )
    assert module(inputs).relative.numbers.device.type == "meta"
