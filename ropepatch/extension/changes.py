"""What a method changes in a model, as one value that stock transformers, or llama.cpp, computes exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ropepatch.attention import Remapping
from ropepatch.attention.interchange import refusal
from ropepatch.attention.remapped import check_mappable
from ropepatch.errors import RopepatchError, argument
from ropepatch.extension.remapping_code import remapping_code, remapping_keys
from ropepatch.model.architectures import SCALED_BY_DEFAULT
from ropepatch.model.checkpoint import CODE, Checkpoint, InMemory, changed_since
from ropepatch.model.config import (
    KEY,
    ORIGINAL,
    QUERY_TEMPERATURE,
    SCALING_KEYS,
    SEQUENCE,
    UP_TO_SWITCH,
    Config,
    differs_by_layer,
    generates,
    head_dim_of,
    legacy_keys,
    of_global_layers,
    switches,
)
from ropepatch.model.gguf import FACTORS, FREQS, GgufModel, GgufRope
from ropepatch.scaling import Scaling, YaRN, make_scaling
from ropepatch.scaling.powers import Unscaled, ntk_theta
from ropepatch.scaling.ramps import BETAS
from ropepatch.scaling.rope import Frequencies, Method, Rope, divisors
from ropepatch.scaling.searched import longrope_attention_factor, longrope_parameters

ACROSS_LAYERS = "allow_global_per_layer_attribute_access"
# Rope types that a longer context does not change
KEPT_AT_ANY_LENGTH = (
    "linear",
    "llama3",
    "yarn",
    "proportional",
)
TABLES = (*FACTORS, FREQS)  # tensors of a GGUF file
_, SHORT = FACTORS


@dataclass(frozen=True)
class Change:
    """All by which a written model differs from its source.

    Args:
        keys: The keys of config.json (in the language model's part), or the metadata of a GGUF file. None
            removes a key of GGUF.
        frequencies: The frequencies that a reader computes from them.
        tables: The tables of divisors in a GGUF file by name; None removes one.
        code: The text of code files by name.
    """

    keys: Mapping[str, Any]
    frequencies: Frequencies
    tables: Mapping[str, list[float] | None] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)

    def limited_to(self, layers: list[int] | None) -> Change:
        """Return the change of a position remapping that only some layers have; None for all."""
        described = self.keys[KEY] | {"layers": layers}
        return replace(self, keys={**self.keys, KEY: described})


def change_of(method: Method, config: Config | GgufModel, target: int) -> Change:
    """Return the change that extends a model to a target length, in tokens.

    Raises:
        RopepatchError: If the files of the model cannot express the method.
    """
    if (stated := config.tied_yarn) and not isinstance(method, YaRN):
        raise RopepatchError(
            f"{method.name} cannot extend the YaRN of {config.model_type}, factor {stated['factor']:g}",
            hint=f"use {argument('method', 'yarn')}, which replaces the factor",
        )
    if isinstance(config, GgufModel):
        return _gguf_change(config, method, target)
    if not config.has_rope:
        return _lengths_only(config, method, target)
    if isinstance(method, Scaling):
        return scaling_change(config, method, target)
    assert isinstance(method, Remapping)
    if not generates(config.whole):
        raise refusal(config.skeleton, "its attention may not be causal")
    check_mappable(config.skeleton, config.window)
    unscaled = scaling_change(
        config, make_scaling("none", factor=target / config.window), target
    )
    has_code = config.custom or config.stand_in
    is_stock = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if config.is_part or config.is_quantised or has_code or not is_stock:
        return unscaled  # in memory only
    keys = remapping_keys(config, method, target)
    code = {CODE: remapping_code(config.model_type, config.site.path)}
    return replace(unscaled, keys={**unscaled.keys, **keys}, code=code)


def _lengths_only(config: Config, method: Method, target: int) -> Change:
    """Return the change of a model whose attention has no RoPE."""
    if method.changes_frequencies or isinstance(method, Remapping):
        raise RopepatchError(
            f"the attention of {config.model_type} has no RoPE: it needs no scaling for a longer context",
            hint=f"{argument('method', 'none')} only writes the longer length",
        )
    length = "max_position_embeddings"
    keys = {length, SEQUENCE} & config.stated.keys()
    keys.add(config.text.attribute_map.get(length, length))
    return Change(dict.fromkeys(keys, target), config.frequencies)


# A scaling in config.json


def scaling_change(
    config: Config, scaling: Scaling, target: int, *, static: bool = False
) -> Change:
    """Return the first form of a scaling that stock transformers computes exactly.

    A `longrope` that switches lists keeps its short list, unless the result must be ``static``.

    Raises:
        RopepatchError: If there is none.
    """
    others = dict(config.other_frequencies)
    if static:
        others.pop(UP_TO_SWITCH, None)
    for change in _candidates(config, scaling, target, static):
        with suppress(RopepatchError):
            stock = config.changed(change.keys)
            exact = stock.frequencies.distance(change.frequencies) == 0
            if exact and others.items() <= stock.other_frequencies.items():
                return change
    raise RopepatchError(
        f"no config.json makes transformers compute these frequencies for {config.model_type}",
        hint="choose another method; nothing was written",
    )


def _candidates(
    config: Config, scaling: Scaling, target: int, static: bool
) -> Iterator[Change]:
    """Yield the changes of config.json for each form of a scaling, with and without the older keys."""
    by_layer = differs_by_layer(config.text)  # whose class is newer than those keys
    nulls = {"rope_scaling"} if config.model_type in SCALED_BY_DEFAULT else set()
    current = config.rope_parameters
    for parameters, frequencies in saved_ropes(config, scaling, target):
        if switches(current) and not static:  # `longrope`, since it is scaled already
            kept = {key: current[key] for key in ("short_factor", ORIGINAL)}
            parameters |= kept | {"factor": target / current[ORIGINAL]}
            parameters |= _mscales(frequencies.attention_factor)
        keys = _keys_of(config, parameters, target)
        older_keys = [] if by_layer else [legacy_keys(config.stated, parameters)]
        for older in (*older_keys, {"rope_scaling": None}):
            kept = {
                key: value
                for key, value in older.items()
                if value is not None or key in config.stated.keys() | nulls
            }
            yield Change(keys | kept, frequencies)


# `rope_parameters`, and the exact frequencies that stock transformers computes from them
SavedRope = tuple[dict[str, Any], Frequencies]


def saved_ropes(config: Config, scaling: Scaling, to: int) -> Iterator[SavedRope]:
    """Yield the forms of a scaling in `rope_parameters`, the most widely supported first.

    Without scaling, first the unchanged parameters, if they do not depend on the length. Then the native rope
    type (for linear on linear, with both factors; `proportional` scales only its first pairs), then `longrope`
    with equal lists, which can express any static frequencies.

    Args:
        config: The model; other keys of its `rope_parameters` (of the scaled layer type) are kept.
        scaling: The scaling to save.
        to: The new max_position_embeddings, in tokens.
    """
    rope, current = config.rope, config.rope_parameters
    kind = current.get("rope_type")
    if isinstance(scaling, Unscaled) and kind in KEPT_AT_ANY_LENGTH:
        yield dict(current), scaling.frequencies(rope)
    own = {key: value for key, value in current.items() if key not in SCALING_KEYS}
    own["rope_theta"] = rope.rope_theta
    if kind == "proportional":
        # The share of pairs that rotate; in other types D / head_dim
        own.pop("partial_rotary_factor", None)
    # A query temperature uses the original length that the model was trained with.
    kept = (
        {ORIGINAL: current[ORIGINAL]}
        if {QUERY_TEMPERATURE, ORIGINAL} <= current.keys()
        else {}
    )
    if native := scaling.native(rope):
        # The softmax scale uses its keys
        if native["rope_type"] == kind == "yarn":
            names = current.keys() & {"mscale", "mscale_all_dim"}
            kept |= {key: current[key] for key in names}
        parameters, length = own | native | kept, None
        if native["rope_type"] == "longrope":
            a, length = native["attention_factor"], to
            parameters |= (
                _mscales(a) if scaling.length_dependent else _lengths(a, rope, to, kept)
            )
        yield parameters, scaling.frequencies(rope, length)
    elif scaling.name == "linear" and kind in ("linear", "proportional"):
        stated = own | {"rope_type": kind} | kept if kind == "linear" else current
        factor = current.get("factor", 1.0) * scaling.factor
        yield stated | {"factor": factor}, scaling.frequencies(rope)
    elif scaling.name == "ntk" and kind == "proportional" and not rope.is_scaled:
        theta = ntk_theta(rope, scaling.factor)
        yield current | {"rope_theta": theta}, scaling.frequencies(rope)
    if not scaling.length_dependent:
        yield as_longrope(scaling.frequencies(rope), rope, to, own | kept)


def as_longrope(
    frequencies: Frequencies, rope: Rope, to: int, own: dict[str, Any]
) -> SavedRope:
    """Return static frequencies as `longrope` with short_factor = long_factor = theta_i / theta'_i.

    The model's ``own`` keys of `rope_parameters` are kept. With an attention factor of 1, all engines that
    support longrope agree.
    """
    ratios = divisors(rope.unscaled(), frequencies.inv_freq).tolist()
    a = frequencies.attention_factor
    longrope = longrope_parameters(
        rope, 1.0, a, short=tuple(ratios), long=tuple(ratios)
    )
    parameters = own | longrope | _lengths(a, rope, to, own)
    inv_freq = 1.0 / (
        torch.tensor(ratios, dtype=torch.float32, device="cpu")
        * rope.rope_theta ** rope.exponents()
    )
    return parameters, Frequencies(inv_freq, a)


def _lengths(
    attention_factor: float, rope: Rope, to: int, own: dict[str, Any]
) -> dict[str, Any]:
    """Return the lengths for equal lists, which only determine the attention factor that engines derive.

    Engines use s = max_position_embeddings / original_max_position_embeddings. With the target as original
    length they derive a = 1, and neither limit the length (vLLM) nor misplace a position (SGLang). With a
    query temperature, the original length is kept.
    """
    if ORIGINAL in own:
        return {"factor": to / own[ORIGINAL], ORIGINAL: own[ORIGINAL]} | _mscales(
            attention_factor
        )
    window = rope.original_max_position_embeddings
    derived = longrope_attention_factor(to / window, window)
    if derived != 1 and math.isclose(attention_factor, derived, rel_tol=1e-9):
        return {"factor": to / window, ORIGINAL: window}
    lengths = {"factor": 1.0, ORIGINAL: to}
    return lengths if attention_factor == 1 else lengths | _mscales(attention_factor)


def _mscales(attention_factor: float) -> dict[str, float]:
    # vLLM and SGLang ignore attention_factor for longrope and use these two.
    return {
        "short_mscale": float(attention_factor),
        "long_mscale": float(attention_factor),
    }


def _keys_of(config: Config, parameters: dict[str, Any], to: int) -> dict[str, Any]:
    text, window = config.text, config.window
    # transformers requires this for `longrope` with head sizes that differ by layer.
    by_layer = parameters["rope_type"] == "longrope" and differs_by_layer(text)
    # `dynamic` uses max_position_embeddings as original length: the target there would disable it.
    reach = window if parameters["rope_type"] == "dynamic" else to
    keys: dict[str, Any] = {ACROSS_LAYERS: True} if by_layer else {}
    keys |= {
        text.attribute_map.get(
            "max_position_embeddings", "max_position_embeddings"
        ): reach,
        "rope_parameters": config.site.replaced(text.rope_parameters, parameters),
    }
    if ORIGINAL in parameters or hasattr(text, ORIGINAL):
        # The top level wins over the nested key in transformers 5, and some engines support only that.
        keys[ORIGINAL] = parameters.get(ORIGINAL, window)
    if SEQUENCE in config.stated:  # vLLM and FastChat use it as limit
        keys[SEQUENCE] = reach
    if getattr(of_global_layers(text), "head_dim", 0) is None:
        keys["head_dim"] = head_dim_of(text)
    return keys


# A scaling in a GGUF file


def _gguf_change(model: GgufModel, scaling: Method, target: int) -> Change:
    """Return the metadata and tables from which llama.cpp computes a scaling.

    Raises:
        RopepatchError: If it cannot compute it in this architecture.
    """
    if not isinstance(scaling, Scaling) or scaling.length_dependent:
        raise RopepatchError(
            f"a GGUF file cannot contain {scaling.name}, only frequencies for all lengths",
            hint=f"use {argument('method', 'yarn')}, or extend the safetensors checkpoint",
        )
    if scaling.changes_frequencies and not model.rotates:
        raise RopepatchError(
            f"no layer of {model.name} that attends to the whole context uses RoPE: no scaling is needed "
            "for a longer context",
            hint=f"{argument('method', 'none')} only writes the longer context",
        )
    rope = model.find_equivalent(scaling)
    if rope is None:
        raise RopepatchError(
            f"llama.cpp's {model.architecture} does not support this {scaling.name}, only freq_base, "
            f"linear and YaRN with betas {BETAS[0]:g} and {BETAS[1]:g}",
            hint="use another method or its defaults, or extend the safetensors checkpoint",
        )
    tables: dict[str, list[float] | None] = dict.fromkeys(
        name for name in TABLES if model.tables and name in model.file.tensors
    )
    if rope.divisors:
        names = FACTORS if rope.kind == "longrope" else model.tables
        table = list(rope.divisors)
        tables |= dict.fromkeys(names, table)
    if rope.switches:
        del tables[SHORT]
    frequencies = rope.frequencies(model.rotary_dim)
    return Change(_metadata(model, rope, target), frequencies, tables)


def _metadata(
    model: GgufModel, rope: GgufRope, to: int
) -> dict[str, int | float | str | None]:
    """Return the metadata that change."""
    has_factor = rope.kind not in ("none", "longrope")
    has_original = has_factor or model.keeps_original
    fast, slow = (None, None) if rope.betas == BETAS else rope.betas
    is_scaled = rope.kind != "none" or rope.attn_factor != 1 or rope.divisors
    values: dict[str, int | float | str | None] = {
        "context_length": to,
        "rope.freq_base": rope.base,
        "rope.scaling.type": rope.kind if is_scaled else None,
        "rope.scaling.factor": float(rope.factor) if has_factor else None,
        "rope.scaling.original_context_length": rope.original if has_original else None,
        "rope.scaling.attn_factor": None if rope.attn_factor == 1 else rope.attn_factor,
        "rope.scaling.yarn_ext_factor": None,
        "rope.scaling.yarn_attn_factor": None,
        "rope.scaling.yarn_log_multiplier": None,
        "rope.scaling.yarn_beta_fast": fast,
        "rope.scaling.yarn_beta_slow": slow,
        "rope.scale_linear": None,
    }
    if rope == model.gguf_rope:  # its scaling stays as it is stated
        lengths = "context_length", "rope.scaling.original_context_length"
        values = {name: values[name] for name in lengths}
    planned = {model.key(name): value for name, value in values.items()}
    held = model.held(planned)
    return {key: value for key, value in planned.items() if held.get(key) != value}


# A plan

Source = Checkpoint | InMemory | GgufModel


@dataclass(frozen=True, repr=False, eq=False)
class Planned:
    """A method for a source and a target length; everything else is computed from these on first use.

    Args:
        source: The checkpoint, the model in memory or the GGUF file to extend.
        method: A RoPE scaling or a position remapping, with all its parameters.
        target: The target length, in tokens.
    """

    source: Source
    method: Method
    target: int

    @cached_property
    def change(self) -> Change:
        """All by which the extended model differs from its source.

        Raises:
            RopepatchError: If the files of the model cannot express it.
        """
        return change_of(self.method, self.source.config, self.target)

    @cached_property
    def config(self) -> Config:
        """The configuration of the model.

        Raises:
            RopepatchError: If it is a GGUF file, which only `plan` and `extend` support.
        """
        if isinstance(self.source, GgufModel):
            raise RopepatchError(
                f"{self.source.name} is a GGUF file, which only `ropepatch plan` and `ropepatch extend` "
                "support",
                hint="use the checkpoint that it was made from",
            )
        return self.source.config

    def checkpoint(self, include: Sequence[str] = ()) -> Checkpoint:
        """Return the checkpoint with its weights and all its files, downloaded if needed.

        Raises:
            RopepatchError: If it cannot be found, or is another than that of a model in memory.
        """
        config = self.config  # an error for a GGUF file
        assert not isinstance(self.source, GgufModel)
        source = self.source.complete(include)
        if source.config.rope != config.rope:
            raise changed_since(self.source.name)
        return source

    @property
    def factor(self) -> float:
        """The scaling factor: the target length over the original one, unless the method sets another."""
        return self.method.factor_for(self.source.config.window, self.target)

    @cached_property
    def changes(self) -> dict[str, Any]:
        """The keys that change in config.json, or the metadata and tables of a GGUF file.

        None removes one.
        """
        return {**self.change.keys, **self.change.tables}

    @property
    def before(self) -> dict[str, Any]:
        """The current values of the keys in `changes`, where set."""
        return self.source.config.held(self.changes)

    @cached_property
    def rope_parameters(self) -> dict[str, Any]:
        """The new `rope_parameters`, of the global layers if types differ; empty for GGUF and without RoPE."""
        if isinstance(self.source, GgufModel) or not self.config.has_rope:
            return {}
        return self.config.site.of(self.change.keys["rope_parameters"])

    @property
    def length_dependent(self) -> bool:
        """Whether the saved frequencies depend on the sequence length."""
        return self.method.length_dependent or switches(self.rope_parameters)

    @cached_property
    def patched(self) -> Change:
        """The change of a model in memory: at the target if the frequencies depend on the length."""
        if not self.length_dependent or not isinstance(self.method, Scaling):
            return self.change
        static = self.method.at(self.config.rope, self.target)
        return scaling_change(self.config, static, self.target, static=True)

    def frequencies(self) -> Frequencies:
        """Return the frequencies of the patched model, bit-identical to those of the reloaded checkpoint."""
        return self.patched.frequencies
