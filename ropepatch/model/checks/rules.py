"""Rules for the JSON files of a checkpoint: one function per problem, which yields its findings.

Most rules check one set of RoPE parameters; the others compare values stated in several places.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from ropepatch.errors import RopepatchError, argument, plain
from ropepatch.model.architectures import (
    LOCAL_BASE,
    OPEN_RAMP,
    REBUILD_CACHE,
    STATE_THETA,
    TRAINED_ON,
    published_base,
)
from ropepatch.model.checks.case import (
    LEFT_BEHIND,
    THETA_KEYS,
    WINDOW_KEYS,
    Case,
    Stated,
    number,
    positive,
)
from ropepatch.model.checks.findings import (
    CONFIG,
    DROP,
    GENERATION,
    TOKENIZER,
    Edit,
    Finding,
    Key,
    Severity,
    set_all,
    shown,
)
from ropepatch.model.config import (
    ORIGINAL,
    REQUIRED,
    SCALING_KEYS,
    WITH_ORIGINAL,
    default_theta,
    is_known,
    legacy_keys,
    load_config,
    stated_class,
    text_config,
)
from ropepatch.model.engine_types import needing_older_keys
from ropepatch.model.kinds import kind_of
from ropepatch.model.record_file import FILE as RECORD
from ropepatch.model.rotary import SEQUENCE, stated_window
from ropepatch.scaling.ramps import yarn_temperature
from ropepatch.scaling.searched import longrope_attention_factor

Rule = Callable[[Case], Iterator[Finding]]
RopeRule = Callable[[Stated], Iterator[Finding]]

RULES: list[Rule] = []  # in the order of their findings

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
BOUNDS = {  # of the fast pairs and of the slow ones
    "yarn": ("betas-swapped", "beta_fast", "beta_slow"),
    "llama3": ("bands-swapped", "high_freq_factor", "low_freq_factor"),
}
BOUND_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}
ROUNDING = 0.01  # by how much factor x original may miss the window
USUAL = 1e-3  # how closely an attention factor agrees with a formula

DEFAULT_THETA = 10_000.0
LLAMA_3_VOCABULARY, LLAMA_3_SIZES = range(128_256, 128_512), (2048, 3072, 4096, 8192, 16_384)
LLAMA_3_THETA = 500_000.0
LOOK_IT_UP = "write the base from the model's card or its original config.json"


def rule(look: Rule) -> Rule:
    """Add a rule."""
    RULES.append(look)
    return look


def rope_rule(*kinds: str) -> Callable[[RopeRule], Rule]:
    """Add a rule for each set of RoPE parameters of these types, or of all types."""

    def add(look: RopeRule) -> Rule:
        def look_at_each(case: Case) -> Iterator[Finding]:
            for rope in case.ropes:
                if not kinds or rope.kind in kinds:
                    yield from look(rope)

        look_at_each.__name__ = look.__name__
        return rule(look_at_each)

    return add


# Single keys and values


@rope_rule()
def misspelled_keys(rope: Stated) -> Iterator[Finding]:
    """A key that is nearly one of the known ones."""
    known = SCALING_KEYS | OTHER_KEYS
    for key in map(rope.at, sorted(rope.values.keys() - known)):
        for near in difflib.get_close_matches(key.name, sorted(known), n=1, cutoff=0.85):
            problem = f"no program supports the key {key.name}; did you mean {near}?"
            severity: Severity = "warning" if near in rope.values else "error"
            yield key.finding("key-misspelled", problem, f"rename it to {near}", severity=severity)


@rule
def broken_values(case: Case) -> Iterator[Finding]:
    """Values of the wrong type, or out of range."""
    for name in ("rope_scaling", "rope_parameters"):
        yield from _of_kind(case.at(name), dict, "an object, or null")
    for rope in case.ropes:
        yield from _of_kind(rope.at("truncate"), bool, "true or false")
        factor = rope.positive("factor") or 1.0
        # Where the temperature 0.1 k ln s + 1 reaches 0; above that, ropepatch may write a negative k.
        least = -10 / math.log(factor) if factor > 1 else 0.0
        for name in NUMBERS:
            yield from _broken_number(rope.at(name), least if name.startswith("mscale") else 0.0)
    for name in (case.window_key, case.theta.name, ORIGINAL, LOCAL_THETA, *SHARES):
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
        remedy = f"write {plain(quoted)} without quotes" if quoted else "write a number"
        yield key.finding("not-a-number", problem, remedy, fix=key.set(quoted) if quoted else ())
    elif value < min(least, above or 0) or (above is not None and value <= above):
        yield key.finding("impossible-value", problem, f"write a number above {plain(above or least)}")
    elif value > most:
        yield key.finding("impossible-value", problem, f"write a number of at most {plain(most)}")
    if isinstance(key.value, float) and key.name in (*WINDOW_KEYS, ORIGINAL):
        whole = value is not None and value > 0 and value.is_integer()
        remedy = f"write {value:.0f}" if whole else "write the context length in tokens, an integer"
        yield key.finding("window-not-integer", problem, remedy, fix=key.set(int(key.value)) if whole else ())


def _number_in(value: object) -> float | None:
    """Parse a quoted number, as an integer if it is whole."""
    try:
        quoted = positive(float(value)) if isinstance(value, str) else None
    except ValueError:
        return None
    return int(quoted) if quoted and quoted.is_integer() else quoted


@rope_rule("longrope", "su")
def longrope_lists(rope: Stated) -> Iterator[Finding]:
    """Lists of factors of the wrong length, or with values out of range."""
    pairs = rope.case.pair_count
    for key in map(rope.at, LISTS):
        if key.value is None:
            continue
        if not isinstance(key.value, list) or not all(map(positive, key.value)):
            problem = f"{key.name} is not a list of numbers above 0"
            yield key.finding("impossible-value", problem, "write one divisor per rotary dimension pair")
        elif pairs and len(key.value) != pairs:
            problem = f"{key.name} has {len(key.value)} entries, expected {pairs}, one per rotary pair"
            yield key.finding("list-length", problem, "use the lists of this model")


@rope_rule(*REQUIRED)
def required_keys(rope: Stated) -> Iterator[Finding]:
    """A missing key that a type requires."""
    ratio = rope.case.window / rope.original if rope.case.window and rope.original else 0
    for key in map(rope.at, REQUIRED[rope.kind or ""]):
        if key.value is None:
            fix = key.set(ratio) if rope.kind == "yarn" and ratio > 1 else ()
            remedy = f'write "factor": {ratio:g}, the ratio of the lengths' if fix else f"write {key.name}"
            yield key.finding("key-missing", f"{rope.kind} scaling without {key.name}", remedy, fix=fix)


@rope_rule()
def unknown_types(rope: Stated) -> Iterator[Finding]:
    """A type that is unknown, missing, or ignores the stated factor."""
    kind, at = rope.kind, rope.at("rope_type", "type")
    scaling = [rope.at(name) for name in ("factor", *LISTS) if rope.values.get(name)]
    if kind is None and scaling:
        problem = f"{scaling[0]} without rope_type"
        remedy = "write the rope_type that the model was trained with"
        yield rope.at("rope_type").finding("type-missing", problem, remedy)
    elif kind == "default" and scaling and rope.values.get("factor") != 1:
        problem = f"rope_type is default, so {scaling[0]} = {shown(scaling[0].value)} is ignored"
        remedy = "write the rope_type that the model was trained with, or drop the factor"
        yield at.finding("scaling-ignored", problem, remedy)
    elif kind is not None and kind not in KNOWN_TYPES:
        lists = kind == "su" and all(isinstance(rope.values.get(name), list) for name in LISTS)
        names = [rope.at(name) for name in ("rope_type", "type") if name in rope.values]
        remedies = {
            "su": 'write "longrope", its current name',
            "ntk": "NTK-aware scaling is a larger rope_theta: write it, and drop the scaling",
        }
        remedy = remedies.get(kind, f"use one of {', '.join(sorted(KNOWN_TYPES))}")
        problem, fix = f"transformers has no rope_type {shown(kind)}", set_all(names, "longrope")
        yield at.finding("type-unknown", problem, remedy, fix=fix if lists else ())


@rule
def open_head_dim(case: Case) -> Iterator[Finding]:
    """A missing head size, under a type that needs it."""
    kinds = [rope.kind for rope in case.ropes if rope.kind in ("yarn", "longrope", "dynamic")]
    config = configured(case.raw) if kinds else ""
    if isinstance(config, str):  # the reason why transformers rejects it
        is_open = "head_dim" in config and "NoneType" in config
    else:
        is_open = getattr(config, "head_dim", 0) is None
    if is_open:
        hidden, heads = (positive(case.stated.get(key)) for key in ("hidden_size", "num_attention_heads"))
        key, value = case.at("head_dim"), "null" if "head_dim" in case.stated else ""
        fix = key.set(int(hidden // heads)) if hidden and heads and hidden >= heads else ()
        problem = f"head_dim is {value or 'missing'}, but rope_type {kinds[0]} needs it"
        remedy = "write hidden_size / num_attention_heads, the meaning of null"
        yield key.finding("head-dim-null", problem, remedy, fix=fix, value=value)


# The base and the two generations of keys


@rule
def lost_theta(case: Case) -> Iterator[Finding]:
    """A RoPE base that is missing, or missing where programs expect it."""
    top = case.theta
    older, at_top = number(top.value), top.name in case.stated
    stated = next((theta for rope in case.ropes if (theta := rope.number("rope_theta"))), None)
    if at_top and top.value is None:
        yield _missing_theta(case, top, stated, null=True)
    for rope in case.newer:
        if rope.values.get("rope_theta") is None:
            known, null = older if rope is case.newest else None, "rope_theta" in rope.values
            yield _missing_theta(case, rope.at("rope_theta"), known, null=null, scaled=rope.scaled)
    if case.older and not at_top and stated not in (None, DEFAULT_THETA):
        within = any(rope.number("rope_theta") for rope in case.older)
        readers = "transformers 4" if within else "transformers"
        problem = (
            f"rope_theta ({plain(stated)}) is not at the top level, where {readers} and mlx-lm expect it"
        )
        severity: Severity = "warning" if within else "error"
        remedy = f"write rope_theta {plain(stated)} next to rope_scaling"
        yield top.finding("theta-lost", problem, remedy, fix=top.set(stated), severity=severity)
    if not case.newer and not stated and not at_top:
        scaled = any(rope.kind == "llama3" for rope in case.ropes)
        if scaled or _is_llama_3(case) or (not case.prefix and case.model_type in STATE_THETA):
            yield _missing_theta(case, top, None, scaled=scaled)
    if (older or stated) == DEFAULT_THETA and _is_llama_3(case):
        yield _theta_of_llama_3(top, "rope_theta is 10000", "warning" if at_top else "error")


@rule
def as_published(case: Case) -> Iterator[Finding]:
    """A RoPE base below that of similar published models, or a context length none was trained on."""
    top, vocabulary, window = case.theta, number(case.stated.get("vocab_size")), case.window
    key = next((rope.at("rope_theta") for rope in case.ropes if rope.number("rope_theta")), top)
    theta = number(key.value)
    if theta and vocabulary and window and not _is_llama_3(case):
        known = published_base(case.model_type, int(vocabulary), int(window))
        if known and theta < known[0]:
            usual, name = plain(known[0]), known[1]
            problem = f"rope_theta is {plain(theta)}; {name}, of the same type and vocabulary, has {usual}"
            remedy = "check the base on the model's card; Qwen2.5-Math and its derivatives have 10000"
            yield key.finding("theta-not-as-published", problem, remedy)
    scaled = any(rope.scaled for rope in case.ropes)
    trained = None if scaled else TRAINED_ON.get((case.model_type, int(window or 0)))
    if trained:
        problem = f"published models of this type state {window:.0f} tokens but were trained on {trained}"
        remedy = f"extend it with {argument('original', trained)}"
        yield case.at(case.window_key).finding("window-with-room", problem, remedy)


def _missing_theta(
    case: Case, key: Key, known: float | None, *, null: bool = False, scaled: bool = False
) -> Finding:
    """Report a RoPE base that is missing, or null, for which transformers 5 raises a TypeError."""
    problem, value = f"{key} is {'null' if null else 'missing'}", "null" if null else None
    if not known and _is_llama_3(case):
        return _theta_of_llama_3(key, problem, "error")
    remedy, fix = (
        (f"write {plain(known)}, as stated elsewhere", key.set(known)) if known else (LOOK_IT_UP, ())
    )
    severity: Severity = "error" if null or (scaled and not known) else "warning"
    return key.finding("theta-lost", problem, remedy, fix=fix, severity=severity, value=value)


def _is_llama_3(case: Case) -> bool:
    """Return whether size and vocabulary are those of Llama 3, whose models all have one base."""
    vocabulary, hidden = case.stated.get("vocab_size"), case.stated.get("hidden_size")
    return case.model_type == "llama" and vocabulary in LLAMA_3_VOCABULARY and hidden in LLAMA_3_SIZES


def _theta_of_llama_3(key: Key, problem: str, severity: Severity) -> Finding:
    problem += f"; models with Llama 3's size and vocabulary were pretrained with {plain(LLAMA_3_THETA)}"
    remedy = f"write {plain(LLAMA_3_THETA)} if the base model's own config.json says so"
    return key.finding("theta-lost", problem, remedy, severity=severity)


@rule
def contradictions(case: Case) -> Iterator[Finding]:
    """Two keys with contradicting values."""
    for one, other in _stated_twice(case):
        if one.value != other.value:
            value = shown(one.value)
            problem = f"{one} is {value} and {other} is {shown(other.value)}"
            remedy = "set both to the value that the model was trained with, or drop the wrong one"
            yield one.finding("keys-contradict", problem, remedy, value=value)


def _stated_twice(case: Case) -> Iterator[tuple[Key, Key]]:
    """Return pairs of keys that should be equal, including a key that only one scaling has."""
    if number(case.theta.value) is not None and case.newest and case.newest.number("rope_theta"):
        yield case.theta, case.newest.at("rope_theta")
    for rope in (*case.newer, *case.older):
        for one, other in ((rope.at("rope_type"), rope.at("type")), (case.at(ORIGINAL), rope.at(ORIGINAL))):
            # The second is the older name of the first; transformers 5 keeps both.
            if None not in (one.value, other.value) and [one.value, other.value] != ["default", "mrope"]:
                yield one, other
    for new, old in case.pairs:
        if (old.kind or "default") != (new.kind or "default"):
            yield replace(old.at("rope_type"), value=old.kind), replace(new.at("rope_type"), value=new.kind)
            continue
        for key in sorted(SCALING_KEYS - {"rope_type", "type", "rope_theta"}):
            one, other = old.at(key), new.at(key)
            if key != ORIGINAL or None not in (one.value, other.value):
                yield one, other


# A scaling


@rope_rule(*WITH_ORIGINAL)
def lost_original(rope: Stated) -> Iterator[Finding]:
    """A type that needs the original context length, without it."""
    key, window, factor = rope.at(ORIGINAL), rope.case.window, rope.positive("factor")
    if key.value is None and rope.case.stated.get(ORIGINAL) is None:
        probable = window / factor if window and factor else None
        remedy = "write the context length of pretraining"
        remedy += f": {plain(probable)} if max_position_embeddings is the extended length" if probable else ""
        yield key.finding("original-missing", f"{rope.kind} scaling without {ORIGINAL}", remedy)


@rope_rule(*WITH_ORIGINAL)
def factor_against_lengths(rope: Stated) -> Iterator[Finding]:
    """Factor x original length that is not the context length."""
    key, original, window = rope.at("factor"), rope.original, rope.case.window
    factor = number(key.value)
    if not factor or not original or not window:
        return
    ratio, reach, of_window = window / original, factor * original, rope.case.window_key
    # With an attention factor, transformers does not use LongRoPE's factor. Llama 3's factor is chosen by
    # hand: Llama 3.1 has factor 8 for 16 times its original length.
    unused = rope.kind == "longrope" and rope.number("attention_factor") is not None
    if ratio < 1 - ROUNDING:
        contradiction = f"{of_window} ({plain(window)}) is below {ORIGINAL} ({plain(original)})"
    elif unused or rope.kind == "llama3" or abs(factor / ratio - 1) <= ROUNDING or factor < 1:
        return
    elif ratio <= LEFT_BEHIND:
        problem = f"{of_window} is {plain(window)}, factor x original length is {plain(reach)}"
        remedy = f"write {plain(reach)}, or pass the longer context length to the engine"
        yield rope.case.at(of_window).finding("window-left-behind", problem, remedy)
        return
    elif factor % 1 == 0 and ratio < factor < ratio + 1:
        problem = f"factor {factor:g} is {plain(window)} / {plain(original)} = {ratio:.4g}, rounded up"
        remedy = (
            f"write {ratio:.6g}; if the model was trained with {factor:g}, write {of_window} {plain(reach)}"
        )
        yield key.finding("factor-rounded", problem, remedy)
        return
    elif factor > ratio and rope.kind == "yarn":
        # YaRN uses the factor only; programs differ in which of the two they use for LongRoPE.
        problem = f"factor x {ORIGINAL} is {plain(reach)}, {of_window} is {plain(window)}"
        yield key.finding("factor-exceeds-window", problem, "none if the model was trained so")
        return
    else:
        contradiction = f"factor {factor:g} x {plain(original)} is {plain(reach)}, not {plain(window)}"
    remedy = "use the factor and original length that the model was trained with"
    yield key.finding("factor-contradicts-lengths", contradiction, remedy)


@rope_rule(*REQUIRED)
def small_factor(rope: Stated) -> Iterator[Finding]:
    """A factor below one, which compresses no position."""
    key, factor = rope.at("factor"), rope.positive("factor")
    if factor and factor < 1:
        remedy = f"write the extension factor, possibly {1 / factor:g}"
        yield key.finding("factor-below-one", f"factor is {factor:g}", remedy)


@rope_rule("linear", "dynamic")
def whole_factor(rope: Stated) -> Iterator[Finding]:
    """A factor written as an integer, which some programs reject for these types."""
    key = rope.at("factor")
    if isinstance(key.value, int) and positive(key.value):
        problem, fix = f"factor is {key.value}, an integer", key.set(float(key.value))
        yield key.finding("factor-is-integer", problem, f"write {key.value}.0", fix=fix)


@rope_rule(*BOUNDS)
def swapped_bounds(rope: Stated) -> Iterator[Finding]:
    """The bound of the high frequencies below that of the low ones.

    transformers accepts such bounds, so a model may have been trained with them. It also accepts equal
    bounds, which make a step.
    """
    code, *names = BOUNDS[rope.kind or ""]
    fast, slow = map(rope.at, names)
    high, low = (positive(rope.values.get(name, BOUND_DEFAULTS.get(name))) for name in names)
    if high and low and high < low:
        problem = f"{fast.name} ({high:g}) is not above {slow.name} ({low:g})"
        yield fast.finding(
            code, problem, "swap them unless the model was trained so", value=shown(fast.value)
        )


@rope_rule("yarn", "longrope")
def attention_factors(rope: Stated) -> Iterator[Finding]:
    """An attention factor of zero, or below one although the context grew.

    A model may have been trained with any factor above zero, and ropepatch writes the requested one.
    """
    key, case, original = rope.at("attention_factor"), rope.case, rope.original
    a = number(key.value)
    if a is None or not 0 <= a < 1:
        return
    factor = rope.positive("factor") or (case.window / original if case.window and original else 1.0)
    if a == 0:
        remedy = "drop the key, so that programs use the factor of the paper"
        yield key.finding("attention-factor-zero", "attention_factor is 0", remedy, fix=key.set(DROP))
    elif factor > 1 and (not case.recorded or key.path[len(case.prefix)] in case.changed):
        usual = yarn_temperature(factor) if rope.kind == "yarn" else _of_longrope(factor, original)
        exact = abs(a * usual - 1) < USUAL
        problem = (
            f"attention_factor is {a:g}, below 1, although the context grew {factor:g} times: it multiplies "
            f"the logits by {a * a:.3g}" + ", the inverse of the paper's factor" * exact
        )
        severity: Severity = "error" if exact else "warning"
        remedy = f"write {1 / a:.6g} unless the model was trained so"
        yield key.finding("attention-factor-inverted", problem, remedy, severity=severity)


def _of_longrope(factor: float, original: float | None) -> float:
    """Return the paper's attention factor, else 1."""
    return longrope_attention_factor(factor, original) if original and original > 1 else 1.0


