"""config.json as stock transformers reads it: all that a plan needs of a model.

A checkpoint with a position remapping has its own model type, and code in its folder, which transformers runs
with trust_remote_code. ropepatch takes the remapping from config.json and never runs the code. A checkpoint
with a swapped position encoding has an unknown model type; `ropepatch.json` contains the original one.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, partial
from threading import Lock
from typing import Any, Literal, NamedTuple, Self, TypeGuard

import torch
import transformers
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging as transformers_logging

from ropepatch.errors import RopepatchError, argument, is_out_of_memory
from ropepatch.model.architectures import (
    DRAFT_KEYS,
    DRAFTS,
    GLOBAL_LAYERS,
    LLAMA_KEYS,
    NEOX_KEYS,
    SLIDING_LAYERS,
    SPECULATED,
    TIED,
    WITHOUT_ROPE,
    WRAPPED,
    LocalRope,
    local_rope,
)
from ropepatch.model.rotary import (
    RotarySubstitute,
    base_model,
    find_substitute,
    is_stock,
)
from ropepatch.scaling.rope import LARGEST_BASE, Frequencies, Rope
from ropepatch.scaling.rope import ORIGINAL as ORIGINAL
from ropepatch.settings import MAX_NUMBER, Length, relative_length, shown

# The types that need the original context length
WITH_ORIGINAL = (
    "yarn",
    "longrope",
    "llama3",
)
# Ministral 3: the query at m is multiplied by 1 + beta ln(1 + floor(m / original_max_position_embeddings)).
QUERY_TEMPERATURE = "llama_4_scaling_beta"
# The keys of a scaling; every other key of rope_parameters is kept.
SCALING_KEYS = frozenset({
    "rope_type", "type", "rope_theta", ORIGINAL, "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_mscale", "long_mscale", "alpha",
    "attn_factor", "extrapolation_factor", "factor", "low_freq_factor", "high_freq_factor", "short_factor",
    "long_factor",
})  # fmt: skip
# The last two are GPT-NeoX's names of rope_theta and partial_rotary_factor.
LEGACY_KEYS = (
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "rotary_emb_base",
    "rotary_pct",
)
DUAL_CHUNK = "dual_chunk_attention_config"  # of Qwen2.5-1M; vLLM and SGLang read it
# Where transformers looks for the language model
TEXT_PARTS = (
    "text_config",
    "decoder",
    "generator",
)
# Ends of names of classes
GENERATING = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "LMHeadModel",
)
# Of language models
STATING = {
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
}
MAX_LAYERS = 1000  # more means a damaged config.json, and would exhaust memory
SEQUENCE = "max_sequence_length"  # FastChat's key of the extended context length
# The `longrope` frequencies up to the original context length
UP_TO_SWITCH = "up to the switch"
REMAPPED = "-position-remapping"  # the suffix of the model_type of a checkpoint with a position remapping
KEY = "position_remapping"  # in config.json
# The model_type of a checkpoint with a swapped position encoding
NEEDS_ROPEPATCH = "needs_ropepatch"
Kind = Literal["stock", "mapped", "swapped"]
_QUIET = ContextVar("_QUIET", default=False)
_PARSING = Lock()  # the filters of warnings are those of all threads


# Stock code, without its warnings and with one-line errors


def _is_heard(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or not _QUIET.get()


@contextmanager
def stock_code(
    what: str, hint: str = "fix config.json so that transformers loads it"
) -> Iterator[None]:
    """Convert any exception of transformers to a one-line error, and hide its warnings.

    Only warnings of this thread are hidden: the logger's level, which all threads share, does not change.
    """
    for handler in logging.getLogger("transformers").handlers:
        handler.addFilter(_is_heard)  # once: a second time does nothing
    token = _QUIET.set(True)
    try:
        yield
    except RopepatchError:
        raise
    except Exception as error:  # stock code may raise anything on invalid files
        cause: BaseException = error
        # Strict configurations wrap the reason twice
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if is_out_of_memory(cause):
            raise
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise RopepatchError(
            f"transformers cannot {what}: {reason[:300]}", hint=hint
        ) from error
    finally:
        _QUIET.reset(token)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars, which it shows also without a terminal."""
    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


# What stock transformers must reject


