"""The commands that list methods, encodings, recipes and suites, or show one of them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cyclopts import Group

from ropepatch.cli.derive import command
from ropepatch.cli.screen import paragraphs, print_table, print_text

GROUP = Group("List", sort_key=4)
REMAPPING = "position remapping"
HEADS = {"scaling": "frequencies", REMAPPING: "Δ = m − n becomes"}  # of the tables
OF_METHODS = ("kind", "formula", "paper", "saved_as", "length_dependent")
OF_ENCODINGS = ("family", "formula", "paper")


def described(kind: Any, what: str, facts: Sequence[str]) -> dict[str, Any]:
    """A method or an encoding with the defaults of its parameters."""
    return {
        what: kind.name,
        **{fact: getattr(kind, fact) for fact in facts},
        "parameters": defaults_of(kind),
        "help": inspect.getdoc(kind),
    }


def defaults_of(kind: Any) -> dict[str, Any]:
    """The default of every parameter of a method or an encoding."""
    return {
        key: "required" if default is ... else default
        for key, default in kind.defaults().items()
    }


def _print_one(one: dict[str, Any], name: str, option: str) -> None:
    """Print a method or an encoding, and its parameters as they are written."""
    print_text(
        f"{name} ({one['paper']}): {one['formula']}\n\n{paragraphs(one['help'])}"
    )
    print()
    for parameter, default in one["parameters"].items():
        shown = "VALUE (required)" if default == "required" else json.dumps(default)
        print(f"  {option}{parameter}={shown}")


@command(
    GROUP,
    """\
  ropepatch methods
  ropepatch methods yarn
  ropepatch methods self-extend""",
)
def methods(name: str | None = None, *, as_json: bool = False) -> None:
    """List the scaling methods and the position remappings, or describe one.

    Args:
        name: A method, to describe it with its parameters.
    """
    from ropepatch.attention import REMAPPINGS, find_method
    from ropepatch.files import json_text
    from ropepatch.scaling import METHODS

    known = (METHODS | REMAPPINGS).values()
    kinds = known if name is None else [find_method(name)]
    chosen = [described(kind, "method", OF_METHODS) for kind in kinds]
    if as_json:
        print(json_text(chosen))
    elif name is not None:
        _print_one(chosen[0], name, "--set ")
        print(f"\nsaved as: {chosen[0]['saved_as']}")
    else:
        keys = ("method", "formula", "paper", "saved_as")
        for kind, head in HEADS.items():
            of_kind = [one for one in chosen if one["kind"] == kind]
            rows = [[one[key] for key in keys] for one in of_kind]
            print_table((kind, head, "source", "saved as"), rows)
            print()


@command(
    GROUP,
    """\
  ropepatch encodings
  ropepatch encodings alibi""",
)
def encodings(name: str | None = None, *, as_json: bool = False) -> None:
    """List the position encodings that a model can be trained with, or describe one.

    Args:
        name: An encoding, to describe it with its parameters.
    """
    from ropepatch.encodings import ENCODINGS
    from ropepatch.files import json_text

    kinds = ENCODINGS.values() if name is None else [ENCODINGS.find(name)]
    chosen = [described(kind, "encoding", OF_ENCODINGS) for kind in kinds]
    if as_json:
        print(json_text(chosen))
    elif name is not None:
        _print_one(chosen[0], name, "")
        print(f"\nin Python: ropepatch.swap(model, {name!r})")
    else:
        keys = ("encoding", "family", "formula", "paper")
        rows = [[one[key] for key in keys] for one in chosen]
        print_table(("encoding", "family", "scores", "source"), rows)


@command(
    GROUP,
    """\
  ropepatch recipes
  ropepatch recipes llama2-7b-yarn-32k
  ropepatch recipes llama2-7b-yarn-32k > mine.yaml""",
)
def recipes(name: str | None = None, *, as_json: bool = False) -> None:
    """List the recipes of `ropepatch train`, or print one, which you can change.

    Args:
        name: A recipe.
    """
    from ropepatch.settings import RECIPES

    _list(name, RECIPES, "recipe", "trains", as_json)


@command(
    GROUP,
    """\
  ropepatch suites
  ropepatch suites demo
  ropepatch suites demo > mine.yaml""",
)
def suites(name: str | None = None, *, as_json: bool = False) -> None:
    """List the suites of `ropepatch eval`, or print one, which you can change.

    Args:
        name: A suite.
    """
    from ropepatch.settings import SUITES

    _list(name, SUITES, "suite", "measures", as_json)


def _list(name: str | None, folder: str, what: str, does: str, as_json: bool) -> None:
    """Print a bundled YAML file, or a table of all with the first sentence of each."""
    from ropepatch.files import json_text, shipped
    from ropepatch.settings import read_yaml, refuse_unknown, shipped_names

    known = shipped_names(folder)
    names = known if name is None else [name]
    refuse_unknown(names, known, what)
    files = {name: shipped(folder) / f"{name}.yaml" for name in names}
    if as_json:
        content = [{what: name} | read_yaml(file, what) for name, file in files.items()]
        print(json_text(content))
    elif name:
        schema = files[name].with_name(f"{what}.schema.json").resolve()
        text = files[name].read_text(encoding="utf-8")
        # A copy is not next to the schema
        print(text.replace(f"$schema={schema.name}", f"$schema={schema}"), end="")
    else:
        rows = [(name, first_sentence(file)) for name, file in files.items()]
        print_table((what, does), rows)


def first_sentence(file: Path) -> str:
    """The first sentence of a file, below the line with its schema."""
    text = ""
    for line in file.read_text(encoding="utf-8").splitlines()[1:]:
        if not line.startswith("# ") or line.startswith("#   "):
            break
        text += line.removeprefix("#")
    return text.partition(". ")[0].strip().removesuffix(".")
