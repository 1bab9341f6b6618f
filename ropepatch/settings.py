"""What a user writes, read once: names, parameters, lengths, YAML and seeds; errors in one line."""

from __future__ import annotations

import difflib
import hashlib
import math
import re
import reprlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from textwrap import shorten
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from pathlib import Path

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


_short = reprlib.Repr()  # aliases make a short YAML file hold an endless value
_short.maxlevel, _short.maxstring, _short.maxother = 2, 100, 100


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice; YAML forbids it, PyYAML takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(None, None, f"{key.value} is given twice", key.start_mark)
                seen.add((key.tag, key.value))
        return node


def read_yaml(path: Path, what: str) -> Any:
    """What a YAML file holds; ``what`` says in errors what it should be.

    Raises:
        RopepatchError: No such file, no YAML, a tag that is not of plain YAML, or a key that is given twice.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except Exception as error:  # PyYAML passes on what int(), datetime() and others say to a hostile value
        reason = shorten(str(error) or type(error).__name__, 300)
        raise RopepatchError(f"{path} is not a {what}: {reason}", hint="name a YAML file") from error


def check_keys(kind: type, content: object) -> None:
    """Refuse what does not have the keys of a dataclass.

    Raises:
        RopepatchError: No mapping, a key that is unknown, or one that is missing.
    """
    place = kind.__name__.lower()
    known = [field.name for field in fields(kind)]
    keys = f"its keys are {', '.join(known)}"
    if not isinstance(content, dict):
        raise RopepatchError(f"a {place} must be a mapping, got {_short.repr(content)}", hint=keys)
    refuse_unknown(content, known, f"{place} key")
    for field in fields(kind):
        if field.default is field.default_factory is MISSING and field.name not in content:
            raise RopepatchError(f"a {place} must have the key {field.name}", hint=keys)


def refuse_unknown(names: Iterable[object], known: Iterable[str], what: str) -> None:
    """Refuse a name that is not known; the hint is the nearest known one, or all of them.

    Raises:
        RopepatchError: A name that is not known.
    """
    choices = list(known)
    for name in names:
        if name not in choices:
            close = get_close_matches(name, choices, n=1) if isinstance(name, str) else []
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(choices)}"
            raise RopepatchError(f"unknown {what} {_short.repr(name)}", hint=hint)


def is_count(value: object) -> bool:
    """Whether it is a whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_amount(value: object) -> bool:
    """Whether it is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


Length = int | str  # what `relative_length` takes
UNITS = {"": 1, "k": 1024, "m": 1024**2}


def parse_length(text: str) -> int:
    """Tokens, from `4096`, `32k` or `1m`.

    Raises:
        RopepatchError: If the text is none of these.
    """
    match = re.fullmatch(r"([0-9]{1,12})([kKmM]?)", text.strip())
    if not match or int(match[1]) == 0:
        raise RopepatchError(f"{text!r} is not a length in tokens", hint="write 4096, 32k (32 x 1024) or 1m")
    return int(match[1]) * UNITS[match[2].lower()]


def parse_lengths(text: str) -> list[int]:
    """Lengths separated by commas, ascending and each once."""
    return sorted({parse_length(part) for part in text.split(",")})


def relative_length(text: str | int, trained: int) -> int:
    """Tokens, from what `parse_length` takes or from a multiple of the trained context: `4x`, `1.5x`.

    Raises:
        RopepatchError: If the text is none of these.
    """
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)x", str(text).strip())
    return round(float(match[1]) * trained) if match else parse_length(str(text))


def short_length(tokens: int) -> str:
    """The opposite of `parse_length`: 32768 as 32k."""
    for unit, size in reversed(UNITS.items()):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def seed_of(*parts: object) -> int:
    """A 64-bit seed for the draw that ``parts`` describe; the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def is_text(value: object) -> bool:
    """Whether it is a text that is not empty."""
    return isinstance(value, str) and value != ""


def check_length(key: str, value: Length) -> None:
    """Refuse what `relative_length` does not take."""
    try:
        tokens = relative_length(value, 10**6)
    except RopepatchError as error:
        raise RopepatchError(f"{key}: {error}", hint=error.hint) from error
    check(key, value, tokens >= 1, "at least one token")


def check(key: str, value: object, fits: object, expected: str) -> None:
    """Refuse a value that does not fit."""
    if not fits:
        raise RopepatchError(f"{key} must be {expected}, got {value!r}")
