"""The changes of config.json for a scaling: a form that stock transformers computes bit-identically."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from ropepatch.errors import RopepatchError
from ropepatch.model.architectures import SCALED_BY_DEFAULT
from ropepatch.model.checkpoint import UP_TO_SWITCH, Checkpoint
from ropepatch.model.config import (
    ORIGINAL,
    QUERY_TEMPERATURE,
    SCALING_KEYS,
    differs_by_layer,
    head_dim_of,
    legacy_keys,
    of_global_layers,
)
from ropepatch.model.rotary import SEQUENCE, float32_on_cpu, switches
from ropepatch.scaling import Scaling
from ropepatch.scaling.powers import Unscaled, ntk_theta
from ropepatch.scaling.rope import Frequencies, Rope, divisors
from ropepatch.scaling.searched import longrope_attention_factor, longrope_parameters

ACROSS_LAYERS = "allow_global_per_layer_attribute_access"
KEPT_AT_ANY_LENGTH = "linear", "llama3", "yarn"  # rope types that a longer context does not change


@dataclass(frozen=True)
class SavedRope:
    """`rope_parameters`, and the exact frequencies that stock transformers computes from them."""

    rope_parameters: dict[str, Any]
    frequencies: Frequencies


def saved_ropes(scaling: Scaling, rope: Rope, current: dict[str, Any], to: int) -> Iterator[SavedRope]:
    """Yield the forms of a scaling in `rope_parameters`, the most widely supported first.

    Without scaling, first the unchanged parameters, if they do not depend on the length. Then the native rope
    type (for linear on linear, with both factors), then `longrope` with equal lists, which can express any
    static frequencies.

    Args:
        scaling: The scaling to save.
        rope: The RoPE that it scales.
        current: The model's current `rope_parameters` (of one layer type); other keys are kept.
        to: The new max_position_embeddings, in tokens.
    """
    if isinstance(scaling, Unscaled) and current.get("rope_type") in KEPT_AT_ANY_LENGTH:
        yield SavedRope(dict(current), scaling.frequencies(rope))
    # partial_rotary_factor is the share of pairs that rotate under `proportional`, else D / head_dim.
    proportional = {"partial_rotary_factor"} if current.get("rope_type") == "proportional" else set()
    own = {key: value for key, value in current.items() if key not in SCALING_KEYS | proportional}
    # A query temperature uses the original length that the model was trained with.
    kept = {ORIGINAL: current[ORIGINAL]} if {QUERY_TEMPERATURE, ORIGINAL} <= current.keys() else {}
    if native := scaling.native(rope):
        if native["rope_type"] == current.get("rope_type") == "yarn":  # the softmax scale uses its keys
            kept |= {key: current[key] for key in ("mscale", "mscale_all_dim") if key in current}
        parameters = own | {"rope_theta": rope.rope_theta} | native | kept
        length = None
        if native["rope_type"] == "longrope":
            a, length = native["attention_factor"], to
            parameters |= _mscales(a) if scaling.length_dependent else _lengths(a, rope, to, kept)
        yield SavedRope(parameters, scaling.frequencies(rope, length))
    elif current.get("rope_type") == "proportional":
        yield from _proportional(scaling, rope, current)
    elif scaling.name == current.get("rope_type") == "linear":
        both = {"rope_type": "linear", "factor": current["factor"] * scaling.factor}
        yield SavedRope(own | {"rope_theta": rope.rope_theta} | both | kept, scaling.frequencies(rope))
    if not scaling.length_dependent:
        yield as_longrope(scaling.frequencies(rope), rope, to, own | kept)


def _proportional(scaling: Scaling, rope: Rope, current: dict[str, Any]) -> Iterator[SavedRope]:
    """Yield `proportional` forms, which scale only the first pairs: one divisor, or another base."""
    frequencies = scaling.frequencies(rope)
    if scaling.name in ("none", "linear"):
        factor = current.get("factor", 1.0) * (scaling.factor if scaling.name == "linear" else 1.0)
        yield SavedRope(current | ({"factor": factor} if factor != 1 else {}), frequencies)
    elif scaling.name == "ntk" and not rope.is_scaled:
        yield SavedRope(current | {"rope_theta": ntk_theta(rope, scaling.factor)}, frequencies)


def as_longrope(frequencies: Frequencies, rope: Rope, to: int, own: dict[str, Any]) -> SavedRope:
    """Return static frequencies as `longrope` with short_factor = long_factor = theta_i / theta'_i.

    The arguments are those of `saved_ropes`, and the model's ``own`` keys of `rope_parameters`. With an
    attention factor of 1, all engines that support longrope agree.
    """
    ratios = divisors(rope.unscaled(), frequencies.inv_freq).tolist()
    a = frequencies.attention_factor
    longrope = longrope_parameters(rope, 1.0, a, short=tuple(ratios), long=tuple(ratios))
    parameters = own | {"rope_theta": rope.rope_theta} | longrope | _lengths(a, rope, to, own)
    inv_freq = 1.0 / (torch.tensor(ratios, dtype=torch.float32) * rope.rope_theta ** rope.exponents())
    return SavedRope(parameters, Frequencies(inv_freq, a))


def _lengths(attention_factor: float, rope: Rope, to: int, own: dict[str, Any]) -> dict[str, Any]:
    """Return the lengths for equal lists, which only determine the attention factor that engines derive.

    Engines use s = max_position_embeddings / original_max_position_embeddings. With the target as original
    length they derive a = 1, and neither limit the length (vLLM) nor misplace a position (SGLang). With a
    query temperature, the original length is kept.
    """
    if ORIGINAL in own:
        return {"factor": to / own[ORIGINAL], ORIGINAL: own[ORIGINAL]} | _mscales(attention_factor)
    window = rope.original_max_position_embeddings
    derived = longrope_attention_factor(to / window, window)
    if derived != 1 and math.isclose(attention_factor, derived, rel_tol=1e-9):
        return {"factor": to / window, ORIGINAL: window}
    lengths = {"factor": 1.0, ORIGINAL: to}
    return lengths if attention_factor == 1 else lengths | _mscales(attention_factor)


def _mscales(attention_factor: float) -> dict[str, float]:
    # vLLM and SGLang ignore attention_factor for longrope and use these two.
    return {"short_mscale": float(attention_factor), "long_mscale": float(attention_factor)}


@float32_on_cpu()
def find_changes(
    source: Checkpoint, scaling: Scaling, to: int, *, static: bool = False
) -> tuple[SavedRope, dict[str, Any]]:
    """Return the first form that stock transformers computes exactly, and its changes of config.json.

    A `longrope` that switches lists keeps its short list, unless the result must be ``static``.
    """
    distance, others = math.inf, source.other_frequencies()
    if static:
        others.pop(UP_TO_SWITCH, None)
    by_layer = differs_by_layer(source.config)  # whose class is newer than those keys
    nulls = {"rope_scaling"} if source.config.model_type in SCALED_BY_DEFAULT else set()
    for saved in _forms(source, scaling, to, static):
        changes = _changes_of(source, saved.rope_parameters, to)
        older_keys = [] if by_layer else [legacy_keys(source.stated, saved.rope_parameters)]
        for older in (*older_keys, {"rope_scaling": None}):
            candidate = changes | {
                key: value
                for key, value in older.items()
                if value is not None or key in source.stated.keys() | nulls
            }
            distance = min(distance, _distance_from_stock(source, candidate, saved.frequencies, others))
            if distance == 0:
                return saved, candidate
    raise RopepatchError(
        f"no config.json makes transformers compute these frequencies for {source.config.model_type} "
        f"(off by at least {distance:.1e})",
        hint="please report the model type; nothing was written",
    )


def _forms(source: Checkpoint, scaling: Scaling, to: int, static: bool) -> Iterator[SavedRope]:
    """Yield the forms of a scaling; last those without a partial_rotary_factor that default RoPE ignores."""
    current = source.site.of(source.config.rope_parameters)
    forms = saved_ropes(scaling, source.rope, current, to)
    if "partial_rotary_factor" in current:
        full = current | {"partial_rotary_factor": 1.0}
        forms = chain(forms, saved_ropes(scaling, source.rope, full, to))
    if static or not switches(current):
        yield from forms
        return
    kept = {key: current[key] for key in ("short_factor", ORIGINAL)} | {"factor": to / current[ORIGINAL]}
    for saved in forms:  # only `longrope`, since it is scaled already
        mscales = _mscales(saved.frequencies.attention_factor)
        yield replace(saved, rope_parameters=saved.rope_parameters | kept | mscales)


def _changes_of(source: Checkpoint, parameters: dict[str, Any], to: int) -> dict[str, Any]:
    config, window = source.config, source.window
    # transformers requires this for `longrope` with head sizes that differ by layer.
    by_layer = parameters["rope_type"] == "longrope" and differs_by_layer(config)
    # `dynamic` uses max_position_embeddings as original length: the target there would disable it.
    reach = window if parameters["rope_type"] == "dynamic" else to
    changes: dict[str, Any] = {ACROSS_LAYERS: True} if by_layer else {}
    changes |= {
        config.attribute_map.get("max_position_embeddings", "max_position_embeddings"): reach,
        "rope_parameters": source.site.replaced(config.rope_parameters, parameters),
    }
    if ORIGINAL in parameters or hasattr(config, ORIGINAL):
        # The top level wins over the nested key in transformers 5, and some engines support only that.
        changes[ORIGINAL] = parameters.get(ORIGINAL, window)
    if SEQUENCE in source.stated:  # vLLM and FastChat use it as limit
        changes[SEQUENCE] = reach
    if getattr(of_global_layers(config), "head_dim", 0) is None:
        changes["head_dim"] = head_dim_of(config)
    return changes


def _distance_from_stock(
    source: Checkpoint, changes: dict[str, Any], expected: Frequencies, others: dict[str, list[float]]
) -> float:
    """Return 0 if stock transformers computes exactly these frequencies, infinity if it raises."""
    try:
        changed = source.with_config(source.changed(changes))
        distance = changed.frequencies().distance(expected)
        return distance if others.items() <= changed.other_frequencies().items() else math.inf
    except RopepatchError:
        return math.inf
