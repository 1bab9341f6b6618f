"""Bands of rotary dimension pairs that a scaling keeps, blends, interpolates or stops."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import Tensor

from ropepatch.scaling.rope import Rope, rotations, wavelengths

TOLERANCE = 1e-5  # relative, for a divisor: float32 tables agree to about 4e-7


class Band(NamedTuple):
    """Consecutive rotary dimension pairs scaled in the same way.

    Args:
        fate: kept, blended, interpolated (divided by exactly s), stretched (by more), sped up or stopped.
        first: Index of the fastest pair.
        last: Index of the slowest pair.
        wavelength: Tokens per rotation of these two pairs, before scaling.
        rotations: Rotations of these two pairs within L tokens, before scaling.
        divisor: theta / theta' of these two pairs.
    """

    fate: str
    first: int
    last: int
    wavelength: tuple[float, float]
    rotations: tuple[float, float]
    divisor: tuple[float, float]


def bands(rope: Rope, inv_freq: Tensor, factor: float) -> list[Band]:
    """Group the pairs of a model by what the scaled frequencies [d/2] do to them, fastest first."""
    before = rope.inv_freq()
    divisor = (
        (before.double() / inv_freq.double()).masked_fill(before == 0, 1.0).tolist()
    )
    rotated = rotations(before, rope.original_max_position_embeddings).tolist()
    columns = wavelengths(before).tolist(), rotated, divisor
    runs = itertools.groupby(
        range(rope.num_pairs), key=lambda pair: _fate(divisor[pair], factor)
    )
    ends = ((fate, pairs[0], pairs[-1]) for fate, run in runs if (pairs := list(run)))
    return [
        Band(fate, first, last, *((column[first], column[last]) for column in columns))
        for fate, first, last in ends
    ]


def _fate(divisor: float, factor: float) -> str:
    if abs(divisor - 1) <= TOLERANCE:
        return "kept"
    if divisor < 1:
        return "sped up"
    if divisor > 1e20:
        return "stopped"
    if abs(divisor / factor - 1) <= TOLERANCE:
        return "interpolated"
    return "blended" if divisor < factor else "stretched"
