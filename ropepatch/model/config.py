"""config.json as transformers parses it, its older and newer keys, and the model it describes."""

from __future__ import annotations

import copy
import math
import reprlib
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.quantizers.auto import AutoHfQuantizer

from ropepatch.errors import RopepatchError
from ropepatch.model.architectures import GLOBAL_LAYERS, NEOX_KEYS
from ropepatch.model.kinds import check_stock
from ropepatch.model.stock import stock_code
from ropepatch.scaling.rope import ORIGINAL as ORIGINAL
from ropepatch.settings import MAX_NUMBER

REQUIRED = {  # by rope type
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
WITH_ORIGINAL = (
    "yarn",
    "longrope",
    "llama3",
)  # the types that need the original context length
# Ministral 3: the query at m is multiplied by 1 + beta ln(1 + floor(m / original_max_position_embeddings)).
QUERY_TEMPERATURE = "llama_4_scaling_beta"
# The keys of a scaling; every other key of rope_parameters is kept.
SCALING_KEYS = frozenset({
    "rope_type", "type", "rope_theta", ORIGINAL, "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_mscale", "long_mscale", "alpha",
    "attn_factor", "extrapolation_factor",
}).union(*REQUIRED.values())  # fmt: skip
# The last two are GPT-NeoX's names of rope_theta and partial_rotary_factor.
LEGACY_KEYS = (
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "rotary_emb_base",
    "rotary_pct",
)
KNOWN_TYPES = {"default", "axial", "mrope", "xdrope", "ntk_alpha", *ROPE_INIT_FUNCTIONS}
VENDOR_TYPES = {  # rope types of other programs: what transformers calls them, and what to do
    "su": ("longrope", 'write "longrope", its current name'),
    "ntk": (
        "",
        "NTK-aware scaling is a larger rope_theta: write it, and drop the scaling",
    ),
    "deepseek_yarn": ("yarn", 'write "yarn"; deepseek_yarn is vLLM\'s name of it'),
    "telechat3-yarn": ("", 'write "yarn" with attention_factor 0.07 ln(factor) + 1'),
}
DUAL_CHUNK = "dual_chunk_attention_config"  # of Qwen2.5-1M; vLLM and SGLang read it
SIZES = ("max_position_embeddings", ORIGINAL, "factor")
TEXT_PARTS = (
    "text_config",
    "decoder",
    "generator",
)  # where transformers looks for the language model
GENERATING = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "LMHeadModel",
)  # ends of names of classes
STATING = {
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
}  # of language models
MAX_LAYERS = 1000  # more means a damaged config.json, and would exhaust memory


def load_config(
    raw: dict[str, Any], own: type[PreTrainedConfig] | None = None
) -> PreTrainedConfig:
    """Build the configuration object of a config.json.

    Args:
        raw: The content of config.json.
        own: The configuration class of a custom model in memory; None for transformers' class.
    """
    check_stock(raw)
    if own is not None:
        with stock_code("read the model's configuration"):
            return own.from_dict(_decode_floats(raw))
    model_type = raw.get("model_type")
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
    content = _without_twin(raw)
    with stock_code("read config.json"):
        config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(content)
        parts = config, config.get_text_config(decoder=True)
    for layers in (getattr(part, "num_hidden_layers", 1) for part in parts):
        if not isinstance(layers, int) or not 0 < layers <= MAX_LAYERS:
            raise RopepatchError(
                f"num_hidden_layers must be an integer from 1 to {MAX_LAYERS}, got {layers!r}",
                hint="fix config.json",
            )
    quantization_of(config)
    name = part_of(config)
    place = (
        _stating(raw, config.sub_configs)
        if model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
        else None
    )
    if (
        name
        and place
        and not isinstance(raw.get(name), dict)
        and not describes_at_top(raw)
    ):
        raise RopepatchError(
            f"the installed transformers reads the language model of {model_type} in {name}, where "
            f"config.json has none, and would take defaults; it describes one {place}",
            hint=f"write what it says there into {name}",
        )
    return config


def part_of(config: PreTrainedConfig) -> str | None:
    """Return the name of the language model's part of a configuration; None for the whole."""
    text = text_config(config)
    return next(
        (name for name in TEXT_PARTS if getattr(config, name, None) is text), None
    )


