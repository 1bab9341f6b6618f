"""The YAML files that come with ropepatch: suites and recipes, by their names."""

from __future__ import annotations

from pathlib import Path

from ropepatch.files import shipped
from ropepatch.settings import refuse_unknown

SUITES, RECIPES = "eval/suites", "recipes"
ENDINGS = (".yaml", ".yml")


def shipped_names(folder: str) -> list[str]:
    """The names of the YAML files in a folder of them."""
    return sorted(file.stem for file in shipped(folder).glob("*.yaml"))


def name_of(named: str) -> str:
    """The name of a shipped file, or that of a path without its ending."""
    return Path(named).stem if named.endswith(ENDINGS) else named


def find_shipped(name: str, folder: str, what: str) -> Path:
    """The YAML file of a name in a folder of them, or one by its own path; ``what`` names its kind."""
    if name.endswith(ENDINGS):
        return Path(name)
    refuse_unknown([name], shipped_names(folder), what)
    return shipped(folder) / f"{name}.yaml"
