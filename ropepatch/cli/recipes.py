"""`ropepatch recipes`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropepatch.cli.arguments import AsJson, a_recipe, complete
from ropepatch.cli.catalogue import Entry, entries
from ropepatch.cli.descriptions import describe_recipe
from ropepatch.cli.listing import print_table, print_text
from ropepatch.errors import RopepatchError
from ropepatch.files import json_text, whole_file

EXAMPLES = """\b
Examples:
  ropepatch recipes
  ropepatch recipes llama2-7b-yarn-32k
  ropepatch recipes llama2-7b-yarn-32k --copy mine.yaml"""


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="One recipe, or a YAML file.",
            callback=a_recipe,
            autocompletion=complete("recipes"),
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="What --copy writes; NAME.yaml here if not given.")
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy it, to change it.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the recipes that `extend --recipe` trains by, print one, or copy one."""
    from ropepatch.settings import RECIPES, find_shipped

    if copy:
        if name is None:
            raise RopepatchError("--copy needs a recipe", hint="ropepatch recipes NAME --copy")
        _find(name)
        source = find_shipped(name, RECIPES, "recipe")
        _copy(source, file or Path(source.name))
        return
    if file is not None:
        raise RopepatchError(f"{file} without --copy", hint=f"ropepatch recipes {name} --copy {file}")
    chosen = [_find(name)] if name else list(entries("recipes").values())
    if as_json:
        print(json_text(chosen))
    elif name:
        print(find_shipped(name, RECIPES, "recipe").read_text(encoding="utf-8"), end="")
    else:
        _print_table(chosen)


def _find(name: str) -> Entry:
    found: Entry | None = entries("recipes").get(name)
    if found is not None:
        return found
    from ropepatch.training.recipe import read_recipe

    return describe_recipe(name, read_recipe(name))


def _copy(source: Path, file: Path) -> None:
    if file.suffix not in (".yaml", ".yml"):
        raise RopepatchError(f"{file} must end in .yaml", hint="extend --recipe knows a file by that")
    schema = source.with_name("recipe.schema.json").resolve()  # of the copy it does not lie beside
    text = source.read_text(encoding="utf-8").replace(f"$schema={schema.name}", f"$schema={schema}")
    place = file.expanduser()
    try:
        if place.exists() or place.is_symlink():
            raise RopepatchError(
                f"{file} already exists", hint="name another FILE after --copy; nothing is overwritten"
            )
        with whole_file(place) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RopepatchError(f"cannot write {file}: {error.strerror}", hint="name another FILE") from error
    print_text(f"{file}: change it, then ropepatch extend MODEL --recipe {file}")


def _print_table(recipes: list[Entry]) -> None:
    from ropepatch.settings import short_length

    rows = [
        (
            one["recipe"],
            f"{short_length(one['from'])} to {short_length(one['to'])}",
            one["method"],
            f"{one['steps']:,}",
            f"{one['estimate']['tokens'] / 1e6:.1f} M",
            f"{one['estimate']['total_gib']:.1f}",
        )
        for one in recipes
    ]
    headers = ("recipe", "context", "method", "steps", "tokens", "GiB")
    print_table(headers, rows, numbers=4)
    print_text("\nGiB: memory of one GPU, estimated. --json says more; `ropepatch recipes NAME` prints one.")
