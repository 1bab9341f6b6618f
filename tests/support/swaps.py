"""Tiny models with swapped encodings or remappings whose parameters affect a text of 40 tokens."""

import io

import pytest
import torch
from peft import LoraConfig, get_peft_model
from remapping_oracle import SMALL
from tiny_models import tiny_model

from ropepatch.attention import REMAPPINGS, make_remapping
from ropepatch.attention.remapped import remap_positions
from ropepatch.encodings import ENCODINGS
from ropepatch.encodings.swapping import swap

# Values at which every part of an encoding affects a model of two layers on 40 tokens.
PARAMETERS = {
    "normalised": {"length": 48},
    "learned": {"rows": 48},
    "shaw": {"clip": 5},
    "t5": {"buckets": 8, "max_distance": 24},
    "xpos": {"scale_base": 32.0},
    "axial": {"grid": (5,)},
    "nope-layers": {"every": 2},
    "drope": {"temperature": 1.5},
}
TRAINED = ["learned", "shaw", "transformer-xl", "t5"]
IDS = torch.randint(3, 120, (2, 40), generator=torch.Generator().manual_seed(1))
ONE = IDS[:1]

# One of every kind; the others run in the sweep
OFTEN = ["integer", "nezha", "rope", "nope", *TRAINED]
BY_NAME = [
    name if name in OFTEN else pytest.param(name, marks=pytest.mark.sweep)
    for name in ENCODINGS
]
every_change = pytest.mark.parametrize("name", [*REMAPPINGS, *BY_NAME])


def put(model, name, **parameters):
    """Apply a remapping with pairs in every band, or an encoding with large parameters of a fixed seed."""
    if name in REMAPPINGS:
        to = model.config.max_position_embeddings + 1
        distances = make_remapping(name, **SMALL[name] | parameters)
        return remap_positions(model, distances, to=to)
    torch.manual_seed(3)
    handle = swap(model, name, **PARAMETERS.get(name, {}) | parameters)
    with torch.no_grad():
        for parameter in handle.module.parameters():
            parameter.mul_(20)
    return handle


def sliding(window, **more):
    """A Mistral model of 16 tokens, with the same weights for any sliding window."""
    sizes = {"sliding_window": window, "max_position_embeddings": 16}
    return tiny_model("mistral", **sizes, **more)


@torch.no_grad()
def logits(model, ids=ONE, **inputs):
    return model(ids, **inputs).logits


def lora(model, **more):
    """The model with a random adapter of a fixed seed."""
    torch.manual_seed(0)
    config = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **more,
    )
    return get_peft_model(model, config)


def pickled(model):
    """The model after torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def apart(one, other):
    return float((one.float() - other.float()).abs().max())


def cast(model, dtype):
    """As `from_pretrained` would have loaded it: the frequencies stay float32."""
    inv_freq = model.model.rotary_emb.inv_freq.clone()
    model.to(dtype)
    model.model.rotary_emb.inv_freq = inv_freq
    return model
