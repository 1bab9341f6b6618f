"""The commands that list methods, encodings, recipes and suites, or show one of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cyclopts import Group

import ropepatch
from ropepatch.cli.derive import command
from ropepatch.cli.screen import paragraphs, print_table, print_text
from ropepatch.errors import plain

GROUP = Group("List", sort_key=4)
REMAPPING = "position remapping"
HEADS = {"scaling": "frequencies", REMAPPING: "Δ = m − n becomes"}  # of the tables
REQUIRED = "required"  # stands for the default of a parameter without one


def describe_method(method: Any) -> dict[str, Any]:
    """A method with the defaults of its parameters, or a scaling with their values."""
    is_class = isinstance(method, type)
    return {
        "method": method.name,
        "kind": method.kind,
        "formula": method.formula,
        "paper": method.paper,
        "saved_as": method.saved_as,
        "length_dependent": method.length_dependent,
        "parameters": _defaults(method) if is_class else method.parameters(),
        "help": inspect.getdoc(method),
    }


def describe_encoding(kind: Any) -> dict[str, Any]:
    """An encoding with the defaults of its parameters."""
    return {
        "encoding": kind.name,
        "family": kind.family,
        "formula": kind.formula,
        "paper": kind.paper,
        "parameters": _defaults(kind),
        "help": inspect.getdoc(kind),
    }


def _defaults(kind: Any) -> dict[str, Any]:
    return {
        key: REQUIRED if default is ... else default
        for key, default in kind.defaults().items()
    }


@command(
    GROUP,
    """\
  ropepatch methods
  ropepatch methods yarn
  ropepatch methods self-extend
  ropepatch methods scaling.json""",
)
def methods(name: str | None = None, *, as_json: bool = False) -> None:
    """List the scaling methods and the position remappings, or describe one.

    Args:
        name: A method, to describe it with its parameters; or a scaling file.
    """
    from ropepatch.attention import REMAPPINGS
    from ropepatch.files import json_text
    from ropepatch.scaling import METHODS
    from ropepatch.settings import refuse_unknown

    rope, known = "", METHODS | REMAPPINGS
    if name is None:
        chosen = [describe_method(kind) for kind in known.values()]
    elif name.endswith(".json"):
        rope, one = _read(name)
        chosen = [one]
    else:
        other_names = METHODS.other_names | REMAPPINGS.other_names
        refuse_unknown([name], known, "method", other_names)
        chosen = [describe_method(known[name])]
    if as_json:
        print(json_text(chosen))
    elif name is None:
        keys = ("method", "formula", "paper", "saved_as")
        for number, (kind, head) in enumerate(HEADS.items()):
            print("\n" * number, end="")
            of_kind = [one for one in chosen if one["kind"] == kind]
            rows = [[one[key] for key in keys] for one in of_kind]
            print_table((kind, head, "source", "saved as"), rows)
    else:
        (one,) = chosen
        head = f"{rope}{one['method']} ({one['paper']}): {one['formula']}"
        print_text(f"{head}\n\n{paragraphs(one['help'])}")
        print(f"\nsaved as: {one['saved_as']}")
        for parameter, default in one["parameters"].items():
            print_text(f"  --set {parameter}={_shown(default, one['kind'])}")


def _read(name: str) -> tuple[str, dict[str, Any]]:
    """A line on the RoPE parameters that a scaling file is for, and its scaling."""
    from ropepatch.scaling.file import read_scaling

    file = read_scaling(name)
    window, rope = file.rope.original_max_position_embeddings, file.rope
    line = (
        f"{name}: {window} -> {file.target} tokens, rotary_dim {rope.rotary_dim}, "
        f"rope_theta {plain(rope.rope_theta)}\n"
    )
    return line, describe_method(file.scaling)


def _shown(default: Any, kind: str) -> str:
    """A default in the syntax of --set."""
    if default is None and kind == REMAPPING:
        return "VALUE (default: from the original length L and the target length N)"
    if default == REQUIRED:
        return "VALUE (required)"
    if isinstance(default, list | tuple):
        return ",".join(map(str, default))
    text = str(default)
    return text.lower() if text in ("None", "True", "False") else text


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

    kinds = [ENCODINGS.find(name)] if name else ENCODINGS.values()
    chosen = [describe_encoding(kind) for kind in kinds]
    if as_json:
        print(json_text(chosen))
    elif name:
        one = chosen[0]
        print_text(
            f"{one['encoding']} ({one['paper']}): {one['formula']}\n\n{paragraphs(one['help'])}"
        )
        settings = "".join(
            f", {parameter}={'...' if default == REQUIRED else repr(default)}"
            for parameter, default in one["parameters"].items()
        )
        print(f"\nropepatch.swap(model, {one['encoding']!r}{settings})")
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
        name: A recipe, or a YAML file.
    """
    from ropepatch.settings import RECIPES

    def read(name: str) -> object:  # imports torch
        return ropepatch.read_recipe(name)

    _list(name, RECIPES, "recipe", "trains", as_json, read)


@command(
    GROUP,
    """\
  ropepatch suites
  ropepatch suites demo
  ropepatch suites demo > mine.yaml""",
)
def suites(name: str | None = None, *, as_json: bool = False) -> None:
    """List the suites of `ropepatch eval`, or print one.

    Args:
        name: A suite, or a YAML file.
    """
    from ropepatch.settings import SUITES

    def read(name: str) -> object:
        from ropepatch.evaluation.suites import read_suite

        return read_suite(name)

    _list(name, SUITES, "suite", "measures", as_json, read)


def _list(
    name: str | None,
    folder: str,
    what: str,
    does: str,
    as_json: bool,
    read: Callable[[str], object],
) -> None:
    """Print a bundled YAML file, or a table of all with the first sentence of each."""
    from ropepatch.files import json_text
    from ropepatch.settings import find_shipped, read_yaml, shipped_names

    known = shipped_names(folder)
    names = [name] if name else known
    files = {name: find_shipped(name, folder, what) for name in names}
    if name and name not in known:
        read(name)
    if as_json:
        content = [{what: name} | read_yaml(file, what) for name, file in files.items()]
        print(json_text(content))
    elif name:
        file = files[name]
        schema = f"{what}.schema.json"  # which is not next to a copy
        there = file.with_name(schema).resolve()
        text = file.read_text(encoding="utf-8")
        print(text.replace(f"$schema={schema}", f"$schema={there}"), end="")
    else:
        rows = [(name, first_sentence(file)) for name, file in files.items()]
        print_table((what, does), rows)


def first_sentence(file: Path) -> str:
    """The first sentence of a file, below the line with its schema."""
    lines = file.read_text(encoding="utf-8").splitlines()[1:]
    comment = re.match(r"(?:# .*\n)+", "\n".join(lines) + "\n")
    text = " ".join(comment[0].replace("\n# ", " ")[2:].split()) if comment else ""
    return text.split("  ropepatch ")[0].partition(". ")[0].removesuffix(".")
