"""The commonest ways in which a scaled rope is misread, as frequencies."""

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
    """Name the right frequencies and those of each mistake that differs from all before it.

    Args:
        right: The scaled ones.
        before: The unscaled ones.
        doubled: Those of twice the factor; None where the scaling takes none.
        by_target: Those of the target in the original length's place; None likewise.
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