def kind_of(raw: dict[str, Any]) -> Kind:
    """Return the kind of a checkpoint, by its config.json."""
    model_type = str(raw.get("model_type"))
    if model_type == NEEDS_ROPEPATCH:
        return "swapped"
    return "mapped" if model_type.endswith(REMAPPED) else "stock"


def check_stock(raw: dict[str, Any]) -> None:
    """Raise a `RopepatchError` for a position remapping or a swapped encoding in config.json."""
    if (kind := kind_of(raw)) == "stock":
        return
    message = "the position encoding of this checkpoint is swapped (see its ropepatch.json): it has no RoPE"
    if kind == "mapped":
        mapped = saved_remapping(raw)
        described = f"({mapped['name']} to {mapped['target']} tokens)"
        message = f"this checkpoint has a position remapping already {described}"
    hint = "ropepatch.load and `ropepatch eval` take it; extend the checkpoint it was made from"
    raise RopepatchError(message, hint=hint)


def saved_remapping(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the remapping: `name`, `parameters`, and in tokens the `window` L and the `target` N."""
    described = raw.get(KEY)
    keys = {"name", "parameters", "window", "target"}
    if not isinstance(described, dict) or not keys <= described.keys():
        raise RopepatchError(
            f"config.json has an invalid {KEY}, got {shown(described)}",
            hint="copy it again from where the checkpoint came from",
        )
    return described


def without_remapping(raw: dict[str, Any]) -> dict[str, Any]:
    """Return config.json for the stock architecture, without the remapping."""
    saved_remapping(raw)
    others = {key: value for key, value in raw.items() if key not in ("auto_map", KEY)}
    return others | {"model_type": str(raw["model_type"]).removesuffix(REMAPPED)}


# config.json


class StandIn(NamedTuple):
    """How stock transformers reads the RoPE of a config.json whose class it does not have.

    Args:
        model_type: The type of the stock class that reads the same keys.
        section: The key of the language model's part; None for the top level.
        unloaded: Why stock transformers does not load the weights; empty if it does.
    """

    model_type: str
    section: str | None
    unloaded: str
    is_draft: bool = False


def stand_in(raw: dict[str, Any]) -> StandIn | None:
    """Return how to read a config.json of a draft model or of remote code; None for a stock class."""
    name, model_type = _first(raw.get("architectures")), raw.get("model_type")
    is_named, layers = DRAFTS.search(name), raw.get(SPECULATED)
    if is_named or raw.keys() & DRAFT_KEYS:
        section = SPECULATED if isinstance(layers, dict) else None
        kind = str((raw[section] if section else raw).get("model_type"))
        borrowed = kind.removesuffix("_mtp")
        return StandIn(
            borrowed if is_known(borrowed) else kind,
            section,
            f"{name if is_named else 'this'} is a draft model",
            is_draft=True,
        )
    if is_known(model_type) or not raw.get("auto_map"):
        return None
    for known, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if class_name == name:
            return StandIn(known, None, "")
    unloaded = f"the code of {name} is not run"
    if name in LLAMA_KEYS:
        return StandIn("llama", None, unloaded)
    part = raw.get(WRAPPED)
    if isinstance(part, dict) and is_known(part.get("model_type")):
        return StandIn(part["model_type"], WRAPPED, unloaded)
    return None


def _first(architectures: object) -> str:
    """Return the class that config.json names; empty without one."""
    if isinstance(architectures, list) and architectures:
        return str(architectures[0])
    return ""


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
        return _parsed(own, raw)
    if other := stand_in(raw):
        part = raw[other.section] if other.section else raw
        # The code of DeciLM has other sizes by layer, and null at the top
        stated = {key: value for key, value in part.items() if value is not None}
        raw = stated | {"model_type": other.model_type}
    model_type = raw.get("model_type")
    if not is_known(model_type):
        message = f"unknown model_type {model_type!r} in config.json"
        hint = "ropepatch extends models of the installed transformers"
        if other:
            hint = "a draft needs no change without attention; else name its target's model_type"
        elif raw.get("auto_map"):
            message = f"model_type {model_type!r} asks for remote code (auto_map), which ropepatch does not run"
            hint = (
                "use a checkpoint of the same model that was converted for transformers (often NAME-hf); "
                "one in memory can be patched"
            )
        raise RopepatchError(message, hint=hint)
    if raw.get("is_encoder_decoder"):
        raise RopepatchError(
            "config.json describes an encoder-decoder (is_encoder_decoder)",
            hint="ropepatch extends models of one decoder or one encoder",
        )
    config = _parsed(CONFIG_MAPPING[model_type], raw)
    with stock_code("read config.json"):
        parts = config, config.get_text_config(decoder=True)
    for layers in (getattr(part, "num_hidden_layers", 1) for part in parts):
        if not isinstance(layers, int) or not 0 < layers <= MAX_LAYERS:
            raise RopepatchError(
                f"num_hidden_layers must be an integer from 1 to {MAX_LAYERS}, got {layers!r}",
                hint="fix config.json",
            )
    quantization_of(config)
    name = part_of(config)
    is_missing = name is not None and not isinstance(raw.get(name), dict)
    is_composite = model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    if is_missing and is_composite and not describes_at_top(raw):
        raise RopepatchError(
            f"the installed transformers reads the language model of {model_type} in {name}, where "
            "config.json has none, and would take defaults",
            hint=f"write what it says of the language model, but model_type, into {name}",
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
    probe = {key: value for key, value in raw.items() if key not in STATING}
    probe["rope_theta"] = 12345.0
    whole = _parsed(CONFIG_MAPPING[raw["model_type"]], probe)
    return "12345.0" in str(getattr(text_config(whole), "rope_parameters", ""))


def quantization_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the quantisation of the weights; None if there is none that transformers supports.

    Raises:
        RopepatchError: If the method's name is missing, which stock transformers rejects.
    """
    parts = config, text_config(config)
    first, last = (getattr(part, "quantization_config", None) for part in parts)
    stated: dict[str, Any] | None = first or last
    if stated is None:
        return None
    hint = "take quantization_config out if the weights are not quantised"
    quantizers: Any = AutoHfQuantizer
    with stock_code("read quantization_config in config.json", hint):
        is_known = quantizers.supports_quant_method(stated)
    return stated if is_known else None


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
    if type(original) is type(window) is int and 0 < original < window:
        return original
    return None


def generates(config: PreTrainedConfig) -> bool:
    """Return whether a model has a language model head, as custom ones in memory."""
    if stated_class(config):
        return False
    is_custom = config.model_type not in MODEL_MAPPING_NAMES
    return is_custom or loader_of(config) is not AutoModel


def stated_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of transformers in `architectures`, if it has no language model head."""
    name = _first(config.architectures)
    stated = getattr(transformers, name, None)
    is_model = isinstance(stated, type) and issubclass(stated, PreTrainedModel)
    return stated if is_model and not name.endswith(GENERATING) else None


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
    size: int = getattr(of, "head_dim", 0) or of.hidden_size // of.num_attention_heads
    return size


def key_value_heads_of(config: Any) -> int:
    """Return the number of key and value heads of global attention."""
    of = of_global_layers(config)
    heads: int = getattr(of, "num_key_value_heads", 0) or of.num_attention_heads
    return heads


def _parsed(kind: Any, raw: dict[str, Any]) -> PreTrainedConfig:
    """Parse a copy of a config.json, in which {"__float__": "Infinity"} is a number."""
    # Types whose RoPE differs by layer warn of the older keys
    with stock_code("read config.json"), _PARSING, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`rope_scaling` is deprecated", FutureWarning)
        config: PreTrainedConfig = kind.from_dict(kind._decode_special_floats(raw))
        return config


def loader_of(config: PreTrainedConfig) -> Any:
    """Return the class that loads a model: an auto class, or that in `architectures` with another head.

    Raises:
        RopepatchError: If there is none.
    """
    if stated := stated_class(config):
        return stated
    is_registered = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING  # also by a user
    if is_registered or config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForCausalLM
    if config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        return AutoModelForMultimodalLM
    if config.model_type in MODEL_MAPPING_NAMES:
        return AutoModel
    raise RopepatchError(
        f"transformers has no model of type {config.model_type} by itself",
        hint="ropepatch extends what AutoModel loads",
    )


def blueprint(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model on the meta device, without allocating its weights."""
    loader = loader_of(config)
    make, safely = getattr(loader, "from_config", None), {"trust_remote_code": False}
    if make is None:  # not an auto class
        make, safely = loader._from_config, {}
    with (
        stock_code(f"build {config.model_type} from config.json"),
        torch.device("meta"),
    ):
        # A dtype would change torch's default dtype in all threads.
        model: PreTrainedModel = make(copy.deepcopy(config), dtype=None, **safely)
        return model


def legacy_keys(raw: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Convert flat `rope_parameters` to the older keys, top-level `rope_theta` and `rope_scaling`.

    transformers 4 and mlx-lm support only these. In transformers 5 they override `rope_parameters`, so both
    must agree. `rope_scaling` is None for the default type without an `mrope_section`.
    """
    kind = parameters["rope_type"]
    theta, scaling = parameters["rope_theta"], parameters | {"type": kind}
    del scaling["rope_theta"]
    needed = kind != "default" or "mrope_section" in parameters
    keys = {"rope_theta": theta, "rope_scaling": scaling if needed else None}
    renamed = str(raw.get("model_type")) in NEOX_KEYS
    if renamed or "rotary_emb_base" in raw:
        keys["rotary_emb_base"] = theta
    if share := parameters.get("partial_rotary_factor"):
        keys["rotary_pct" if renamed else "partial_rotary_factor"] = share
    return keys


# The rotary module


@dataclass(frozen=True)
class RotarySite:
    """A model's rotary module.

    Args:
        path: Its name in `model.named_modules()`.
        rotary_class: The stock class.
        layer_type: The scaled layer type if RoPE differs by layer type; else None.
    """

    path: str
    rotary_class: type[nn.Module]
    layer_type: str | None

    def attribute(self, name: str) -> str:
        """Return the stock module's name of `inv_freq` or `attention_scaling`."""
        return name if self.layer_type is None else f"{self.layer_type}_{name}"

    def of(self, rope_parameters: dict[str, Any]) -> dict[str, Any]:
        """Select the rope_parameters of the scaled layer type."""
        layer = self.layer_type
        return dict(rope_parameters if layer is None else rope_parameters[layer])

    def replaced(self, by_layer: Any, value: Any) -> Any:
        """Replace a value, such as `rope_parameters`, for the scaled layer type."""
        return value if self.layer_type is None else by_layer | {self.layer_type: value}


# Of hybrids whose attention has no position encoding
WITHOUT_SITE = RotarySite("", nn.Identity, None)


def find_rotary(model: nn.Module) -> RotarySite:
    """Find the rotary module of a model; raise a `RopepatchError` unless it is one like LLaMA's."""
    if substitute := find_substitute(model, RotarySubstitute):
        raise RopepatchError(substitute[1].state, hint=substitute[1].way_back)
    config: Any = model.config
    refusal = partial(_refusal, config.model_type)
    modules = language_ropes(model)
    if not modules:
        if str(text_config(config).model_type) in WITHOUT_ROPE:
            return WITHOUT_SITE
        reason = "it has no rotary module (positions are learned, biased or absent)"
        raise refusal(reason)
    if len(modules) > 1 and getattr(config, "thinker_config", None):
        raise RopepatchError(
            f"{config.model_type} is several models, of which its thinker reads text",
            hint="save that alone, by from_pretrained and save_pretrained of transformers' class with "
            "Thinker in its name, and extend it",
        )
    if len(modules) > 1:
        raise refusal(
            f"its attention has {len(modules)} rotary modules, such as {next(iter(modules))}, not one for all"
        )
    ((path, module),) = modules.items()
    kind, name = type(module), type(module).__name__
    for place, one in model.named_modules():
        if type(one) is kind and one is not module:
            raise refusal(f"it has another {name} beside that of its decoder, {place}")
    if state := list(module.state_dict()):
        raise refusal(f"its {name} has weights of its own ({', '.join(state)})")
    if not isinstance(getattr(module, "rope_type", None), dict):
        return RotarySite(path, kind, None)
    if not hasattr(module, f"{GLOBAL_LAYERS}_inv_freq"):
        layers = text_config(config).layer_types
        if {*layers} == {SLIDING_LAYERS}:
            raise RopepatchError(
                f"all {len(layers)} layers of this {config.model_type} have a sliding window: no token "
                "attends farther",
                hint=f"a test model needs a {GLOBAL_LAYERS} layer (layer_types in config.json)",
            )
        reason = f"its RoPE differs by layer type and none is called {GLOBAL_LAYERS}"
        raise refusal(reason)
    return RotarySite(path, kind, GLOBAL_LAYERS)


def language_ropes(model: nn.Module) -> dict[str, nn.Module]:
    """Return the rotary modules of a model by path; for a multimodal model those of its language model."""
    any_model: Any = model
    config = any_model.config
    decoder = any_model if text_config(config) is config else any_model.get_decoder()
    within = set(map(id, decoder.modules()))
    return {
        path: module
        for path, module in model.named_modules()
        if id(module) in within and holds_frequencies(module)
    }


def holds_frequencies(module: nn.Module) -> bool:
    """Return whether a module has a buffer of frequencies."""
    names = (name for name, _ in module.named_buffers(recurse=False))
    return any(name == "inv_freq" or name.endswith("_inv_freq") for name in names)


def _refusal(model_type: str, reason: str) -> RopepatchError:
    return RopepatchError(
        f"{model_type} is not supported: {reason}",
        hint="use it within its own length; the documentation lists the supported model types",
    )


def scaled_twin(stock: Any, site: RotarySite, frequencies: Frequencies) -> nn.Module:
    """Copy a stock rotary module with other frequencies."""
    twin: Any = copy.copy(stock)
    # With any other type the stock forward may recompute its frequencies.
    twin.rope_type = site.replaced(stock.rope_type, "default")
    twin._buffers = dict(stock._buffers)
    setattr(twin, site.attribute("inv_freq"), frequencies.inv_freq)
    setattr(twin, site.attribute("attention_scaling"), frequencies.attention_factor)
    scaled: nn.Module = twin
    return scaled


def check_table_rules(config: PreTrainedConfig, site: RotarySite) -> None:
    """Raise a `RopepatchError` if a module's forward does not use `inv_freq` and `attention_scaling`."""
    layer = [] if site.layer_type is None else [site.layer_type]
    parameters = site.of(config.rope_parameters)
    with (
        stock_code(f"run the rotary module of {config.model_type}"),
        torch.no_grad(),
        torch.device("cpu"),
    ):
        positions = torch.arange(5)[None]
        sections = parameters.get("mrope_section") or parameters.get("xdrope_section")
        if sections:  # [A, 1, T], for A position axes
            positions = positions * torch.arange(1, len(sections) + 1)[:, None, None]
        stock = site.rotary_class(config)
        x = torch.zeros(1, 5, 8, dtype=torch.float32)
        inv_freq = getattr(stock, site.attribute("inv_freq"))
        twin = scaled_twin(stock, site, Frequencies(inv_freq))
        slow = scaled_twin(stock, site, Frequencies(inv_freq / 2, 3.0))
        expected, got = twin(x, positions, *layer), slow(x, 2 * positions, *layer)
    for one, other in zip(expected, got, strict=True):
        if not torch.allclose(3 * one, other, atol=1e-6):
            name = site.rotary_class.__name__
            reason = f"{name} recomputes its frequencies in forward"
            raise _refusal(config.model_type, reason)


# RoPE parameters and frequencies


def read_rope(config: PreTrainedConfig, site: RotarySite) -> Rope:
    """Return the RoPE parameters of a configuration, with the frequencies if it is already scaled.

    Length-dependent RoPE is taken at the full context length: `dynamic` does not change it, and for
    `longrope` with two lists it is the one beyond the switch.
    """
    parameters = site.of(config.rope_parameters)
    table = stock_table(config, site, beyond_switch=True)
    window = _window(config, parameters)
    inv_freq, a = table
    theta, d = float(parameters["rope_theta"]), 2 * len(inv_freq)
    if alpha := parameters.get("alpha"):  # HunYuan: NTK-aware with a fixed factor
        theta *= alpha ** (d / (d - 2))
    plain = Rope(d, theta, window)
    kind = parameters.get("rope_type", "default")
    if kind in ("default", "dynamic") and torch.equal(plain.inv_freq(), inv_freq):
        return plain
    return Rope(d, theta, window, tuple(inv_freq.tolist()), a)


def _window(config: PreTrainedConfig, parameters: dict[str, Any]) -> int:
    """Return the current context length in tokens; for Qwen's YaRN and Vicuna not in config.json."""
    window = getattr(config, "max_position_embeddings", None)
    if not isinstance(window, int):
        raise RopepatchError(
            f"max_position_embeddings must be an integer, got {window!r}",
            hint="write the model's context length in tokens into config.json",
        )
    kind, factor = parameters.get("rope_type"), parameters.get("factor", 0.0)
    if kind in ("yarn", "longrope") and factor:
        return max(window, int(min(factor * parameters[ORIGINAL], 2 * MAX_NUMBER)))
    if kind == "linear":
        return stated_window(window, factor, getattr(config, SEQUENCE, 0)) or window
    return dual_chunk_original(config) or window


def stated_window(
    window: int, factor: float, max_sequence_length: object
) -> int | None:
    """Return the context length of a linear checkpoint if `max_sequence_length` states it, else None.

    max_position_embeddings is either this (deepseek-coder) or the original length (Vicuna, LongChat).
    """
    stated = max_sequence_length if type(max_sequence_length) is int else 0
    return stated if window <= stated <= factor * window else None


def switches(parameters: dict[str, Any]) -> bool:
    """Return whether `longrope` has different divisors up to the original context length and beyond."""
    short, long = parameters.get("short_factor"), parameters.get("long_factor")
    return short is not None and short != long


def stock_table(
    config: PreTrainedConfig, site: RotarySite, *, beyond_switch: bool = False
) -> Frequencies:
    """Compute the frequencies of a configuration by building its stock rotary module.

    For a `longrope` with two lists, they are those up to the switch unless `beyond_switch`.
    """
    with (
        stock_code(f"compute the frequencies of {config.model_type}"),
        torch.device("cpu"),
    ):
        parameters = site.of(config.rope_parameters)
        if beyond_switch and switches(parameters):
            beyond = parameters | {"short_factor": parameters["long_factor"]}
            config = copy.deepcopy(config)
            config.rope_parameters = site.replaced(config.rope_parameters, beyond)
        module = site.rotary_class(config)
        inv_freq = getattr(module, site.attribute("inv_freq"))
        attention_factor = float(getattr(module, site.attribute("attention_scaling")))
        return Frequencies(inv_freq.detach().clone(), attention_factor)


# What a plan is made from


class StatedRope(ABC):
    """RoPE parameters as a file states them, and the original length that a user gives instead.

    Attributes:
        original: The original context length that the user gave instead of the file's.
    """

    original: Length | None

    @property
    @abstractmethod
    def stated_rope(self) -> Rope:
        """The RoPE parameters by the file."""

    @property
    def tied_yarn(self) -> dict[str, Any] | None:
        """The parameters of a YaRN whose factor also changes the softmax scale."""
        return None

    @cached_property
    def rope(self) -> Rope:
        """The RoPE parameters, with the original context length that the user gave."""
        if (window := self.original_window) is None:
            return self.stated_rope
        return replace(self.stated_rope, original_max_position_embeddings=window)

    @cached_property
    def window(self) -> int:
        """L, the context length in tokens that RoPE is scaled from."""
        return self.rope.original_max_position_embeddings

    @cached_property
    def reach(self) -> int:
        """The current context length in tokens; more than L if RoPE is scaled from L anew."""
        stated = self.tied_yarn
        return int(stated["factor"] * stated[ORIGINAL]) if stated else self.window

    @cached_property
    def original_window(self) -> int | None:
        """The L that the user gave, in tokens; None if it equals that of the file.

        Raises:
            RopepatchError: If it is not a length, or RoPE is already scaled.
        """
        if self.original is None:
            return None
        stated = self.stated_rope.original_max_position_embeddings
        window = relative_length(self.original, stated)
        if window == stated:
            return None
        if self.stated_rope.is_scaled:
            raise RopepatchError(
                f"{argument('original')} is {window}, but this model is already scaled to {stated} tokens",
                hint=f"drop {argument('original')}, or extend the checkpoint it was made from",
            )
        return window

    def target(self, to: Length | None, name: str) -> int:
        """Return the target length in tokens of the model ``name``, also for a multiple of its current length.

        Raises:
            RopepatchError: If it is not a length above the current one.
        """
        if to is None:
            raise RopepatchError(
                f"{argument('to')} is missing",
                hint=f"{argument('to', '32k')}, or {argument('to', '4x')} for four times the original length",
            )
        target = relative_length(to, self.reach)
        if target <= self.reach:
            raise RopepatchError(
                f"{name} already covers {self.reach} tokens; nothing to extend to {target}",
                hint=f"{argument('to')} is the target context, e.g. {argument('to', 4 * self.reach)}; "
                f"{argument('original')} states that it was trained on less",
            )
        return target


@dataclass(frozen=True, eq=False)
class Config(StatedRope):
    """A config.json as stock transformers reads it: all that a plan needs of a model.

    Args:
        raw: The content of config.json.
        original: The original context length that the user gave instead.
        custom: The configuration class of a model in memory with custom code.
        known_site: The rotary module, where it is known without building the model.
        scaled_rope: RoPE parameters to plan from instead of those that config.json gives.
    """

    raw: dict[str, Any]
    original: Length | None = None
    custom: type[PreTrainedConfig] | None = None
    known_site: RotarySite | None = None
    scaled_rope: Rope | None = None
    file_name = "config.json"

    @classmethod
    def of(
        cls, model: nn.Module | PreTrainedConfig, original: Length | None = None
    ) -> Self:
        """Return the configuration of a model in memory, wrapped or not.

        Raises:
            RopepatchError: If it has no supported RoPE.
        """
        if isinstance(model, PreTrainedConfig):
            return cls(model.to_dict(), original)
        base = base_model(model)
        custom = None if is_stock(base) else type(base.config)
        unlocated = cls(base.config.to_dict(), original, custom)
        # An unsupported configuration is reported before its rotary module
        _ = unlocated.text
        config = replace(unlocated, known_site=find_rotary(base))
        _ = config.rope
        return config

    def changed(self, keys: Mapping[str, Any]) -> Self:
        """Return the configuration with other keys in the language model's part.

        Keys that the top level repeats stay unchanged: transformers 5 rejects scaled RoPE there.
        """
        stated = {**self.stated, **keys}
        return self.read_from(
            stated if self.section is None else self.raw | {self.section: stated}
        )

    def read_from(self, raw: dict[str, Any]) -> Self:
        """Return another config.json of the same model."""
        return replace(self, raw=raw, known_site=self.site)

    # What config.json says

    @property
    def kind(self) -> Kind:
        """The kind of checkpoint, by its model type."""
        return kind_of(self.raw)

    @cached_property
    def whole(self) -> PreTrainedConfig:
        """The configuration as transformers parses it."""
        return load_config(self.raw, self.custom)

    @cached_property
    def text(self) -> PreTrainedConfig:
        """The configuration of the language model; for text-only models the whole."""
        config = text_config(self.whole)
        try:
            json.dumps(getattr(config, "rope_parameters", None), allow_nan=False)
        except ValueError as error:
            message = "rope_parameters contain a number that is not finite"
            raise RopepatchError(message, hint="fix config.json") from error
        return config

    @cached_property
    def section(self) -> str | None:
        """The key of the language model's part of config.json; None for the top level."""
        name = self.stand_in.section if self.stand_in else part_of(self.whole)
        return name if name and isinstance(self.raw.get(name), dict) else None

    @property
    def is_part(self) -> bool:
        """Whether the language model is part of a multimodal model."""
        return self.text is not self.whole

    @cached_property
    def stated(self) -> dict[str, Any]:
        """The language model's part of config.json."""
        return dict(self.raw[self.section]) if self.section else self.raw

    def held(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the current values of some keys, where set, and `rope_parameters`."""
        kept = {key: self.stated[key] for key in keys if key in self.stated}
        if self.has_rope:
            kept["rope_parameters"] = self.text.rope_parameters
        return copy.deepcopy(kept)

    # The model that it describes

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The model on the meta device, without memory for its weights."""
        return blueprint(self.whole)

    @cached_property
    def model_type(self) -> str:
        """The architecture, as transformers names it."""
        return str(self.text.model_type)

    @cached_property
    def stated_length(self) -> int:
        """The context length in config.json, in tokens."""
        return int(self.text.max_position_embeddings)

    @property
    def head_dim(self) -> int:
        """The dimension of a head."""
        return head_dim_of(self.text)

    @property
    def key_value_heads(self) -> int:
        """The number of key and value heads."""
        return key_value_heads_of(self.text)

    @cached_property
    def rotates_partly(self) -> bool:
        """Whether some dimensions of each head do not rotate."""
        is_partial = self.rope.rotary_dim < self.head_dim
        return is_partial or hasattr(self.text, "qk_nope_head_dim")

    @cached_property
    def is_quantised(self) -> bool:
        """Whether it describes quantised weights."""
        return quantization_of(self.whole) is not None

    @property
    def loader(self) -> str:
        """The name of the class of transformers that loads the model; empty if none does."""
        return "" if self.unloaded else str(loader_of(self.whole).__name__)

    @property
    def needs_trust(self) -> bool:
        """Whether transformers loads the model with trust_remote_code alone: a remapping, or other code."""
        return self.kind == "mapped" or self.stand_in is not None

    @cached_property
    def stand_in(self) -> StandIn | None:
        """How stock transformers reads a draft model or remote code; None for a stock class."""
        return None if self.custom else stand_in(self.raw)

    @property
    def is_known(self) -> bool:
        """Whether transformers has the architecture, or a class that reads its RoPE."""
        return is_known(self.raw.get("model_type")) or self.stand_in is not None

    @property
    def unloaded(self) -> str:
        """Why stock transformers does not load the weights; empty if it does."""
        return self.stand_in.unloaded if self.stand_in else ""

    def check_generates(self) -> None:
        """Raise a `RopepatchError` for a model that generates no text by itself."""
        if self.unloaded or not generates(self.whole):
            reason = self.unloaded or f"{self.loader} has no language model head"
            raise RopepatchError(
                f"{reason}: ropepatch measures and trains what generates text",
                hint="plan, extend and doctor take it",
            )

    # RoPE

    @cached_property
    def site(self) -> RotarySite:
        """The rotary module."""
        _ = self.text
        return self.known_site or find_rotary(self.skeleton)

    @property
    def has_rope(self) -> bool:
        """Whether attention rotates; that of some hybrids has no position encoding."""
        return self.site is not WITHOUT_SITE

    @cached_property
    def layer_type(self) -> str | None:
        """The type of the layers that are scaled, if RoPE differs by layer type."""
        return self.site.layer_type

    @cached_property
    def rope_parameters(self) -> dict[str, Any]:
        """The current `rope_parameters`, of the scaled layer type; empty without RoPE."""
        return self.site.of(self.text.rope_parameters) if self.has_rope else {}

    @cached_property
    def local_rope(self) -> LocalRope | None:
        """The local layers that use this RoPE; None for custom code, and if RoPE differs by layer type."""
        if self.custom or self.layer_type is not None:
            return None
        return local_rope(self.text)

    @cached_property
    def stated_rope(self) -> Rope:
        """The RoPE parameters by config.json."""
        if self.scaled_rope is not None:
            return self.scaled_rope
        if not self.has_rope:
            return Rope(0, LARGEST_BASE, _window(self.text, {}), ())
        rope = read_rope(self.text, self.site)
        check_table_rules(self.text, self.site)
        if stated := self.tied_yarn:
            return Rope(rope.rotary_dim, float(stated["rope_theta"]), stated[ORIGINAL])
        return rope

    @cached_property
    def tied_yarn(self) -> dict[str, Any] | None:
        """The `rope_parameters` of YaRN if its factor also changes the softmax scale; else None.

        No rope type can express a further scaling of these, so YaRN is applied to L with a larger factor.
        """
        stated = self.rope_parameters
        is_yarn = stated.get("rope_type") == "yarn" and stated.get("mscale_all_dim")
        return stated if is_yarn and self.model_type in TIED else None

    @cached_property
    def frequencies(self) -> Frequencies:
        """The frequencies that stock transformers computes: the reference for all others.

        For a `longrope` with two lists, those beyond the switch. None without RoPE.
        """
        if not self.has_rope:
            return Frequencies(torch.empty(0))
        return stock_table(self.text, self.site, beyond_switch=True)

    @cached_property
    def other_frequencies(self) -> dict[str, list[float]]:
        """The other frequencies and attention factors: of unscaled layer types, and up to a switch."""
        others: dict[str, list[float]] = {}
        if scaled := self.layer_type:
            layers = self.text.rope_parameters.keys() & self.text.layer_types
            for kind in sorted(layers - {scaled}):
                inv_freq, a = stock_table(
                    self.text, replace(self.site, layer_type=kind)
                )
                others[kind] = [*inv_freq.tolist(), a]
        if switches(self.rope_parameters):
            others[UP_TO_SWITCH] = stock_table(self.text, self.site).inv_freq.tolist()
        return others