@rope_rule("yarn")
def lone_mscale(rope: Stated) -> Iterator[Finding]:
    """One of two keys that have an effect only together; mscale 1 is the default."""
    present = [name for name in ("mscale", "mscale_all_dim") if rope.number(name)]
    if len(present) == 1 and rope.number("mscale") != 1 and not rope.number("attention_factor"):
        problem = f"{present[0]} only: mscale and mscale_all_dim need each other"
        yield rope.at(present[0]).finding("mscale-alone", problem, "write both, or attention_factor")


@rope_rule("yarn")
def open_ramp(rope: Stated) -> Iterator[Finding]:
    """`truncate: false`, which not every program supports."""
    key = rope.at("truncate")
    if key.value is False:
        problem = "truncate is false, which some engines ignore"
        remedy = "serve the model with transformers or vLLM, or save the same frequencies as longrope"
        severity: Severity = "remark" if rope.case.model_type in OPEN_RAMP else "warning"
        yield key.finding("truncate-ignored", problem, remedy, severity=severity)


@rope_rule("dynamic", "longrope")
def switching(rope: Stated) -> Iterator[Finding]:
    """Frequencies that change while the KV cache has keys rotated by the old ones."""
    lists = rope.values.get("short_factor"), rope.values.get("long_factor")
    key = rope.at("rope_type", "type")
    where = f"{plain(rope.original or rope.case.window or 0)} tokens"
    if rope.kind == "dynamic" and "alpha" not in rope.values:
        problem = f"beyond {where} the frequencies change with the sequence length"
        remedy = "use a static scaling: ropepatch extend with another method"
        yield key.finding("switches-against-cache", problem, remedy)
    elif rope.kind == "longrope" and None not in lists and lists[0] != lists[1]:
        rebuilt = rope.case.model_type in REBUILD_CACHE
        problem = f"at {where} the frequencies switch from short_factor to long_factor"
        problem += "; generate() of this architecture rebuilds the cache there" * rebuilt
        remedy = "set both lists to the one for your prompt lengths, or keep all prompts on one side"
        severity: Severity = "remark" if rebuilt else "warning"
        yield key.finding("switches-against-cache", problem, remedy, severity=severity)


