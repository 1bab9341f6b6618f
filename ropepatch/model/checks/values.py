"""Rules of single values: keys, numbers, types of rope, and whether transformers reads them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig

from ropepatch.errors import RopepatchError
from ropepatch.model.checkpoint import kind_of
from ropepatch.model.checks.case import ORIGINAL, THETA_KEYS, WINDOW_KEYS, Case, Stated, number, positive
from ropepatch.model.checks.findings import CONFIG, Finding, Key, Severity, set_all, shown
from ropepatch.model.config import REQUIRED, SCALING_KEYS, is_known, load_text_config

KNOWN_TYPES = {
    *("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"),
    *("axial", "ntk_alpha", "mrope", "xdrope"),  # of single architectures
}
OTHER_KEYS = {
    *("attn_factor", "extrapolation_factor", "finetuned", "alpha", "mixed_b", "partial_rotary_factor"),
    *("mrope_section", "mrope_interleaved", "llama_4_scaling_beta", "xdrope_section"),
    "long_factor_scale",
}
LISTS = ("short_factor", "long_factor")
NUMBERS = (
    *("factor", "rope_theta", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("low_freq_factor", "high_freq_factor", "short_mscale", "long_mscale", "partial_rotary_factor"),
    ORIGINAL,
)
LOCAL_THETA = "rope_local_base_freq"  # Gemma 3's base of the sliding layers
SHARES = ("partial_rotary_factor", "rotary_pct")
ABOVE_ZERO = ("factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", ORIGINAL)
ABOVE = dict.fromkeys(ABOVE_ZERO, 0.0) | dict.fromkeys((*THETA_KEYS, *WINDOW_KEYS, LOCAL_THETA), 1.0)
# Far above any published value, and far below any that computes.
AT_MOST = dict.fromkeys(SHARES, 1.0) | dict.fromkeys((*WINDOW_KEYS, ORIGINAL), 1e10)
AT_MOST |= {"factor": 1e6, "attention_factor": 100.0}


def misspelled_keys(case: Case, rope: Stated) -> Iterator[Finding]:
    """A key that is nearly one of the known ones."""
    known = SCALING_KEYS | OTHER_KEYS
    for key in map(rope.at, sorted(rope.values.keys() - known)):
        for near in difflib.get_close_matches(key.name, sorted(known), n=1, cutoff=0.85):
            problem = f"no reader knows {key.name}; {near} is meant, perhaps"
            severity: Severity = "warning" if near in rope.values else "error"
            yield key.finding("key-misspelled", problem, f"rename it to {near}", severity=severity)


def broken_values(case: Case) -> Iterator[Finding]:
    """Values that are no numbers, windows, switches or ropes, or none that a rope can have."""
    for name in ("rope_scaling", "rope_parameters"):
        yield from _of_kind(case.at(name), dict, "an object, or null")
    for rope in case.ropes:
        yield from _of_kind(rope.at("truncate"), bool, "true or false")
        factor = rope.positive("factor") or 1.0
        # Where the temperature 0.1 k ln s + 1 reaches 0; above it ropepatch writes a k below 0 too.
        least = -10 / math.log(factor) if factor > 1 else 0.0
        for name in NUMBERS:
            yield from _broken_number(rope.at(name), least if name.startswith("mscale") else 0.0)
    for name in filter(None, (case.window_key, case.theta_key, ORIGINAL, LOCAL_THETA, *SHARES)):
        yield from _broken_number(case.at(name))


def _of_kind(key: Key, kind: type, expected: str) -> Iterator[Finding]:
    if key.value is not None and not isinstance(key.value, kind):
        yield key.finding("impossible-value", f"{key.name} is {shown(key.value)}", f"write {expected}")


def _broken_number(key: Key, least: float = 0.0) -> Iterator[Finding]:
    problem, value = f"{key.name} is {shown(key.value)}", number(key.value)
    above, most = ABOVE.get(key.name), AT_MOST.get(key.name, math.inf)
    if key.value is None:
        return
    if value is None:
        quoted = _number_in(key.value)
        remedy = f"write {quoted:g} without quotes" if quoted else "write a number"
        yield key.finding("not-a-number", problem, remedy, fix=key.set(_whole(quoted)) if quoted else ())
    elif value < min(least, above or 0) or (above is not None and value <= above):
        yield key.finding("impossible-value", problem, f"write a number above {above or least:g}")
    elif value > most:
        yield key.finding("impossible-value", problem, f"write a number of at most {most:g}")
    if isinstance(key.value, float) and key.name in (*WINDOW_KEYS, ORIGINAL):
        whole = value is not None and value > 0 and value.is_integer()
        remedy = f"write {value:.0f}" if whole else "write the window in tokens"
        yield key.finding("window-not-integer", problem, remedy, fix=key.set(int(key.value)) if whole else ())


def _whole(value: float) -> float:
    return int(value) if value.is_integer() else value


def _number_in(value: object) -> float | None:
    """The number in a text that is one."""
    try:
        return positive(float(value)) if isinstance(value, str) else None
    except ValueError:
        return None


def longrope_lists(case: Case, rope: Stated) -> Iterator[Finding]:
    """Lists of factors of another length, or with impossible ones."""
    for key in map(rope.at, LISTS):
        factors = key.value
        if rope.kind not in ("longrope", "su") or factors is None:
            continue
        if not isinstance(factors, list) or not all(map(positive, factors)):
            problem = f"{key.name} is no list of numbers above 0"
            yield key.finding("impossible-value", problem, "write one divisor for each rotary pair")
        elif case.pair_count and len(factors) != case.pair_count:
            problem = f"{key.name} has {len(factors)} entries, the model has {case.pair_count} rotary pairs"
            yield key.finding("list-length", problem, "take the lists of this very model")


def required_keys(case: Case, rope: Stated) -> Iterator[Finding]:
    """A key without which a type cannot be computed."""
    for key in map(rope.at, REQUIRED.get(rope.kind or "", ())):
        if key.value is not None:
            continue
        original = case.original(rope)
        ratio = case.window / original if case.window and original else 0
        fix = key.set(ratio) if rope.kind == "yarn" and ratio > 1 else ()
        remedy = f'write "factor": {ratio:g}, the ratio of the windows' if fix else f"write {key.name}"
        yield key.finding("key-missing", f"{rope.kind} scaling without {key.name}", remedy, fix=fix)


def unknown_types(case: Case, rope: Stated) -> Iterator[Finding]:
    """A type that readers do not know, is missing, or keeps its own factor from being used."""
    kind, at = rope.kind, rope.at("rope_type" if "rope_type" in rope.values else "type")
    scaling = [rope.at(name) for name in ("factor", *LISTS) if rope.values.get(name)]
    if kind is None and scaling:
        problem = f"{scaling[0]} is there, but no rope_type says what it is for"
        remedy = "write the rope_type that the model was made with"
        yield rope.at("rope_type").finding("type-missing", problem, remedy)
    elif kind == "default" and scaling and rope.values.get("factor") != 1:
        problem = f"rope_type is default, so {scaling[0]} = {shown(scaling[0].value)} is ignored"
        remedy = "write the rope_type that the model was made with, or drop the factor"
        yield at.finding("scaling-ignored", problem, remedy)
    elif kind is not None and kind not in KNOWN_TYPES:
        lists = kind == "su" and all(isinstance(rope.values.get(name), list) for name in LISTS)
        names = [rope.at(name) for name in ("rope_type", "type") if name in rope.values]
        remedies = {
            "su": 'write "longrope", its name today',
            "ntk": "NTK-aware scaling is a larger rope_theta: write that, without a scaling",
        }
        remedy = remedies.get(kind, f"one of {', '.join(sorted(KNOWN_TYPES))}")
        problem, fix = f"rope_type {shown(kind)} is unknown to transformers", set_all(names, "longrope")
        yield at.finding("type-unknown", problem, remedy, fix=fix if lists else ())


def open_head_dim(case: Case) -> Iterator[Finding]:
    """A head size that is left open, under a type that computes with it."""
    kinds = [rope.kind for rope in case.ropes if rope.kind in ("yarn", "longrope", "dynamic")]
    config = configured(case.raw) if kinds else ""
    if isinstance(config, str):  # the reason why transformers does not read it
        is_open = "head_dim" in config and "NoneType" in config
    else:
        is_open = getattr(config, "head_dim", 0) is None
    if is_open:
        hidden, heads = (positive(case.stated.get(key)) for key in ("hidden_size", "num_attention_heads"))
        key, value = case.at("head_dim"), "null" if "head_dim" in case.stated else ""
        fix = key.set(int(hidden // heads)) if hidden and heads and hidden >= heads else ()
        problem = f"head_dim is {value or 'missing'} under rope_type {kinds[0]}"
        remedy = "write hidden_size / num_attention_heads, which is what null stands for"
        yield key.finding("head-dim-null", problem, remedy, fix=fix, value=value)


def refused(case: Case) -> Iterator[Finding]:
    """A config.json that transformers does not read at all, whatever the reason."""
    key, kind = Key(CONFIG, ("model_type",), case.raw.get("model_type")), kind_of(case.raw)
    if kind == "swapped":
        problem = "ropepatch has put another position encoding in the place of the rope"
        remedy = "load it by ropepatch.load, or use the checkpoint that it was made from"
        yield key.finding("encoding-swapped", problem, remedy)
    elif kind == "mapped":
        problem = "its distances are mapped, by the code beside its weights"
        remedy = "load it with trust_remote_code=True, once you have read the code, or by ropepatch.load"
        yield key.finding("attention-map", problem, remedy)
    elif not is_known(key.value):
        value = shown(key.value)
        problem = f"transformers has no model_type {value}"
        yield key.finding("not-in-transformers", problem, "none needed", value=value)
    elif isinstance(reason := configured(case.raw), str):
        yield Key(CONFIG, ()).finding("transformers-refuses", reason, "fix what the message names")


def configured(raw: dict[str, Any]) -> PreTrainedConfig | str:
    """The language model's part of a configuration as transformers reads it, or why it does not."""
    try:
        return load_text_config(raw)
    except RopepatchError as error:
        return str(error)
