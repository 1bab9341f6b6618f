"""`ropepatch plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """\b
Examples:
  ropepatch plot results/*.json --out figures
  ropepatch plot encodings --out figures"""

GALLERY = "encodings"


def plot(
    results: Annotated[
        list[str],
        typer.Argument(metavar="RESULT", help="JSON files of `eval --out`, or encodings: the gallery."),
    ],
    out: Annotated[Path, typer.Option(help="The folder to make.")] = Path("figures"),
) -> None:
    """Draw results: loss by length and position, passkeys, and what the scalings do to the frequencies.

    The word encodings draws how position encodings work, without results; a file of that name is ./encodings.
    """
    from ropepatch.errors import RopepatchError
    from ropepatch.evaluation.results import read_result
    from ropepatch.files import absent, new_folder
    from ropepatch.report.plots import figures, save_figure

    files = [Path(name) for name in results if name != GALLERY]
    measured = [read_result(file) for file in files]
    try:
        drawn = figures(measured) if files else {}
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RopepatchError(
            f"these results cannot be drawn: {type(error).__name__}: {error}",
            hint="a file of them was changed by hand, or is of another version: measure again",
        ) from error
    if GALLERY in results:
        from ropepatch.gallery.figures import plot_encoding_gallery

        drawn |= plot_encoding_gallery()
    with new_folder(absent(out)) as partial:
        for name, figure in drawn.items():
            save_figure(figure, partial / name)
    print("\n".join(f"{out / name}.png, .svg" for name in drawn))
