"""Every frequency method, by the name the user types. A third party adds an entry to METHODS."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from ropepatch.errors import RopepatchError
from ropepatch.scaling import dynamic, powers, ramps, reshaped, searched
from ropepatch.scaling.method import METHODS, Scaling, find_method
from ropepatch.settings.parameters import hashable, refuse_parameters, required

METHODS |= {
    "none": powers.Unscaled,
    "linear": powers.PositionInterpolation,
    "ntk": powers.NTKAware,
    "ntk-by-parts": ramps.NTKByParts,
    "yarn": ramps.YaRN,
    "llama3": ramps.Llama3,
    "longrope": searched.LongRoPE,
    "abf": powers.AdjustedBase,
    "ntk-fixed": powers.NTKFixed,
    "ntk-mixed": powers.NTKMixed,
    "giraffe-power": reshaped.GiraffePower,
    "giraffe-truncated": reshaped.GiraffeTruncated,
    "p-rope": reshaped.PartialRope,
    "resonance": reshaped.Resonance,
    "cope": reshaped.ClippedRope,
    "custom": searched.CustomDivisors,
    "dynamic": dynamic.DynamicNTK,
    "dynamic-linear": dynamic.DynamicLinear,
    "dynamic-yarn": dynamic.DynamicYaRN,
    "longrope-switch": searched.LongRoPESwitch,
}


def check_parameters(name: str, parameters: Iterable[str]) -> None:
    """Refuse what is no parameter of a method.

    Raises:
        RopepatchError: On an unknown method or parameter.
    """
    known = [f.name for f in fields(find_method(name)) if f.name != "factor"]
    refuse_parameters(name, known, parameters)


def required_parameters(method: type[Scaling]) -> list[str]:
    """The parameters that must be given, beside the factor."""
    return [parameter for parameter in required(method) if parameter != "factor"]


def formulas() -> tuple[str, ...]:
    """The static methods that need nothing but a factor."""
    return tuple(
        name
        for name, method in METHODS.items()
        if not method.length_dependent and not required_parameters(method)
    )


def make_scaling(name: str, *, factor: float, **parameters: Any) -> Scaling:
    """The method of that name with these parameters.

    Raises:
        RopepatchError: On an unknown method or parameter, or one that is missing or outside its domain.
    """
    check_parameters(name, parameters)
    method = find_method(name)
    missing = [parameter for parameter in required_parameters(method) if parameter not in parameters]
    if missing:
        raise RopepatchError(
            f"{name} needs {', '.join(missing)}", hint=" ".join(f"--set {n}=VALUE" for n in missing)
        )
    return method(factor=factor, **{n: hashable(value) for n, value in parameters.items()})
