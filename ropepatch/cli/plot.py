"""`ropepatch plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """\b
Examples:
  ropepatch plot results/*.json --out figures"""


def plot(
    results: Annotated[list[Path], typer.Argument(metavar="RESULT", help="JSON files of `eval --out`.")],
    out: Annotated[Path, typer.Option(help="The folder to make.")] = Path("figures"),
) -> None:
    """Draw results: loss by length and position, pass keys, and what the scalings do to the frequencies."""
    from ropepatch.evaluation.results import read_result
    from ropepatch.folders import absent, new_folder
    from ropepatch.plots import figures, save_figure

    drawn = figures([read_result(file) for file in results])
    with new_folder(absent(out)) as partial:
        for name, figure in drawn.items():
            save_figure(figure, partial / name)
    print("\n".join(f"{out / name}.png, .svg" for name in drawn))
