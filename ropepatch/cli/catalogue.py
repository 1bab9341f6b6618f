"""What commands list, refuse and complete without importing torch; `make documents` writes the file of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ropepatch.files import read_json

FILE = Path(__file__).with_name("catalogue.json")
Entry = dict[str, Any]


def compiled() -> dict[str, dict[str, Any]]:
    """The catalogue from the registries and the recipes themselves, which needs torch and transformers."""
    from ropepatch.attention import MAPS
    from ropepatch.cli.descriptions import describe_encoding, describe_method, describe_recipe
    from ropepatch.encodings import ENCODINGS
    from ropepatch.scaling import METHODS
    from ropepatch.settings import RECIPES, shipped_names
    from ropepatch.training.recipe import read_recipe

    return {
        "methods": {name: describe_method(kind) for name, kind in (METHODS | MAPS).items()},
        "other names of methods": METHODS.other_names | MAPS.other_names,
        "encodings": {name: describe_encoding(kind) for name, kind in ENCODINGS.items()},
        "other names of encodings": ENCODINGS.other_names,
        "recipes": {name: describe_recipe(name, read_recipe(name)) for name in shipped_names(RECIPES)},
    }


def entries(kind: str) -> dict[str, Any]:
    """A part of the catalogue: the entries of `methods`, `encodings` or `recipes` by name.

    They are from the file; compiled where the registry is there already, as somebody may have added to it.
    """
    return _content()[kind]


def _content() -> dict[str, dict[str, Any]]:
    return compiled() if "ropepatch.scaling" in sys.modules else read_json(FILE)


def find_entry(kind: str, name: str) -> Entry:
    """The entry of a method or an encoding.

    Raises:
        RopepatchError: There is none; with the nearest name and the list.
    """
    from ropepatch.settings import find_named

    content = _content()
    entry: Entry = find_named(name, content[f"{kind}s"], kind, content[f"other names of {kind}s"])
    return entry
