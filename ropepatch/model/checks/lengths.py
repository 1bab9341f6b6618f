"""The window, the window of pretraining and the factor between them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ropepatch.model.checks.case import (
    LEFT_BEHIND,
    ORIGINAL,
    THETA_KEYS,
    WINDOW_KEYS,
    WITH_ORIGINAL,
    Block,
    Case,
    number,
    positive,
)
from ropepatch.model.checks.findings import Finding, Key, shown

ROUNDING = 0.01  # by how much factor x original may miss the window
REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
NUMBERS = (
    *("factor", "rope_theta", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("low_freq_factor", "high_freq_factor", "short_mscale", "long_mscale", "partial_rotary_factor"),
    ORIGINAL,
)
MSCALES = ("mscale", "mscale_all_dim")
LOCAL_THETA = "rope_local_base_freq"  # Gemma 3's base of the sliding layers
ABOVE_ONE = (*THETA_KEYS, *WINDOW_KEYS, LOCAL_THETA)
SHARES = ("partial_rotary_factor", "rotary_pct")
# Far above whatever is published, and far below what computes.
AT_MOST = dict.fromkeys(SHARES, 1.0) | dict.fromkeys((*WINDOW_KEYS, ORIGINAL), 1e10)
AT_MOST |= {"factor": 1e6, "attention_factor": 100.0}
ABOVE_ZERO = ("factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", ORIGINAL)


def lost_original(case: Case, block: Block) -> Iterator[Finding]:
    """A type that needs the window of pretraining, without it."""
    key, factor = block.at(ORIGINAL), positive(block.values.get("factor"))
    if block.kind not in WITH_ORIGINAL or (key.value, case.stated.get(ORIGINAL)) != (None, None):
        return
    recorded = positive(case.recorded.get(ORIGINAL))
    probable = case.window / factor if case.window and factor else None
    edits = (key.set(int(recorded)),) if recorded else ()
    guess = f": {probable:g} if max_position_embeddings is the extended window" if probable else ""
    yield key.error(
        "original-missing",
        f"{block.kind} scaling without {ORIGINAL}",
        f"transformers takes max_position_embeddings ({case.window or 0:g}) for it, and computes other "
        "frequencies if that is the extended window, without a warning",
        f"write the window of pretraining{guess}",
        mend=edits,
        meant=edits or ((key.set(round(probable)),) if probable else None),
    )


def factor_against_lengths(case: Case, block: Block) -> Iterator[Finding]:
    """Factor x original window that is not the window."""
    key, original, window = block.at("factor"), case.original(block), case.window
    factor = number(key.value)
    if block.kind not in WITH_ORIGINAL or not factor or not original or not window:
        return
    ratio, reach = window / original, factor * original
    # Beside an attention factor transformers computes nothing from LongRoPE's factor.
    unused = block.kind == "longrope" and block.number("attention_factor") is not None
    unused |= block.kind == "llama3"  # chosen by hand: Llama 3.1 reads 16 times its window by factor 8
    contradiction = ""
    if ratio < 1 - ROUNDING:
        contradiction = f"the window ({window:g}) is below {ORIGINAL} ({original:g})"
    elif unused or abs(factor / ratio - 1) <= ROUNDING or factor < 1:
        return
    elif ratio <= LEFT_BEHIND:
        yield case.at(case.window_key).remark(
            "window-left-behind",
            f"{case.window_key} is {window:g}, factor x original {reach:g}",
            "Qwen documents it so; what takes max_position_embeddings for its limit never uses the scaling",
            f"write {reach:g}, or pass the longer context to the engine",
        )
    elif factor % 1 == 0 and ratio < factor < ratio + 1:
        yield key.warning(
            "factor-rounded",
            f"factor {factor:g} is {window:g} / {original:g} = {ratio:.4g}, rounded up",
            "transformers scales by the factor, vLLM serves factor x original tokens, and what computes "
            "the ratio itself (LongRoPE in vLLM, mlx-lm) uses another",
            f'write "factor": {ratio:.6g}, unless the model was trained under {factor:g}: '
            f"then write a window of {reach:g}",
            meant=(key.set(ratio),),
        )
    elif factor > ratio and block.kind == "yarn":
        # YaRN computes from the factor alone; LongRoPE's readers differ in which of the two they take.
        yield key.remark(
            "factor-exceeds-window",
            f"factor x {ORIGINAL} is {reach:g}, {case.window_key} {window:g}",
            "models are trained with a larger factor than their window needs (Yarn-Mistral, AFM), "
            "and load right",
            "none, if it was trained so",
        )
    else:
        contradiction = f"factor {factor:g} x {original:g} is {reach:g}, not {window:g}"
    if contradiction:
        yield key.error(
            "factor-contradicts-lengths",
            contradiction,
            "transformers scales by the factor, others by the ratio of the windows; "
            "one of the three is wrong",
            "find out which: the factor and the original window are what the model was trained under",
            meant=(key.set(ratio),) if 1 < ratio < math.inf else None,
        )


def small_factor(case: Case, block: Block) -> Iterator[Finding]:
    """A factor below one, which compresses no position."""
    key, factor = block.at("factor"), block.number("factor")
    if block.kind in REQUIRED and factor is not None and 0 < factor < 1:
        yield key.error(
            "factor-below-one",
            f"factor is {factor:g}",
            "the rope turns faster than in pretraining; transformers only warns",
            f"write the extension, perhaps {1 / factor:g}",
            meant=(key.set(1 / factor),),
        )


def whole_factor(case: Case, block: Block) -> Iterator[Finding]:
    """A factor written as an integer, under the types where that breaks a reader."""
    key = block.at("factor")
    if block.kind in ("linear", "dynamic") and isinstance(key.value, int) and positive(key.value):
        yield key.warning(
            "factor-is-integer",
            f"factor is {key.value}, an integer",
            "vLLM tries to loop over it and stops (linear), early transformers 4 refuses to load",
            f"write {key.value}.0",
            mend=(key.set(float(key.value)),),
        )


def broken_windows(case: Case) -> Iterator[Finding]:
    """A window that is no whole number of tokens."""
    for key in (case.at(case.window_key), case.at(ORIGINAL), *(block.at(ORIGINAL) for block in case.blocks)):
        if isinstance(key.value, float):
            window = positive(key.value)
            whole = int(window) if window and window.is_integer() else None
            yield key.error(
                "window-not-integer",
                f"{key.name} is {shown(key.value)}",
                "strict readers expect an integer"
                if key.name == ORIGINAL
                else "transformers 5 refuses the configuration (expected int)",
                f"write {whole or 'the window in tokens'}",
                mend=(key.set(whole),) if whole else (),
            )


def required_keys(case: Case, block: Block) -> Iterator[Finding]:
    """A key without which a type cannot be computed."""
    for key in map(block.at, REQUIRED.get(block.kind or "", ())):
        if key.value is not None:
            continue
        original = case.original(block)
        ratio = case.window / original if case.window and original else 0
        edits = (block.at("factor").set(ratio),) if block.kind == "yarn" and ratio > 1 else ()
        yield key.error(
            "key-missing",
            f"{block.kind} scaling without {key.name}",
            "transformers ends in a KeyError or a TypeError",
            f'write "factor": {ratio:g}, the ratio of the windows' if edits else f"write {key.name}",
            mend=edits,
            meant=edits or None,
        )


def broken_numbers(case: Case) -> Iterator[Finding]:
    """Values that are no numbers, or none that a rope can have."""
    for block in case.blocks:
        factor = positive(block.values.get("factor")) or 1.0
        # Where the temperature 0.1 k ln s + 1 reaches 0; above it ropepatch writes a k below 0 too.
        least = -10 / math.log(factor) if factor > 1 else 0.0
        for name in NUMBERS:
            yield from _broken_number(block.at(name), least if name in MSCALES else 0.0)
    for name in filter(None, (case.window_key, case.theta_key, ORIGINAL, LOCAL_THETA, *SHARES)):
        yield from _broken_number(case.at(name))


def _broken_number(key: Key, least: float = 0.0) -> Iterator[Finding]:
    if key.value is None:
        return
    above = 1.0 if key.name in ABOVE_ONE else least
    value = number(key.value)
    if value is None:
        meant = _number_in(key.value)
        yield key.error(
            "not-a-number",
            f"{key.name} is {shown(key.value)}",
            "readers compute with it and end in a TypeError",
            f"write {meant:g} without quotes" if meant else "write a number",
            mend=(key.set(int(meant) if meant.is_integer() else meant),) if meant else (),
            meant=(key.set(meant),) if meant else None,
        )
    elif value < min(above, 0) or (key.name in (*ABOVE_ZERO, *ABOVE_ONE) and value <= above):
        yield _impossible(key, f"above {above:g}")
    elif value > AT_MOST.get(key.name, value):
        yield _impossible(key, f"of at most {AT_MOST[key.name]:g}")


def _impossible(key: Key, expected: str) -> Finding:
    problem, why = f"{key.name} is {shown(key.value)}", "no rope has such a value"
    return key.error("impossible-value", problem, why, f"write a number {expected}")


def broken_shapes(case: Case) -> Iterator[Finding]:
    """A rope that is no object, and a switch that is neither on nor off."""
    keys: list[tuple[Key, type, str]]
    keys = [(case.at(name), dict, "an object, or null") for name in ("rope_scaling", "rope_parameters")]
    keys += [(block.at("truncate"), bool, "true or false") for block in case.blocks]
    for key, kind, expected in keys:
        if key.value is not None and not isinstance(key.value, kind):
            yield key.error(
                "impossible-value",
                f"{key.name} is {shown(key.value)}",
                "readers stop at it, or silently take something else",
                f"write {expected}",
            )


def sections(case: Case, block: Block) -> Iterator[Finding]:
    """The shares of time, height and width in the rotary pairs, of a model that sees pictures."""
    key = block.at("mrope_section")
    shares = key.value
    if not isinstance(shares, list) or not all(type(share) is int for share in shares) or not case.pairs:
        return
    if sum(shares) != case.pairs:
        yield key.error(
            "impossible-value",
            f"mrope_section sums to {sum(shares)}, the model has {case.pairs} rotary pairs",
            "readers rotate other pairs by height and width than the model was trained with, or stop",
            "take the sections of this very model",
        )


def _number_in(value: object) -> float | None:
    """The number in a text that is one."""
    try:
        return positive(float(value)) if isinstance(value, str) else None
    except ValueError:
        return None