def describes_at_top(raw: dict[str, Any]) -> bool:
    """Whether transformers parses the top level of a config.json as the language model."""
    probe = {key: value for key, value in raw.items() if key not in STATING} | {
        "rope_theta": 12345.0
    }
    with stock_code("read config.json"):
        made = text_config(
            CONFIG_MAPPING[raw["model_type"]].from_dict(_decode_floats(probe))
        )
    ropes = getattr(made, "rope_parameters", None) or {}
    return 12345.0 in (
        ropes.get("rope_theta"),
        *(rope.get("rope_theta") for rope in ropes.values() if isinstance(rope, dict)),
    )


def _stating(raw: dict[str, Any], parts: Iterable[str]) -> str | None:
    """Where config.json describes a language model, outside the parts that transformers parses."""
    if STATING & raw.keys():
        return "at the top"
    others = {
        key: value
        for key, value in raw.items()
        if isinstance(value, dict) and key not in parts
    }
    found = ((key, _stating(value, ())) for key, value in others.items())
    inner = (
        (key, place.removeprefix("at the top"))
        for key, place in found
        if place is not None
    )
    return next((f"in {key}{place.replace('in ', '.')}" for key, place in inner), None)


def quantization_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the quantisation of the weights; None if there is none that transformers supports.

    Raises:
        RopepatchError: If the method's name is missing, which stock transformers rejects.
    """
    parts: Any = config, config.get_text_config(decoder=True)
    first, last = (getattr(part, "quantization_config", None) for part in parts)
    stated: dict[str, Any] | None = first or last
    if stated is None:
        return None
    hint = "take quantization_config out if the weights are not quantised"
    quantizers: Any = AutoHfQuantizer
    with stock_code("read quantization_config in config.json", hint):
        is_known = quantizers.supports_quant_method(stated)
    return stated if is_known else None


def check_dequantised(stated: dict[str, Any]) -> None:
    """Raise a `RopepatchError` if these quantised weights cannot be loaded here, e.g. without a package."""
    with stock_code(
        "load its quantised weights here",
        "install what it names to compare what they compute",
    ):
        quantizer = AutoHfQuantizer.from_config(dict(stated), pre_quantized=True)
        quantizer.validate_environment(device_map=None, weights_only=True)


def is_known(model_type: object) -> TypeGuard[str]:
    """Return whether the installed transformers has the architecture."""
    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def default_theta(model_type: str) -> float | None:
    """Return the RoPE base that transformers takes if config.json has none."""
    if not is_known(model_type):
        return None
    parameters = getattr(CONFIG_MAPPING[model_type](), "rope_parameters", None) or {}
    theta: float | None = parameters.get("rope_theta")
    return theta


def dual_chunk_original(config: PreTrainedConfig) -> int | None:
    """Return the trained length of a model with dual chunk attention, which transformers ignores."""
    stated = getattr(config, DUAL_CHUNK, None)
    original = stated.get(ORIGINAL) if isinstance(stated, dict) else None
    window = getattr(config, "max_position_embeddings", None)
    if (
        type(original) is not int
        or type(window) is not int
        or not 0 < original < window
    ):
        return None
    return original


def generates(model_type: str) -> bool:
    """Return whether transformers has an architecture with a language model head."""
    return (
        model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        or model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    )


def stated_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of transformers in `architectures`, if it has no language model head."""
    name = str(next(iter(config.architectures or ()), ""))
    stated = getattr(transformers, name, None)
    if (
        name.endswith(GENERATING)
        or not isinstance(stated, type)
        or not issubclass(stated, PreTrainedModel)
    ):
        return None
    return stated


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the language model's part of a configuration."""
    part: Any = config.get_text_config(decoder=True)
    if not isinstance(part, PreTrainedConfig):
        raise RopepatchError(
            f"config.json has a part for text that {config.model_type} does not have",
            hint="take text_config, decoder and the like out, or write what it holds at the top",
        )
    text: PreTrainedConfig = part
    return text


def differs_by_layer(config: Any) -> bool:
    """Return whether sizes differ from layer to layer."""
    return bool(getattr(config, "is_heterogeneous", False))


def of_global_layers(config: Any) -> Any:
    """Return the configuration of the global-attention layers if sizes differ by layer (Gemma 4)."""
    return (
        config.per_layer_config[GLOBAL_LAYERS] if differs_by_layer(config) else config
    )


def head_dim_of(config: Any) -> int:
    """Return the dimension of a global-attention head, derived if the configuration lacks it."""
    of = of_global_layers(config)
    size: int = (
        getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads
    )
    return size


