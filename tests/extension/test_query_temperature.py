"""Ministral 3: the query at m is multiplied by 1 + beta ln(1 + floor(m / L)), whatever the RoPE scaling."""

import numpy as np
import pytest
import torch
from oldest import needs
from tiny_models import tiny_model

import ropepatch
from ropepatch import plan

BETA, WINDOW = 0.1, 24  # this L is not that of RoPE
POSITIONS = torch.tensor([[0, 1, 23, 24, 47, 48, 63, 64, 200, 255]])


def growth(window: int) -> np.ndarray:
    """The factor of each query, from the formula in float64."""
    return 1 + BETA * np.log1p(np.floor(POSITIONS[0].numpy() / window))


def grown(model: torch.nn.Module) -> np.ndarray:
    """The same factors from the function of stock transformers, with the config of each layer."""
    from transformers.models.ministral3 import modeling_ministral3 as stock

    ropes = [layer.self_attn.config.rope_parameters for layer in model.model.layers]
    scales = [
        stock.get_llama_4_attn_scale(
            POSITIONS,
            rope["llama_4_scaling_beta"],
            rope["original_max_position_embeddings"],
        )
        for rope in ropes
    ]
    assert all(torch.equal(scale, scales[0]) for scale in scales)
    return scales[0].flatten().numpy()


@pytest.fixture(scope="module")
def model():
    needs("ministral3")
    small = tiny_model("ministral3")
    small.config.rope_parameters |= {"original_max_position_embeddings": WINDOW}
    return small


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(1, 1 + POSITIONS.shape[1])[None]
    with torch.no_grad():
        return model(
            ids,
            position_ids=POSITIONS,
            attention_mask=torch.ones_like(ids),
            use_cache=False,
        ).logits


def test_an_extended_checkpoint_extends_again_with_its_query_temperature(
    model, tmp_path
):
    model.save_pretrained(tmp_path / "source")
    for place, to in (("source", 128), ("once", 256)):
        out = {"source": "once", "once": "twice"}[place]
        ropepatch.extend(plan(tmp_path / place, to=to, method="yarn"), tmp_path / out)
    twice = type(model).from_pretrained(tmp_path / "twice")
    assert twice.config.max_position_embeddings == 256
    assert grown(twice) == pytest.approx(growth(WINDOW), rel=1e-6)