@rope_rule("longrope")
def unread_attention_factor(rope: Stated) -> Iterator[Finding]:
    """LongRoPE's attention factor, if only transformers uses it."""
    key, original, window = rope.at("attention_factor"), rope.original, rope.case.window
    a = number(key.value)
    if not a or not original or original <= 1 or not window:
        return
    derived = _of_longrope(max(window / original, 1), original)
    mscales = [rope.at(name) for name in ("short_mscale", "long_mscale")]
    if a < 1 or abs(a / derived - 1) < USUAL or [number(mscale.value) for mscale in mscales] == [a, a]:
        return
    problem = f"attention_factor is {a:g}; vLLM, SGLang, mlx-lm and llama.cpp derive {derived:.6g} instead"
    remedy = "add short_mscale and long_mscale, which vLLM and SGLang support"
    yield key.finding("attention-factor-unread", problem, remedy, fix=set_all(mscales, a))


@rope_rule("linear")
def linear_in_vllm(rope: Stated) -> Iterator[Finding]:
    """Linear scaling whose stated length vLLM multiplies by the factor."""
    key, factor, window = rope.at("factor"), rope.number("factor"), rope.case.window
    if not factor or factor <= 1 or not window:
        return
    stated = stated_window(int(window), factor, rope.case.stated.get(SEQUENCE))
    if stated and stated > window:
        return  # unambiguous, and vLLM uses the right one
    problem = f"vLLM uses max_position_embeddings x factor = {plain(window * factor)} as context length"
    problem += f"; {SEQUENCE} is {stated}" if stated else ""
    now, longer = plain(window), plain(window * factor)
    remedy = f"if {now} is the extended length, pass --max-model-len {now} to vLLM; or state the "
    remedy += f'length in config.json: "{SEQUENCE}": {now} or {longer}'
    yield key.finding("linear-multiplied", problem, remedy)


