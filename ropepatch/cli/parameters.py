"""Parameters of a method on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ropepatch.errors import RopepatchError, argument
from ropepatch.extension.planning import check_method
from ropepatch.files import parse_json, read_text
from ropepatch.settings import parse_yaml


def parse_settings(method: str, settings: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE texts into the parameters of a method.

    Args:
        method: The name of the method.
        settings: The texts: values as in YAML, lists with commas, or a JSON file with a list.
    """
    parameters: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            option = argument("settings")
            raise RopepatchError(
                f"{option} {setting} has no value", hint=f"write {option} NAME=VALUE"
            )
        try:
            parameters[name] = _value(text)
        except (yaml.YAMLError, OSError, ValueError) as error:
            raise RopepatchError(
                f"{name}={text} has no value: {' '.join(str(error).split())}",
                hint="write a number, a name, numbers separated by commas, or a JSON file with a list",
            ) from error
    check_method(method, parameters)
    return parameters


def _value(text: str) -> Any:
    if text.endswith(".json"):
        return parse_json(read_text(Path(text)))
    is_list = "," in text and not text.startswith("[")
    return parse_yaml(f"[{text}]" if is_list else text)
