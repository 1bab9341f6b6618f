"""The window, the window of pretraining and the factor between them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ropepatch.doctor.case import LEFT_BEHIND, ORIGINAL, WITH_ORIGINAL, Block, Case, number, positive
from ropepatch.doctor.findings import Finding, Mend, shown

ROUNDING = 0.01  # by how much factor x original may miss the window
FACTOR_TYPES = ("linear", "dynamic", "yarn", "longrope", "llama3")
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
ABOVE_ZERO = ("factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", ORIGINAL)


def lost_original(case: Case) -> Iterator[Finding]:
    """A type that needs the window of pretraining, without it."""
    for block in case.blocks:
        said = block.values.get(ORIGINAL), case.stated.get(ORIGINAL)
        if block.kind not in WITH_ORIGINAL or said != (None, None):
            continue
        known = positive(case.recorded().get(ORIGINAL))
        factor = positive(block.values.get("factor"))
        probable = case.window / factor if case.window and factor else None
        edits = (block.edit(ORIGINAL, int(known)),) if known else ()
        meant = edits or ((block.edit(ORIGINAL, round(probable)),) if probable else ())
        guess = f": {probable:g} if max_position_embeddings is the extended window" if probable else ""
        yield Finding(
            "original-missing",
            "error",
            f"{block.kind} scaling without {ORIGINAL}",
            f"transformers takes max_position_embeddings ({case.window or 0:g}) for it, and computes other "
            "frequencies if that is the extended window, without a warning",
            f"write the window of pretraining{guess}",
            key=block.key(ORIGINAL),
            mend=Mend(edits) if edits else None,
            meant=meant or None,
        )


def factor_against_lengths(case: Case) -> Iterator[Finding]:
    """Factor x original window that is not the window."""
    for block in case.blocks:
        factor, original, window = block.number("factor"), case.original(block), case.window
        free = block.kind == "longrope" and block.number("attention_factor") is not None
        if block.kind not in ("yarn", "longrope") or not factor or not original or not window:
            continue
        ratio = window / original
        if ratio < 1 - ROUNDING:
            yield _contradiction(case, block, f"the window ({window:g}) is below {ORIGINAL} ({original:g})")
        elif free or abs(factor / ratio - 1) <= ROUNDING or factor < 1:
            continue
        elif ratio <= LEFT_BEHIND:
            yield _left_behind(case, window, factor * original)
        elif factor == math.ceil(ratio) and ratio % 1:
            yield Finding(
                "factor-rounded",
                "warning",
                f"factor {factor:g} is {window:g} / {original:g} = {ratio:.4g}, rounded up",
                "transformers scales by the factor, vLLM serves factor x original tokens, and what computes "
                "the ratio itself (LongRoPE in vLLM, mlx-lm) uses another",
                f'write "factor": {ratio:.6g}, unless the model was trained under {factor:g}: '
                f"then write a window of {factor * original:g}",
                key=block.key("factor"),
                value=shown(block.values["factor"]),
                meant=(block.edit("factor", ratio),),
            )
        elif factor > ratio and block.kind == "yarn":
            # YaRN computes from the factor alone; LongRoPE's readers differ in which of the two they take.
            yield _larger_than_needed(case, block, window, factor * original)
        else:
            yield _contradiction(
                case, block, f"factor {factor:g} x {original:g} is {factor * original:g}, not {window:g}"
            )


def _contradiction(case: Case, block: Block, problem: str) -> Finding:
    original, window = case.original(block), case.window
    ratio = window / original if window and original else 1
    return Finding(
        "factor-contradicts-lengths",
        "error",
        problem,
        "transformers scales by the factor, others by the ratio of the windows; one of the three is wrong",
        "find out which: the factor and the original window are what the model was trained under",
        key=block.key("factor"),
        value=shown(block.values.get("factor")),
        meant=(block.edit("factor", ratio),) if ratio > 1 else None,
    )


def _larger_than_needed(case: Case, block: Block, window: float, reach: float) -> Finding:
    return Finding(
        "factor-exceeds-window",
        "remark",
        f"factor x {ORIGINAL} is {reach:g}, {case.window_key} {window:g}",
        "models are trained with a larger factor than their window needs (Yarn-Mistral, AFM), and load right",
        "none, if it was trained so",
        key=block.key("factor"),
        value=shown(block.values["factor"]),
    )


def _left_behind(case: Case, window: float, reach: float) -> Finding:
    return Finding(
        "window-left-behind",
        "remark",
        f"{case.window_key} is {window:g}, factor x original {reach:g}",
        "Qwen documents it so; what takes max_position_embeddings for its limit never uses the scaling",
        f"write {reach:g}, or pass the longer context to the engine",
        key=case.key(case.window_key),
        value=shown(case.stated[case.window_key]),
    )


def small_factor(case: Case) -> Iterator[Finding]:
    """A factor below one, which compresses no position."""
    for block in case.blocks:
        factor = block.number("factor")
        if block.kind in FACTOR_TYPES and factor is not None and 0 < factor < 1:
            yield Finding(
                "factor-below-one",
                "error",
                f"factor is {factor:g}",
                "the rope turns faster than in pretraining; transformers only warns",
                f"write the extension, perhaps {1 / factor:g}",
                key=block.key("factor"),
                value=shown(block.values["factor"]),
                meant=(block.edit("factor", 1 / factor),),
            )


def whole_factor(case: Case) -> Iterator[Finding]:
    """A factor written as an integer, under the types where that breaks a reader."""
    for block in case.blocks:
        factor = block.values.get("factor")
        if block.kind in ("linear", "dynamic") and isinstance(factor, int) and positive(factor):
            yield Finding(
                "factor-is-integer",
                "warning",
                f"factor is {factor}, an integer",
                "vLLM tries to loop over it and stops (linear), early transformers 4 refuses to load",
                f"write {factor}.0",
                key=block.key("factor"),
                value=shown(factor),
                mend=Mend((block.edit("factor", float(factor)),)),
            )


def broken_windows(case: Case) -> Iterator[Finding]:
    """A window that is no whole number of tokens."""
    places = [(case.stated, key, case.key(key), case.edit) for key in (case.window_key, ORIGINAL)]
    places += [(block.values, ORIGINAL, block.key(ORIGINAL), block.edit) for block in case.blocks]
    for values, key, dotted, edit in places:
        value = values.get(key)
        if not isinstance(value, float):
            continue
        found = positive(value)
        whole = int(found) if found and found.is_integer() else None
        yield Finding(
            "window-not-integer",
            "error",
            f"{key} is {shown(value)}",
            "transformers 5 refuses the configuration (expected int)"
            if values is case.stated and key != ORIGINAL
            else "strict readers expect an integer",
            f"write {whole or 'the window in tokens'}",
            key=dotted,
            value=shown(value),
            mend=Mend((edit(key, whole),)) if whole else None,
        )


def required_keys(case: Case) -> Iterator[Finding]:
    """A key without which a type cannot be computed."""
    for block in case.blocks:
        kind = block.kind if isinstance(block.kind, str) else ""
        for key in REQUIRED.get(kind, ()):
            if block.values.get(key) is not None:
                continue
            original = case.original(block)
            ratio = case.window / original if case.window and original else 0
            edits = (block.edit("factor", ratio),) if kind == "yarn" and ratio > 1 else ()
            yield Finding(
                "key-missing",
                "error",
                f"{kind} scaling without {key}",
                "transformers ends in a KeyError or a TypeError",
                f'write "factor": {ratio:g}, the ratio of the windows' if edits else f"write {key}",
                key=block.key(key),
                mend=Mend(edits) if edits else None,
                meant=edits or None,
            )


def broken_numbers(case: Case) -> Iterator[Finding]:
    """Values that are no numbers, or none that a rope can have."""
    places = [(block.values, key, block.key(key), block.edit) for block in case.blocks for key in NUMBERS]
    keys = [case.window_key, *([case.theta_key] if case.theta_key else []), ORIGINAL]
    places += [(case.stated, key, case.key(key), case.edit) for key in keys]
    for values, key, dotted, edit in places:
        value = values.get(key)
        least = 1.0 if key in ("rope_theta", "rotary_emb_base", case.window_key) else 0.0
        strict = key in ABOVE_ZERO or least
        if key in MSCALES:
            least = _least_mscale(values)
        if value is None:
            continue
        if (found := number(value)) is None:
            meant = _number_in(value)
            yield Finding(
                "not-a-number",
                "error",
                f"{key} is {shown(value)}",
                "readers compute with it and end in a TypeError",
                f"write {meant:g} without quotes" if meant else "write a number",
                key=dotted,
                value=shown(value),
                mend=Mend((edit(key, int(meant) if meant.is_integer() else meant),)) if meant else None,
                meant=(edit(key, meant),) if meant else None,
            )
        elif found < min(least, 0) or (strict and found <= least):
            yield Finding(
                "impossible-value",
                "error",
                f"{key} is {shown(value)}",
                "no rope has such a value",
                f"write a number above {least:g}",
                key=dotted,
                value=shown(value),
            )


def _least_mscale(values: dict[str, Any]) -> float:
    """Where the temperature 0.1 k ln s + 1 reaches 0; above it ropepatch writes a k below 0 too."""
    factor = positive(values.get("factor")) or 1.0
    return -10 / math.log(factor) if factor > 1 else 0.0


def _number_in(value: object) -> float | None:
    """The number in a text that is one."""
    try:
        return positive(float(value)) if isinstance(value, str) else None
    except ValueError:
        return None
