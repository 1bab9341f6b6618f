"""What attention multiplies its scores by, where that follows the rope: DeepSeek's YaRN.

Its `mscale` and `mscale_all_dim` scale cos and sin by a ratio, and the scale of the softmax, hence also of
the dimensions that do not rotate, by (0.1 mscale_all_dim ln s + 1)^2. The modules tell who does so.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ropepatch.model.config import blueprint, text_config
from ropepatch.model.rotary import RotarySite
from ropepatch.model.stock import stock_code

PROBE = {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "original_max_position_embeddings": 64}


def softmax_scales(
    config: PreTrainedConfig, rope_parameters: dict[str, Any], kind: type[PreTrainedModel] | None = None
) -> dict[str, float]:
    """The scale of every attention module of a stock model, by the module's name.

    Args:
        config: The whole configuration.
        rope_parameters: All of them, in the place of the configuration's own.
        kind: The class of the model; None for the one that AutoModelForCausalLM builds.
    """
    config = copy.deepcopy(config)
    text_config(config).rope_parameters = rope_parameters
    with stock_code(f"build {config.model_type}"), torch.device("meta"):
        model = blueprint(config) if kind is None else kind(config)
    scales = ((name, getattr(module, "scaling", None)) for name, module in model.named_modules())
    return {name: scale for name, scale in scales if isinstance(scale, float)}


def ties_softmax(config: PreTrainedConfig, site: RotarySite) -> bool:
    """Whether `mscale_all_dim` changes the softmax scale of an architecture; it is built twice to see."""
    own = text_config(config).rope_parameters
    probe = {"rope_theta": site.of(own)["rope_theta"]} | PROBE
    without, with_it = (
        softmax_scales(config, site.replaced(own, probe | {"mscale_all_dim": k})) for k in (0.0, 1.0)
    )
    return without != with_it