# Older programs, and the other files


@rule
def one_generation(case: Case) -> Iterator[Finding]:
    """RoPE parameters that older programs do not support."""
    bases = [rope for rope in case.newer if rope.values.get("rope_theta", DEFAULT_THETA) != DEFAULT_THETA]
    bases = bases if case.theta.name not in case.stated else []
    scaled = [rope for rope in case.newer if rope.scaled]
    unseen = [] if case.older else [*scaled, *bases]
    unseen = unseen or [rope for rope in case.newer if _only_share(rope)]
    readers = needing_older_keys(str(case.raw.get("model_type")), case.model_type)
    same = [rope for rope in bases if rope.values.get("rope_theta") == default_theta(case.model_type)]
    if unseen == same and not any(map(_only_share, same)):  # transformers takes this base anyway
        readers = [one for one in readers if one != "transformers 4.x"]
    if unseen and readers:
        kinds = dict.fromkeys(str(rope.kind) for rope in unseen)
        key, fix = case.at("rope_parameters"), _older_keys(case.newest) if case.newest else ()
        problem = f"the RoPE parameters ({', '.join(kinds)}) are only in rope_parameters"
        problem += f", which {' and '.join(readers)} {'do' if len(readers) > 1 else 'does'} not support"
        remedy = "add the older keys with the same values"
        yield key.finding("only-new-keys", problem, remedy, fix=fix)