def key_value_heads_of(config: Any) -> int:
    """Return the number of key and value heads of global attention."""
    of = of_global_layers(config)
    heads: int = getattr(of, "num_key_value_heads", None) or of.num_attention_heads
    return heads


def _without_twin(raw: dict[str, Any]) -> dict[str, Any]:
    """Drop top-level unscaled RoPE that repeats the language model's: transformers warns of it."""
    decoded: dict[str, Any] = _decode_floats(raw)
    twin = decoded.get("rope_scaling")
    is_part = any(isinstance(raw.get(name), dict) for name in TEXT_PARTS)
    if (
        is_part
        and isinstance(twin, dict)
        and twin.get("rope_type", twin.get("type")) in ("default", "mrope")
    ):
        del decoded["rope_scaling"]
    return decoded


def _decode_floats(value: Any) -> Any:
    """Copy a value deeply and convert transformers' {"__float__": "Infinity"} to numbers."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _decode_floats(item) for key, item in value.items()}
    return (
        [_decode_floats(item) for item in value] if isinstance(value, list) else value
    )


def auto_class(model_type: object) -> Any:
    """Return transformers' auto class that loads an architecture with its language model head.

    Raises:
        RopepatchError: If there is none.
    """
    if isinstance(model_type, str) and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForCausalLM
    if isinstance(model_type, str) and generates(model_type):
        return AutoModelForMultimodalLM
    raise RopepatchError(
        f"transformers has no model of type {model_type} that generates text by itself",
        hint="ropepatch extends what AutoModelForCausalLM and AutoModelForMultimodalLM load",
    )


def blueprint(
    config: PreTrainedConfig, kind: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """Build the model on the meta device, without allocating its weights.

    Args:
        config: Its configuration, which the call does not change.
        kind: Its class; None for the one with a language model head.
    """
    # A dtype would change torch's default dtype in all threads.
    options: dict[str, Any] = {"dtype": None}
    if kind is None:
        build: Any = auto_class(config.model_type).from_config
        options["trust_remote_code"] = False  # None would prompt on stdin
    else:
        build = kind._from_config
    with (
        stock_code(f"build {config.model_type} from config.json"),
        torch.device("meta"),
    ):
        model: PreTrainedModel = build(copy.deepcopy(config), **options)
    return model


def check_rope_types(config: PreTrainedConfig) -> None:
    """Raise a `RopepatchError` for unknown rope types and sizes out of range, before transformers fails."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)]
    known = {"default", "axial", *ROPE_INIT_FUNCTIONS}
    for sizes in (
        {key: getattr(config, key, None) for key in SIZES},
        *(by_layer or [parameters]),
    ):
        for key in SIZES:
            size = sizes.get(key)
            if isinstance(size, int | float) and MAX_NUMBER < abs(size) < math.inf:
                raise RopepatchError(
                    f"{key} must be at most {MAX_NUMBER:g}, got {reprlib.repr(size)}",
                    hint="fix config.json",
                )
    for kind in (rope.get("rope_type", "default") for rope in by_layer or [parameters]):
        if not isinstance(kind, str) or kind not in known:
            _, remedy = VENDOR_TYPES.get(str(kind), ("", ""))
            raise RopepatchError(
                f"unknown rope_type {kind!r} in config.json",
                hint=remedy or f"transformers knows {', '.join(sorted(known))}",
            )


def legacy_keys(raw: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Convert flat `rope_parameters` to the older keys, top-level `rope_theta` and `rope_scaling`.

    transformers 4 and mlx-lm support only these. In transformers 5 they override `rope_parameters`, so both
    must agree. `rope_scaling` is None for the default type without an `mrope_section`.
    """
    kind = parameters["rope_type"]
    scaling = {
        key: value for key, value in parameters.items() if key != "rope_theta"
    } | {"type": kind}
    needed = kind != "default" or "mrope_section" in parameters
    keys = {
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": scaling if needed else None,
    }
    renamed = raw.get("model_type") in NEOX_KEYS
    if renamed or "rotary_emb_base" in raw:
        keys["rotary_emb_base"] = parameters["rope_theta"]
    if "partial_rotary_factor" in parameters:
        keys["rotary_pct" if renamed else "partial_rotary_factor"] = parameters[
            "partial_rotary_factor"
        ]
    return keys
