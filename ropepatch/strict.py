"""YAML that is read strictly: what is unknown, missing or of the wrong kind is refused, with a suggestion."""

from __future__ import annotations

import reprlib
import sys
from dataclasses import MISSING, fields
from difflib import get_close_matches
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import yaml

from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


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
