"""The parameters of scaling methods and encodings: of their declared types, and found by their names."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from ropepatch.errors import RopepatchError
from ropepatch.settings import LARGEST as LARGEST
from ropepatch.settings import expected

STRICT = ConfigDict(strict=True, allow_inf_nan=False)
BOUNDS = {"gt": "above", "ge": "at least", "le": "at most"}
WORDS = {
    bool: "true or false",
    float: "a finite number",
    int: "a whole number",
    str: "a name",
    tuple[int, ...]: "a tuple of whole numbers",
    NoneType: "None",
}

Positive = Annotated[float, Field(gt=0)]
AboveOne = Annotated[float, Field(gt=1)]
FromZero = Annotated[float, Field(ge=0)]
FromOne = Annotated[float, Field(ge=1)]
FromZeroToOne = Annotated[float, Field(ge=0, le=1)]
WholeFromOne = Annotated[int, Field(ge=1)]
Divisors = Annotated[  # each leaves a frequency that float32 holds
    tuple[Annotated[float, Field(ge=1e-30, le=1e30)], ...],
    Field(min_length=1),
    expected("a tuple of numbers from 1e-30 to 1e30"),
]
Kind = TypeVar("Kind")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Parameters that are of their declared types.

    Raises:
        RopepatchError: On one that is not.
    """

    name: ClassVar[str]  # what the user types
    listed_by: ClassVar[str]  # the command that lists the parameters

    def __post_init__(self) -> None:
        kind: Any = type(self)
        types = get_type_hints(kind)
        for name, adapter in _adapters(kind).items():
            value = hashable(getattr(self, name))
            object.__setattr__(self, name, value)
            try:
                adapter.validate_python(value)
            except ValidationError as error:
                self._require(False, name, _words(types[name], error.errors()[0]))
            if isinstance(value, int | float):
                self._require(abs(value) <= LARGEST, name, f"at most {LARGEST:g}")

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The default of every parameter; `...` where there is none."""
        return {field.name: ... if field.default is MISSING else field.default for field in fields(cls)}

    @classmethod
    def refuse_unknown(cls, parameters: Iterable[str]) -> None:
        """Refuse names that are no parameters."""
        refuse_parameters(cls.name, [*cls.defaults()], parameters)

    def _require(self, condition: bool, parameter: str, expected: str) -> None:
        if not condition:
            raise RopepatchError(
                f"{self.name}: {parameter} must be {expected}, got {getattr(self, parameter)!r}",
                hint=f"`{self.listed_by} {self.name}` lists its parameters",
            )


def find_kind(name: str, kinds: Mapping[str, Kind], what: str, other_names: Mapping[str, str]) -> Kind:
    """What has that name.

    Raises:
        RopepatchError: If there is none; with the nearest name and the list.
    """
    listed = f"{what}s: {', '.join(kinds)}"
    if not isinstance(name, str):
        raise RopepatchError(f"{what} must be a name, got {name!r}", hint=listed)
    if name in kinds:
        return kinds[name]
    suggestion = _nearest(other_names.get(name.lower(), name.lower()), kinds)
    raise RopepatchError(f"unknown {what} {name!r}", hint=suggestion + listed)


def refuse_parameters(name: str, known: list[str], parameters: Iterable[str]) -> None:
    """Refuse what is no parameter of that name.

    Raises:
        RopepatchError: On an unknown parameter; with the nearest one and the list.
    """
    for parameter in parameters:
        if parameter not in known:
            listed = f"its parameters: {', '.join(known)}" if known else "it has none"
            hint = _nearest(parameter, known) + listed
            raise RopepatchError(f"{name} has no parameter {parameter!r}", hint=hint)


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {near[0]}? " if near else ""


def required(kind: type[Checked]) -> list[str]:
    """The parameters that have no default."""
    return [field.name for field in fields(kind) if field.default is MISSING]


def hashable(value: Any) -> Any:
    """Numbers of NumPy and torch as Python's, lists and arrays as the tuple a frozen dataclass holds."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(map(hashable, value)) if isinstance(value, list | tuple) else value


@functools.cache
def _adapters(kind: type[Checked]) -> dict[str, TypeAdapter[Any]]:
    types = get_type_hints(kind, include_extras=True)
    return {field.name: TypeAdapter(types[field.name], config=STRICT) for field in fields(kind)}


def _words(kind: Any, error: ErrorDetails) -> str:
    """What is expected of a parameter of a declared type: its bound if it passed that, else the type."""
    context = error.get("ctx", {})
    for bound, words in BOUNDS.items():
        if bound in context:
            return f"{words} {context[bound]:g}"
    options = (option if isinstance(option, str) else _words(option, error) for option in get_args(kind))
    return context.get("words") or WORDS.get(kind) or " or ".join(options)
