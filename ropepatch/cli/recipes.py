"""`ropepatch recipes`."""

from __future__ import annotations

from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropepatch.cli.arguments import AsJson
from ropepatch.cli.listing import print_table
from ropepatch.errors import RopepatchError
from ropepatch.files import json_text

if TYPE_CHECKING:
    from ropepatch.training.recipe import Recipe

EXAMPLES = """\b
Examples:
  ropepatch recipes
  ropepatch recipes llama2-7b-yarn-32k
  ropepatch recipes llama2-7b-yarn-32k --copy mine.yaml"""


def recipes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One recipe, or a YAML file.")] = None,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="What --copy writes; NAME.yaml here if not given.")
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy it, to change it.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the recipes that `extend --recipe` trains by, print one, or copy one.

    Tokens, memory and time are estimates for one GPU. `recipes/README.md` says what each key of a recipe is.
    """
    from ropepatch.training.recipe import read_recipe, recipe_file, recipe_names

    if copy:
        if name is None:
            raise RopepatchError("--copy needs a recipe", hint="ropepatch recipes NAME --copy")
        source = recipe_file(name)
        read_recipe(name)
        _copy(source, file or Path(source.name))
        return
    if file is not None:
        raise RopepatchError(f"{file} without --copy", hint=f"ropepatch recipes {name} --copy {file}")
    chosen = {recipe: read_recipe(recipe) for recipe in ([name] if name else recipe_names())}
    if as_json:
        print(json_text(list(starmap(_described, chosen.items()))))
    elif name:
        print(recipe_file(name).read_text(encoding="utf-8"), end="")
    else:
        _print_table(chosen)


def _copy(source: Path, file: Path) -> None:
    if file.suffix not in (".yaml", ".yml"):
        raise RopepatchError(f"{file} must end in .yaml", hint="extend --recipe knows a file by that")
    schema = source.with_name("recipe.schema.json").resolve()  # of the copy it does not lie beside
    text = source.read_text(encoding="utf-8").replace(f"$schema={schema.name}", f"$schema={schema}")
    try:
        with file.expanduser().open("x", encoding="utf-8") as copied:
            copied.write(text)
    except FileExistsError as error:
        raise RopepatchError(
            f"{file} already exists", hint="name another FILE after --copy; nothing is overwritten"
        ) from error
    except OSError as error:
        raise RopepatchError(f"cannot write {file}: {error.strerror}", hint="name another FILE") from error
    print(f"{file}: change it, then ropepatch extend MODEL --recipe {file}")


def _described(name: str, recipe: Recipe) -> dict[str, Any]:
    from ropepatch.settings import relative_length
    from ropepatch.training.estimates import SHAPES, estimate

    shape = SHAPES.get(recipe.model)
    trained = shape.max_position_embeddings if shape else None
    return {
        "recipe": name,
        "model": recipe.model,
        "from": trained,
        "to": relative_length(recipe.to, trained) if trained else recipe.to,
        "method": recipe.method.label,
        "positions": recipe.positions.model_dump(mode="json"),
        "trained": _trained(recipe),
        "steps": recipe.max_steps,
        "estimate": estimate(recipe, shape).to_dict() if shape else None,
    }


def _trained(recipe: Recipe) -> str:
    lora = recipe.lora
    if lora is None:
        return "all weights"
    parts = {"embeddings": lora.train_embeddings, "norms": lora.train_norms}
    return ", ".join([f"LoRA r {lora.r}", *(part for part, chosen in parts.items() if chosen)])


def _print_table(recipes: dict[str, Recipe]) -> None:
    from ropepatch.settings import short_length

    rows = [
        (
            row["recipe"],
            row["model"],
            f"{short_length(row['from'])} -> {short_length(row['to'])}",
            row["method"],
            row["positions"]["name"],
            f"{row['estimate']['tokens'] / 1e6:.1f} M",
            row["trained"],
        )
        for row in starmap(_described, recipes.items())
    ]
    print_table(("recipe", "model", "context", "method", "positions", "tokens", "trained"), rows, width=140)
