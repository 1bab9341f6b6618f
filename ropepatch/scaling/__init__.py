"""Every frequency method, by the name the user types. A third party adds an entry to METHODS."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from ropepatch.errors import RopepatchError
from ropepatch.scaling.dynamic import DynamicLinear, DynamicNTK, DynamicYaRN
from ropepatch.scaling.method import Scaling
from ropepatch.scaling.powers import (
    AdjustedBase,
    NTKAware,
    NTKFixed,
    NTKMixed,
    PositionInterpolation,
    Unscaled,
)
from ropepatch.scaling.ramps import Llama3, NTKByParts, YaRN
from ropepatch.scaling.reshaped import ClippedRope, GiraffePower, GiraffeTruncated, PartialRope, Resonance
from ropepatch.scaling.searched import CustomDivisors, LongRoPE, LongRoPESwitch

METHODS: dict[str, type[Scaling]] = {
    "none": Unscaled,
    "linear": PositionInterpolation,
    "ntk": NTKAware,
    "ntk-by-parts": NTKByParts,
    "yarn": YaRN,
    "llama3": Llama3,
    "longrope": LongRoPE,
    "abf": AdjustedBase,
    "ntk-fixed": NTKFixed,
    "ntk-mixed": NTKMixed,
    "giraffe-power": GiraffePower,
    "giraffe-truncated": GiraffeTruncated,
    "p-rope": PartialRope,
    "resonance": Resonance,
    "cope": ClippedRope,
    "custom": CustomDivisors,
    "dynamic": DynamicNTK,
    "dynamic-linear": DynamicLinear,
    "dynamic-yarn": DynamicYaRN,
    "longrope-switch": LongRoPESwitch,
}

_OTHER_NAMES = {
    "pi": "linear",
    "ntk-aware": "ntk",
    "dynamic-ntk": "dynamic",
    "proportional": "p-rope",
    "nope": "p-rope",
    "su": "longrope",
    "llama-3": "llama3",
}


def find_method(name: str) -> type[Scaling]:
    """The method of that name.

    Raises:
        RopepatchError: If there is none; with the nearest name and the list.
    """
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(_OTHER_NAMES.get(name.lower(), name.lower()), METHODS)
    suggestion = f"did you mean {near[0]}? " if near else ""
    raise RopepatchError(f"unknown method {name!r}", hint=f"{suggestion}methods: {', '.join(METHODS)}")


def check_parameters(name: str, parameters: Iterable[str]) -> None:
    """Refuse what is no parameter of a method.

    Raises:
        RopepatchError: On an unknown method or parameter.
    """
    known = [f.name for f in fields(find_method(name)) if f.name != "factor"]
    for parameter in parameters:
        if parameter not in known:
            near = difflib.get_close_matches(parameter, known)
            suggestion = f"did you mean {near[0]}? " if near else ""
            listed = f"its parameters: {', '.join(known)}" if known else "it has none"
            raise RopepatchError(f"{name} has no parameter {parameter!r}", hint=suggestion + listed)


def required_parameters(method: type[Scaling]) -> list[str]:
    """The parameters that must be given, beside the factor."""
    return [f.name for f in fields(method) if f.default is MISSING and f.name != "factor"]


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
    required = [parameter for parameter in required_parameters(method) if parameter not in parameters]
    if required:
        raise RopepatchError(
            f"{name} needs {', '.join(required)}", hint=" ".join(f"--set {n}=VALUE" for n in required)
        )
    return method(factor=factor, **{n: _hashable(value) for n, value in parameters.items()})


def _hashable(value: Any) -> Any:
    """Lists, arrays and tensors of numbers as the tuple a frozen dataclass holds."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(value) if isinstance(value, list) else value


__all__ = ["METHODS", "Scaling", "find_method", "make_scaling", *sorted(m.__name__ for m in METHODS.values())]