def _older_keys(rope: Stated) -> tuple[Edit, ...]:
    """Return the keys to add for older programs, if transformers 5 still loads the same RoPE."""
    case = rope.case
    others_scaled = any(other.scaled for other in case.newer if other is not rope)  # no older key for these
    if not rope.positive("rope_theta") or rope.kind is None or others_scaled:
        return ()
    older: dict[str, Any] = legacy_keys(case.stated, rope.values | {"rope_type": rope.kind})
    if _only_share(rope):
        older["partial_rotary_factor"] = rope.values["partial_rotary_factor"]
    if rope.kind in WITH_ORIGINAL and rope.values.get(ORIGINAL) is not None:
        older[ORIGINAL] = rope.values[ORIGINAL]
    sliding = next((other for other in case.newer if other.layer_type == "sliding_attention"), None)
    if sliding and case.model_type in LOCAL_BASE and sliding.number("rope_theta"):
        older[LOCAL_THETA] = sliding.values["rope_theta"]
    edits = tuple(edit for key, value in older.items() for edit in case.at(key).set(value))
    judged = is_known(case.raw.get("model_type")) or rope.layer_type is not None
    return () if judged and not same_rope(case.raw, case.with_edits(edits).raw) else edits


def _only_share(rope: Stated) -> bool:
    """Return whether only this object states a partial_rotary_factor (not that of `proportional`)."""
    share = rope.number("partial_rotary_factor")
    return (
        share not in (None, 1.0) and rope.kind != "proportional" and not {*SHARES} & rope.case.stated.keys()
    )


