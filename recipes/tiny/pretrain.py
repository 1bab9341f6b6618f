"""`python recipes/tiny/pretrain.py RECIPE --out RUN`: train the bundled checkpoint anew."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, run
from pretraining import pretrain
from pretraining_recipe import read_recipe

from ropepatch.errors import RopepatchError


def main(
    recipe: Annotated[Path, Parameter(help="recipes/tiny/pretrain.yaml")],
    /,
    *,
    out: Annotated[
        Path, Parameter(help="A folder for checkpoints; a run found there is resumed.")
    ],
) -> None:
    """Train the bundled checkpoint, and print its folder."""
    try:
        print(pretrain(read_recipe(recipe), out))
    except RopepatchError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run(main)
