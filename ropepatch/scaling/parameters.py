"""The parameters of scaling methods and encodings: of their declared types, and found by their names."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from ropepatch.errors import RopepatchError

LARGEST = 1e12  # of a parameter: beyond it powers and logarithms leave the floating-point range

Kind = TypeVar("Kind", bound="Checked")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Parameters that are of their declared types.

    Raises:
        RopepatchError: On one that is not.
    """

    name: ClassVar[str]  # what the user types
    listed_by: ClassVar[str]  # the command that lists the parameters

    def __post_init__(self) -> None:
        types = get_type_hints(type(self))
        for field in fields(self):
            fits, expected = _fits(getattr(self, field.name), types[field.name])
            self._require(fits, field.name, expected)
            if isinstance(getattr(self, field.name), float):
                self._require(abs(getattr(self, field.name)) <= LARGEST, field.name, f"at most {LARGEST:g}")

    def _require(self, condition: bool, parameter: str, expected: str) -> None:
        if not condition:
            raise RopepatchError(
                f"{self.name}: {parameter} must be {expected}, got {getattr(self, parameter)!r}",
                hint=f"`{self.listed_by} {self.name}` lists its parameters",
            )


def find_kind(
    name: str, kinds: Mapping[str, type[Kind]], what: str, other_names: Mapping[str, str]
) -> type[Kind]:
    """The kind of that name.

    Raises:
        RopepatchError: If there is none; with the nearest name and the list.
    """
    if name in kinds:
        return kinds[name]
    near = difflib.get_close_matches(other_names.get(name.lower(), name.lower()), kinds)
    suggestion = f"did you mean {near[0]}? " if near else ""
    raise RopepatchError(f"unknown {what} {name!r}", hint=f"{suggestion}{what}s: {', '.join(kinds)}")


def refuse_parameters(name: str, known: list[str], parameters: Iterable[str]) -> None:
    """Refuse what is no parameter of that name.

    Raises:
        RopepatchError: On an unknown parameter; with the nearest one and the list.
    """
    for parameter in parameters:
        if parameter not in known:
            near = difflib.get_close_matches(parameter, known)
            suggestion = f"did you mean {near[0]}? " if near else ""
            listed = f"its parameters: {', '.join(known)}" if known else "it has none"
            raise RopepatchError(f"{name} has no parameter {parameter!r}", hint=suggestion + listed)


def required(kind: type[Checked]) -> list[str]:
    """The parameters that have no default."""
    return [field.name for field in fields(kind) if field.default is MISSING]


def hashable(value: Any) -> Any:
    """Lists, arrays and tensors of numbers as the tuple a frozen dataclass holds."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(value) if isinstance(value, list) else value


def _fits(value: Any, kind: Any) -> tuple[bool, str]:
    """Whether a value is of a parameter's declared type, and how that type is called."""
    if get_origin(kind) is UnionType:
        (option,) = (option for option in get_args(kind) if option is not NoneType)
        fits, expected = _fits(value, option)
        return value is None or fits, f"{expected} or None"
    if get_origin(kind) is Literal:
        return value in get_args(kind), " or ".join(get_args(kind))
    if get_origin(kind) is tuple:
        whole = get_args(kind)[0] is int
        of_kind = all(map(_is_whole if whole else _is_number, value)) if isinstance(value, tuple) else False
        return of_kind, "a tuple of whole numbers" if whole else "a tuple of finite numbers"
    if kind is float:
        return _is_number(value), "a finite number"
    if kind is int:
        return _is_whole(value), "a whole number"
    return isinstance(value, kind), {bool: "true or false", str: "a name"}[kind]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
