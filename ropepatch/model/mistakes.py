"""The most common errors in applying a RoPE scaling, as frequencies."""

from __future__ import annotations

from ropepatch.model.reading_file import RIGHT
from ropepatch.scaling.rope import Frequencies

UNSCALED, TWICE, FACTORLESS, DOUBLED, MISREAD = (
    "unscaled",
    "applied twice",
    "without attention factor",
    "factor doubled",
    "original length misread",
)


def misread(
    right: Frequencies, before: Frequencies, doubled: Frequencies | None, by_target: Frequencies | None
) -> dict[str, Frequencies]:
    """Return the right frequencies and those of each error that differs from all before it, by name.

    Args:
        right: The scaled frequencies.
        before: The unscaled frequencies.
        doubled: The frequencies with twice the factor; None if the scaling has none.
        by_target: The frequencies with the target length as original length; None if it has none.
    """
    a = right.attention_factor / before.attention_factor
    squared = right.inv_freq * (right.inv_freq / before.inv_freq).nan_to_num(1.0)
    every: dict[str, Frequencies | None] = {
        RIGHT: right,
        UNSCALED: before,
        FACTORLESS: right._replace(attention_factor=before.attention_factor),
        TWICE: Frequencies(squared, right.attention_factor * a),
        DOUBLED: doubled,
        MISREAD: by_target,
    }
    different: dict[str, Frequencies] = {}
    for name, frequencies in every.items():
        if frequencies and all(frequencies.distance(other) > 1e-7 for other in different.values()):
            different[name] = frequencies
    return different
