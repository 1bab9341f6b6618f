"""`python recipes/tiny/pretrain.py RECIPE --out RUN`: train the bundled checkpoint anew."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from pretraining import pretrain
from pretraining_recipe import read_recipe

from ropepatch.errors import RopepatchError


def main(
    recipe: Annotated[Path, typer.Argument(help="recipes/tiny/pretrain.yaml")],
    out: Annotated[Path, typer.Option(help="A folder for checkpoints; a run found there is resumed.")],
) -> None:
    """Train the bundled checkpoint, and print the folder that holds it."""
    try:
        print(pretrain(read_recipe(recipe), out))
    except RopepatchError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    typer.run(main)