def same_rope(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether transformers loads the same RoPE from two configurations."""
    first, second = (getattr(configured(raw), "rope_parameters", None) for raw in (before, after))
    return first is not None and bool(_plain(first) == _plain(second))


def _plain(parameters: Any) -> Any:
    """Drop `type`, the older name of `rope_type`."""
    if not isinstance(parameters, dict):
        return parameters
    return {key: _plain(value) for key, value in parameters.items() if key != "type"}


@rule
def tokenizer_behind(case: Case) -> Iterator[Finding]:
    """A tokenizer that truncates or warns below the context length."""
    yield from _behind("tokenizer-behind", case, case.companion(TOKENIZER, "model_max_length"))


@rule
def generation_behind(case: Case) -> Iterator[Finding]:
    """A generation config that stops at the original context length."""
    originals = [*(rope.original for rope in case.ropes), positive(case.record.get(ORIGINAL))]
    pretrained = max(filter(None, originals), default=0.0)
    key = case.companion(GENERATION, "max_length")
    if (positive(key.value) or math.inf) <= pretrained:
        yield from _behind("generation-behind", case, key)


def _behind(code: str, case: Case, key: Key) -> Iterator[Finding]:
    limit, reach = positive(key.value), case.reach()
    if limit and reach and limit < reach:
        problem = f"{key.name} is {plain(key.value)}, below the context length of {plain(reach)}"
        yield key.finding(code, problem, f"write {plain(reach)}", fix=key.set(int(reach)))


@rule
def record_differs(case: Case) -> Iterator[Finding]:
    """A config.json that changed since ropepatch wrote and verified it."""
    if case.changed:
        key = case.at(case.changed[0])
        problem = f"{', '.join(case.changed)} changed since ropepatch wrote it"
        remedy = "compare config.json with config_changes in ropepatch.json"
        yield key.finding("differs-from-record", problem, remedy, value=shown(key.value))


@rule
def scaled_twice(case: Case) -> Iterator[Finding]:
    """Two scalings by ropepatch, one on top of the other, without training in between or after."""
    record, earlier = case.record, case.record.get("earlier") or {}
    if (
        not record.get("already_scaled")
        or case.changed
        or any(one.get("adaptation") for one in (record, earlier))
    ):
        return
    methods = [one.get("method") for one in (earlier, record)]
    if None in methods or "none" in methods or methods == ["linear", "linear"]:  # the same as linear once
        return
    model, target, window = earlier.get("model"), record.get("target"), record.get(ORIGINAL)
    problem = f"extended with {methods[0]} to {window} tokens, then with {methods[1]} to {target}"
    remedy = f"extend {model} to {target} tokens instead"
    yield Key(RECORD, ("earlier",)).finding("scaled-twice", problem, remedy)


def load_errors(case: Case) -> Iterator[Finding]:
    """A config.json that transformers does not load; checked only if there is no other error."""
    key, kind = Key(CONFIG, ("model_type",), case.raw.get("model_type")), kind_of(case.raw)
    if kind == "swapped":
        problem = "ropepatch replaced RoPE with another position encoding"
        remedy = "load it with ropepatch.load, or use the checkpoint that it was made from"
        yield key.finding("encoding-swapped", problem, remedy)
    elif kind == "mapped":
        problem = "it uses a position remapping, whose code is in its folder"
        remedy = "load it with ropepatch.load; or read the code, then use trust_remote_code=True"
        yield key.finding("position-remapping", problem, remedy)
    elif not is_known(key.value):
        value = shown(key.value)
        problem = f"transformers has no model_type {value}"
        yield key.finding("not-in-transformers", problem, "none needed", value=value)
    elif isinstance(reason := configured(case.raw), str):
        yield Key(CONFIG, ()).finding("transformers-refuses", reason, "fix what the message names")
    elif stated := stated_class(load_config(case.raw)):
        problem = f"architectures names {stated.__name__}, which has no language model head"
        yield Key(CONFIG, ("architectures",)).finding("no-language-model", problem, "none needed")


def configured(raw: dict[str, Any]) -> PreTrainedConfig | str:
    """Load the language model's part of a configuration with transformers, or return its error."""
    try:
        return text_config(load_config(raw))
    except RopepatchError as error:
        return str(error)
