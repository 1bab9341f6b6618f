"""The mathematics of RoPE scaling, which needs only torch."""

from __future__ import annotations

from typing import Any

from ropepatch.scaling import dynamic, powers, ramps, reshaped, searched
from ropepatch.scaling.ramps import YaRN
from ropepatch.scaling.rope import METHODS, Scaling

__all__ = [
    "METHODS",
    "Scaling",
    "YaRN",
    "formulas",
    "make_scaling",
]

METHODS |= {
    kind.name: kind
    for kind in (
        *(powers.Unscaled, powers.PositionInterpolation, powers.NTKAware),
        *(ramps.NTKByParts, ramps.YaRN, ramps.Llama3, searched.LongRoPE),
        *(powers.AdjustedBase, powers.NTKFixed, powers.NTKMixed),
        *(reshaped.GiraffePower, reshaped.GiraffeTruncated, reshaped.PartialRope),
        *(reshaped.Resonance, reshaped.ClippedRope, searched.CustomDivisors),
        *(dynamic.DynamicNTK, searched.LongRoPESwitch),
    )
}


def formulas() -> tuple[str, ...]:
    """Return the names of the static methods that need only a factor."""
    return tuple(
        name
        for name, method in METHODS.items()
        if not method.length_dependent and not method.required()
    )


def make_scaling(name: str, *, factor: float, **parameters: Any) -> Scaling:
    """Make a scaling.

    Args:
        name: The method's name.
        factor: s, the target length over the original context length; at least 1.
        parameters: The method's own parameters.

    Raises:
        RopepatchError: If the method or a parameter is unknown, or a parameter is missing or out of range.
    """
    return METHODS.make(name, factor=factor, **parameters)
