"""Parameters of a method on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ropepatch.errors import RopepatchError, argument
from ropepatch.extension.planning import check_method, find_method
from ropepatch.files import parse_json, read_text
from ropepatch.scaling.file import is_scaling_file


def parse_settings(method: str, settings: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE texts into the parameters of a method, in its declared types.

    Args:
        method: A name, or a scaling file.
        settings: The texts.
    """
    if not settings:
        return {}
    kind = None if is_scaling_file(method) else find_method(method)
    types = (
        {key: get_type_hints(kind)[key] for key in kind.model_fields} if kind else {}
    )
    parameters: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            option = argument("settings")
            raise RopepatchError(
                f"{option} {setting} has no value", hint=f"write {option} NAME=VALUE"
            )
        parameters[name] = (
            _value(method, name, text, types[name]) if name in types else text
        )
    check_method(method, parameters)
    return parameters


def _value(method: str, name: str, text: str, kind: Any) -> Any:
    """A text in a declared type; if it does not parse, the text itself, for the error of the method."""
    if type(None) in get_args(kind) and text.lower() in ("none", "null"):
        return None
    several = "tuple" in str(kind)
    try:
        is_file = several and text.endswith(".json")
        listed = (
            text.removeprefix("[").removesuffix("]").split(",") if several else text
        )
        value = parse_json(read_text(Path(text))) if is_file else listed
        return TypeAdapter(kind).validate_python(value)
    except (ValidationError, ValueError, OSError) as error:
        if not several:
            return text
        hint = f"`ropepatch methods {method}` lists its parameters"
        words = "numbers separated by commas, or a JSON file with a list"
        raise RopepatchError(
            f"{name} must be {words}, got {text!r}", hint=hint
        ) from error
