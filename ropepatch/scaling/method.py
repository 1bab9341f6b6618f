"""What every scaling method is: a frozen set of parameters and a pure function from a rope to frequencies."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from ropepatch.errors import RopepatchError
from ropepatch.rope import Frequencies, Rope

LARGEST = 1e12  # of a parameter: beyond it powers and logarithms leave the floating-point range


@dataclass(frozen=True, kw_only=True)
class Scaling(ABC):
    """One published way to stretch a rope.

    Args:
        factor: s, the target length over the original window; at least 1.

    Raises:
        RopepatchError: On parameters outside the method's domain.
    """

    name: ClassVar[str]  # what the user types
    formula: ClassVar[str] = ""  # one line, for tables
    paper: ClassVar[str] = "–"
    saved_as: ClassVar[str] = "longrope"  # the rope type of an extended LLaMA; – where none can hold it
    length_dependent: ClassVar[bool] = False
    factor: float

    def __post_init__(self) -> None:
        types = get_type_hints(type(self))
        for field in fields(self):
            fits, expected = _fits(getattr(self, field.name), types[field.name])
            self._require(fits, field.name, expected)
            if isinstance(getattr(self, field.name), float):
                self._require(abs(getattr(self, field.name)) <= LARGEST, field.name, f"at most {LARGEST:g}")
        self._require(self.factor >= 1, "factor", "at least 1")

    @abstractmethod
    def frequencies(self, rope: Rope, length: int | None = None) -> Frequencies:
        """The scaled frequencies.

        Args:
            rope: The rope to scale.
            length: The planned length in tokens; only length-dependent methods look at it; None means L.

        Raises:
            RopepatchError: Where the method is undefined on this rope.
        """

    def at(self, rope: Rope, length: int | None) -> Scaling:
        """The static method that a length-dependent one is at a length; a static one is itself."""
        return self

    def native(self, rope: Rope) -> dict[str, Any] | None:
        """The `rope_parameters`, less an unchanged `rope_theta`, that give transformers the same table.

        None where it has no such rope type, or where `rope` already is scaled.
        """
        return None

    def parameters(self) -> dict[str, Any]:
        """The method's own parameters by name, without the factor."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "factor"}

    def _require(self, condition: bool, parameter: str, expected: str) -> None:
        if not condition:
            raise RopepatchError(
                f"{self.name}: {parameter} must be {expected}, got {getattr(self, parameter)!r}",
                hint=f"`ropepatch methods {self.name}` lists its parameters",
            )

    def _refuse_scaled(self, rope: Rope, way_out: str) -> None:
        if rope.is_scaled:
            raise RopepatchError(
                f"{self.name} is a formula of rope_theta and does not apply to a rope that is already scaled",
                hint=way_out,
            )


class LengthDependent(Scaling):
    """A method that is another, static one at every length."""

    length_dependent = True

    @abstractmethod
    def at(self, rope: Rope, length: int | None) -> Scaling:
        """The static method at a length."""

    def frequencies(self, rope: Rope, length: int | None = None) -> Frequencies:
        """Those of the static method at `length`."""
        return self.at(rope, length).frequencies(rope)


def _fits(value: Any, kind: Any) -> tuple[bool, str]:
    """Whether a value is of a parameter's declared type, and how that type is called."""
    if get_origin(kind) is UnionType:
        (option,) = (option for option in get_args(kind) if option is not NoneType)
        fits, expected = _fits(value, option)
        return value is None or fits, f"{expected} or None"
    if get_origin(kind) is Literal:
        return value in get_args(kind), " or ".join(get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(map(_is_number, value)), "a tuple of finite numbers"
    if kind is float:
        return _is_number(value), "a finite number"
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool), "a whole number"
    return isinstance(value, kind), {bool: "true or false", str: "a name"}[kind]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
