"""How `--set NAME=VALUE` and shares become values."""

from __future__ import annotations

import json
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ropepatch.errors import RopepatchError, argument
from ropepatch.files import read_text


def parse_settings(method: str, settings: list[str] | None, *, learnable: bool = False) -> dict[str, Any]:
    """NAME=VALUE pairs as the types that the method's dataclass declares.

    Args:
        method: A name, or a scaling file, which holds every parameter.
        settings: The pairs.
        learnable: Whether `fit` and `auto` may stand for a method; `extend` checks what is set beside them.

    Raises:
        RopepatchError: If a pair has no `=`, its name is unknown or its value is of another type; or beside a
            scaling file; or the method is `fit` or `auto`.
    """
    from ropepatch.extension.planning import check_method, find_method
    from ropepatch.scaling.file import AUTO, FIT, is_scaling_file

    pairs = [_pair(setting) for setting in settings or []]
    if learnable and method in (FIT, AUTO):  # of the parameters of `fit`, the steps alone are a number
        return {name: int(text) if name == "steps" and text.isdecimal() else text for name, text in pairs}
    types = {} if is_scaling_file(method) else get_type_hints(find_method(method))
    parameters = {
        name: _value(method, name, text, types[name]) if name in types else text for name, text in pairs
    }
    check_method(method, parameters)
    return parameters


def _pair(setting: str) -> tuple[str, str]:
    name, equals, text = setting.partition("=")
    if not equals:
        asked = argument("settings")
        raise RopepatchError(f"{asked} {setting} has no value", hint=f"write {asked} NAME=VALUE")
    return name, text


def _value(method: str, name: str, text: str, kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        kinds = [option for option in get_args(kind) if option is not type(None)]
        return None if text.lower() in ("none", "null") else _value(method, name, text, kinds[0])
    if get_origin(kind) is Literal or kind is str:
        return text
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if get_origin(kind) is tuple:
            is_file = text.endswith(".json")
            numbers = json.loads(read_text(Path(text))) if is_file else text.split(",")
            return tuple(map(float, numbers))
        return kind(text)
    except (ValueError, KeyError, TypeError, OSError) as error:
        words = {bool: "true or false", int: "a whole number", float: "a number"}
        expected = words.get(kind, "numbers separated by commas, or a JSON file with a list")
        raise RopepatchError(
            f"{name} must be {expected}, got {text!r}",
            hint=f"`ropepatch methods {method}` lists its parameters",
        ) from error


def parse_share(text: str) -> float:
    """A share from `2%` or `0.02`.

    Raises:
        RopepatchError: If the text is neither, or below 0, or 1 or more without a percent sign.
    """
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < (float("inf") if percent else 1):
        raise RopepatchError(f"{text!r} is not a share", hint="write 2% or 0.02")
    return share
