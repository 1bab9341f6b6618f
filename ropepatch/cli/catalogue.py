"""What commands list, refuse and complete without importing torch; `make documents` writes the file of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ropepatch.files import read_json

FILE = Path(__file__).with_name("catalogue.json")
Entry = dict[str, Any]


def compiled(*parts: str) -> dict[str, dict[str, Any]]:
    """Parts of the catalogue, or all, from the registries and the recipes themselves, which needs torch."""
    from ropepatch.attention import MAPS
    from ropepatch.cli.descriptions import describe_encoding, describe_method, describe_recipe
    from ropepatch.encodings import ENCODINGS
    from ropepatch.scaling import METHODS
    from ropepatch.settings import RECIPES, shipped_names
    from ropepatch.training.recipe import read_recipe

    compile_part: dict[str, Callable[[], dict[str, Any]]] = {
        "methods": lambda: {name: describe_method(kind) for name, kind in (METHODS | MAPS).items()},
        "other names of methods": lambda: METHODS.other_names | MAPS.other_names,
        "encodings": lambda: {name: describe_encoding(kind) for name, kind in ENCODINGS.items()},
        "other names of encodings": lambda: ENCODINGS.other_names,
        "recipes": lambda: {
            name: describe_recipe(name, read_recipe(name)) for name in shipped_names(RECIPES)
        },
    }
    return {part: compile_part[part]() for part in parts or compile_part}


def entries(kind: str) -> dict[str, Any]:
    """A part of the catalogue: the entries of `methods`, `encodings` or `recipes` by name.

    They are from the file; compiled where the registry is there already, as somebody may have added to it.
    """
    return (compiled(kind) if "ropepatch.scaling" in sys.modules else read_json(FILE))[kind]


def find_entry(kind: str, name: str) -> Entry:
    """The entry of a method or an encoding.

    Raises:
        RopepatchError: There is none; with the nearest name and the list.
    """
    from ropepatch.settings import find_named

    entry: Entry = find_named(name, entries(f"{kind}s"), kind, entries(f"other names of {kind}s"))
    return entry
