"""config.json as transformers reads it, and the model that it describes, without memory for weights."""

from __future__ import annotations

import copy
import math
import reprlib
from typing import Any, TypeGuard

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ropepatch.errors import RopepatchError
from ropepatch.model.checkpoint import check_stock
from ropepatch.model.stock import stock_code
from ropepatch.settings import LARGEST

# What belongs to a scaling; every other key of rope_parameters is the model's own and is carried over.
SCALING_KEYS = frozenset({
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor",
    "short_mscale", "long_mscale", "low_freq_factor", "high_freq_factor",
})  # fmt: skip
SIZES = ("max_position_embeddings", "original_max_position_embeddings", "factor")
MAX_LAYERS = 1000  # beyond these config.json is damaged, and a model takes all memory


def load_config(raw: dict[str, Any], own: type[PreTrainedConfig] | None = None) -> PreTrainedConfig:
    """The configuration object of a config.json.

    Args:
        raw: The content of config.json.
        own: The class of the configuration, of a model in memory; None for that of transformers.

    Raises:
        RopepatchError: If transformers has no such architecture or does not accept the configuration.
    """
    model_type = raw.get("model_type")
    check_stock(raw)
    if own is not None:
        with stock_code("read the model's configuration"):
            return own.from_dict(_decode_floats(raw))
    if not is_known(model_type):
        if raw.get("auto_map"):
            raise RopepatchError(
                f"model_type {model_type!r} asks for remote code (auto_map), which ropepatch does not run",
                hint="use a model whose architecture is part of transformers; one in memory can be patched",
            )
        raise RopepatchError(
            f"unknown model_type {model_type!r} in config.json",
            hint="ropepatch extends causal language models of the installed transformers",
        )
    if raw.get("is_encoder_decoder"):
        raise RopepatchError(
            "config.json describes an encoder-decoder (is_encoder_decoder)",
            hint="ropepatch extends decoder-only language models",
        )
    with stock_code("read config.json"):
        return CONFIG_MAPPING[model_type].from_dict(_decode_floats(raw))


def is_known(model_type: object) -> TypeGuard[str]:
    """Whether the installed transformers has the architecture."""
    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def load_text_config(raw: dict[str, Any], own: type[PreTrainedConfig] | None = None) -> PreTrainedConfig:
    """The configuration of the language model in a config.json; see `load_config`."""
    return text_config(load_config(raw, own))


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a configuration that describes the language model.

    Raises:
        RopepatchError: If it has a part for text that transformers does not read.
    """
    part: Any = config.get_text_config(decoder=True)
    if isinstance(part, dict):
        raise RopepatchError(
            f"config.json has a part for text that {config.model_type} does not have",
            hint="take text_config, decoder and the like out, or write what it holds at the top",
        )
    text: PreTrainedConfig = part
    return text


def _decode_floats(value: Any) -> Any:
    """A deep copy in which transformers' {"__float__": "Infinity"} is the number."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _decode_floats(item) for key, item in value.items()}
    return [_decode_floats(item) for item in value] if isinstance(value, list) else value


def blueprint(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without memory for its weights (on the meta device)."""
    kind: Any = config.model_type
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise RopepatchError(
            f"{config.model_type} is not a causal language model in transformers",
            hint="ropepatch extends the models that AutoModelForCausalLM loads",
        )
    layers = getattr(config, "num_hidden_layers", 1)
    if not isinstance(layers, int) or not 0 < layers <= MAX_LAYERS:
        raise RopepatchError(
            f"num_hidden_layers must be an integer from 1 to {MAX_LAYERS}, got {layers!r}",
            hint="mend config.json",
        )
    with stock_code(f"build {config.model_type} from config.json"), torch.device("meta"):
        build: Any = AutoModelForCausalLM.from_config
        # For a dtype it would set the default one, which is the process's; and it writes what it is given
        # into the configuration. For trust_remote_code=None it would ask on stdin.
        model: PreTrainedModel = build(copy.deepcopy(config), dtype=None, trust_remote_code=False)
    return model


def check_rope_types(config: PreTrainedConfig) -> None:
    """Refuse a rope type that transformers does not know, and sizes out of range, before it fails on them.

    Raises:
        RopepatchError: Naming the type and the known ones, or the key.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)]
    known = {"default", "axial", *ROPE_INIT_FUNCTIONS}
    for sizes in ({key: getattr(config, key, None) for key in SIZES}, *(by_layer or [parameters])):
        for key in SIZES:
            size = sizes.get(key)
            if isinstance(size, int | float) and LARGEST < abs(size) < math.inf:
                raise RopepatchError(
                    f"{key} must be at most {LARGEST:g}, got {reprlib.repr(size)}", hint="fix config.json"
                )
    for kind in (rope.get("rope_type", "default") for rope in by_layer or [parameters]):
        if not isinstance(kind, str) or kind not in known:
            raise RopepatchError(
                f"unknown rope_type {kind!r} in config.json",
                hint=f"transformers knows {', '.join(sorted(known))}; `su` is today's longrope",
            )
