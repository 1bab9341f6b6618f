"""Rules of a scaled rope: its factor and its lengths, and what single types get wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ropepatch.model.architectures import OPEN_RAMP, REBUILD_CACHE
from ropepatch.model.checks.case import LEFT_BEHIND, ORIGINAL, Case, Stated, number, positive
from ropepatch.model.checks.findings import DROP, Finding, Severity, set_all, shown
from ropepatch.model.config import REQUIRED, WITH_ORIGINAL
from ropepatch.model.rotary import SEQUENCE, stated_window
from ropepatch.scaling.ramps import yarn_temperature
from ropepatch.scaling.searched import longrope_attention_factor

ROUNDING = 0.01  # by how much factor x original may miss the window
BOUNDS = {
    "yarn": ("betas-swapped", "beta_fast", "beta_slow"),
    "llama3": ("bands-swapped", "high_freq_factor", "low_freq_factor"),
}
BOUND_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}
USUAL = 1e-3  # how closely an attention factor agrees with a formula


def lost_original(case: Case, rope: Stated) -> Iterator[Finding]:
    """A type that needs the window of pretraining, without it."""
    key, factor = rope.at(ORIGINAL), rope.positive("factor")
    if rope.kind in WITH_ORIGINAL and (key.value, case.stated.get(ORIGINAL)) == (None, None):
        probable = case.window / factor if case.window and factor else None
        remedy = "write the window of pretraining"
        remedy += f": {probable:g} if max_position_embeddings is the extended one" if probable else ""
        meant = key.set(round(probable)) if probable else None
        yield key.finding("original-missing", f"{rope.kind} scaling without {ORIGINAL}", remedy, meant=meant)


def factor_against_lengths(case: Case, rope: Stated) -> Iterator[Finding]:
    """Factor x original window that is not the window."""
    key, original, window = rope.at("factor"), case.original(rope), case.window
    factor = number(key.value)
    if rope.kind not in WITH_ORIGINAL or not factor or not original or not window:
        return
    ratio, reach = window / original, factor * original
    # Beside an attention factor transformers computes nothing from LongRoPE's factor; Llama 3's is chosen by
    # hand: Llama 3.1 reads 16 times its window by factor 8.
    unused = rope.kind == "longrope" and rope.number("attention_factor") is not None
    agrees = unused or rope.kind == "llama3" or abs(factor / ratio - 1) <= ROUNDING or factor < 1
    if ratio < 1 - ROUNDING:
        contradiction = f"the window ({window:g}) is below {ORIGINAL} ({original:g})"
    elif agrees:
        return
    elif ratio <= LEFT_BEHIND:
        problem = f"{case.window_key} is {window:g}, factor x original {reach:g}"
        remedy = f"write {reach:g}, or pass the longer context to the engine"
        yield case.at(case.window_key).finding("window-left-behind", problem, remedy)
        return
    elif factor % 1 == 0 and ratio < factor < ratio + 1:
        problem = f"factor {factor:g} is {window:g} / {original:g} = {ratio:.4g}, rounded up"
        remedy = f"write {ratio:.6g}; if the model was trained under {factor:g}, a window of {reach:g}"
        yield key.finding("factor-rounded", problem, remedy, meant=key.set(ratio))
        return
    elif factor > ratio and rope.kind == "yarn":
        # YaRN computes from the factor alone; LongRoPE's readers differ in which of the two they take.
        problem = f"factor x {ORIGINAL} is {reach:g}, {case.window_key} {window:g}"
        yield key.finding("factor-exceeds-window", problem, "none, if it was trained so")
        return
    else:
        contradiction = f"factor {factor:g} x {original:g} is {reach:g}, not {window:g}"
    remedy = "find out which: the factor and the original window are what the model was trained under"
    meant = key.set(ratio) if 1 < ratio < math.inf else None
    yield key.finding("factor-contradicts-lengths", contradiction, remedy, meant=meant)


def small_factor(case: Case, rope: Stated) -> Iterator[Finding]:
    """A factor below one, which compresses no position."""
    key, factor = rope.at("factor"), rope.positive("factor")
    if rope.kind in REQUIRED and factor and factor < 1:
        remedy = f"write the extension, perhaps {1 / factor:g}"
        yield key.finding("factor-below-one", f"factor is {factor:g}", remedy, meant=key.set(1 / factor))


def whole_factor(case: Case, rope: Stated) -> Iterator[Finding]:
    """A factor written as an integer, under the types where that breaks a reader."""
    key = rope.at("factor")
    if rope.kind in ("linear", "dynamic") and isinstance(key.value, int) and positive(key.value):
        problem, fix = f"factor is {key.value}, an integer", key.set(float(key.value))
        yield key.finding("factor-is-integer", problem, f"write {key.value}.0", fix=fix)


def swapped_bounds(case: Case, rope: Stated) -> Iterator[Finding]:
    """The bound of the fast pairs below that of the slow ones.

    transformers computes with such bounds, so a model can have been trained under them. Equal ones are a
    step, which transformers computes too.
    """
    code, *names = BOUNDS.get(rope.kind or "", [""])
    keys = [rope.at(name) for name in names]
    bounds = [positive(rope.values.get(key.name, BOUND_DEFAULTS.get(key.name))) or 0.0 for key in keys]
    if keys and all(bounds) and bounds[0] < bounds[1]:
        (fast, slow), (high, low) = keys, bounds
        problem = f"{fast.name} ({high:g}) is not above {slow.name} ({low:g})"
        remedy, meant = "swap them, unless the model was trained so", (*fast.set(low), *slow.set(high))
        yield fast.finding(code, problem, remedy, value=shown(fast.value), meant=meant)


def open_ramp(case: Case, rope: Stated) -> Iterator[Finding]:
    """`truncate: false`, which not every reader reads."""
    key = rope.at("truncate")
    if rope.kind == "yarn" and key.value is False:
        problem = "truncate is false, which some readers ignore"
        remedy = "serve the model with transformers or vLLM, or save the same frequencies as longrope"
        severity: Severity = "remark" if case.model_type in OPEN_RAMP else "warning"
        read = key.set(True)
        yield key.finding("truncate-ignored", problem, remedy, severity=severity, meant=(), read=read)


def attention_factors(case: Case, rope: Stated) -> Iterator[Finding]:
    """An attention factor of zero, or below one where the context grew.

    A model can have been trained under any of the latter, and ropepatch writes the one it is asked for.
    """
    key, original, window = rope.at("attention_factor"), case.original(rope), case.window
    a = number(key.value)
    if rope.kind not in ("yarn", "longrope") or a is None or not 0 <= a < 1:
        return
    factor = rope.positive("factor") or (window / original if window and original else 1.0)
    if a == 0:
        remedy = "leave it out, so that readers take the factor of the paper"
        yield key.finding("attention-factor-zero", "attention_factor is 0", remedy, fix=key.set(DROP))
    elif factor > 1 and (not case.recorded or key.path[len(case.prefix)] in case.changed):
        exact = abs(a * _usual(rope.kind, factor, original) - 1) < USUAL
        problem = (
            f"attention_factor is {a:g}, below 1, though the context grew {factor:g} times: the logits are "
            f"multiplied by {a * a:.3g}" + ", the inverse of the paper's factor" * exact
        )
        severity: Severity = "error" if exact else "warning"
        remedy, meant = f"write {1 / a:.6g}, unless the model was trained so", key.set(1 / a)
        yield key.finding("attention-factor-inverted", problem, remedy, severity=severity, meant=meant)


def _usual(kind: str | None, factor: float, original: float | None) -> float:
    """The attention factor of the paper."""
    if kind == "yarn":
        return yarn_temperature(factor)
    return longrope_attention_factor(factor, original) if original and original > 1 else 1.0


def lone_mscale(case: Case, rope: Stated) -> Iterator[Finding]:
    """One of two keys that count only together; mscale 1 alone says what every reader takes anyway."""
    present = [name for name in ("mscale", "mscale_all_dim") if rope.number(name)]
    usual = rope.number("mscale") == 1
    if rope.kind == "yarn" and len(present) == 1 and not usual and not rope.number("attention_factor"):
        problem = f"{present[0]} without the other of mscale and mscale_all_dim"
        yield rope.at(present[0]).finding("mscale-alone", problem, "write both, or attention_factor")


def switching(case: Case, rope: Stated) -> Iterator[Finding]:
    """Frequencies that change while keys rotated by the others are in the cache."""
    lists = rope.values.get("short_factor"), rope.values.get("long_factor")
    key = rope.at("rope_type" if "rope_type" in rope.values else "type")
    where = f"{case.original(rope) or case.window or 0:g} tokens"
    if rope.kind == "dynamic" and "alpha" not in rope.values:
        problem = f"from {where} on the frequencies grow with the sequence"
        remedy = "a static scaling has one rotation for all lengths: ropepatch extend with another method"
        yield key.finding("switches-against-cache", problem, remedy)
    elif rope.kind == "longrope" and None not in lists and lists[0] != lists[1]:
        rebuilt = case.model_type in REBUILD_CACHE
        problem = f"at {where} the frequencies switch from short_factor to long_factor"
        problem += "; generate() of this architecture drops the cache there" * rebuilt
        remedy = "set both lists to the one that fits the lengths served, or keep prompts on one side"
        severity: Severity = "remark" if rebuilt else "warning"
        yield key.finding("switches-against-cache", problem, remedy, severity=severity)


def unread_attention_factor(case: Case, rope: Stated) -> Iterator[Finding]:
    """LongRoPE's attention factor, where only transformers reads it."""
    key, original, window = rope.at("attention_factor"), case.original(rope), case.window
    a = number(key.value)
    if rope.kind != "longrope" or not a or not original or original <= 1 or not window:
        return
    derived = _usual("longrope", max(window / original, 1), original)
    mscales = [rope.at(name) for name in ("short_mscale", "long_mscale")]
    if a < 1 or abs(a / derived - 1) < USUAL or [number(mscale.value) for mscale in mscales] == [a, a]:
        return
    problem = f"attention_factor is {a:g}; vLLM, SGLang, mlx-lm and llama.cpp derive {derived:.6g} instead"
    remedy = "write short_mscale and long_mscale beside it, which vLLM and SGLang read"
    read, fix = key.set(derived), set_all(mscales, a)
    yield key.finding("attention-factor-unread", problem, remedy, fix=fix, meant=(), read=read)


def linear_in_vllm(case: Case, rope: Stated) -> Iterator[Finding]:
    """Linear scaling whose window may be the one before it, by which vLLM multiplies it."""
    key, factor, window = rope.at("factor"), rope.number("factor"), case.window
    if rope.kind != "linear" or not factor or factor <= 1 or not window:
        return
    stated = stated_window(int(window), factor, case.stated.get(SEQUENCE))
    if stated and stated > window:
        return  # both readings are told apart, and vLLM takes the right one
    problem = f"vLLM takes max_position_embeddings x factor = {window * factor:g} for the window"
    problem += f"; {SEQUENCE} says {stated}" if stated else ""
    remedy = f"pass --max-model-len {window:g} to vLLM, if that is the extended window; "
    remedy += f'"{SEQUENCE}": {window:g} or {window * factor:g} in config.json says which it is'
    yield key.finding("linear-multiplied", problem, remedy)
