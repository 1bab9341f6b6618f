"""`ropepatch plot`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ropepatch.cli.arguments import METHODS_OPTION, a_length, complete, some_methods, split_names
from ropepatch.cli.listing import print_text
from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLES = """\b
Examples:
  ropepatch plot results --out figures
  ropepatch plot llama-2-7b --to 4x --methods yarn,self-extend"""


def plot(
    results: Annotated[
        list[str],
        typer.Argument(
            metavar="RESULT",
            help="A folder of `eval --out`, or files of it; or a model, with --to.",
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            help="Draw what methods would do to a model for this context, 32k or 4x; nothing is measured.",
            callback=a_length,
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            *METHODS_OPTION,
            help="With --to, repeated or separated by commas; all, or maps; yarn if not given.",
            callback=some_methods,
            autocompletion=complete("methods"),
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder to make.")] = Path("figures"),
) -> None:
    """Draw measured loss by length and position, and retrieval; or what methods do to frequencies."""
    if (methods and to is None) or (to is not None and len(results) > 1):
        raise RopepatchError(
            "--methods needs --to" if to is None else f"--to is for one model, got {len(results)} names",
            hint="ropepatch plot MODEL --to 4x --methods yarn,self-extend",
        )
    from ropepatch.files import absent, new_folder
    from ropepatch.report.plots import save_figure

    drawn = _of_results(results) if to is None else _of_methods(results[0], to, split_names(methods))
    with new_folder(absent(out)) as partial:
        for name, figure in drawn.items():
            save_figure(figure, partial / name)
    print_text("\n".join(f"{out / name}.png, .svg" for name in drawn))


def _of_methods(model: str, to: str, methods: list[str]) -> dict[str, Figure]:
    from ropepatch.pipeline.evaluation import participants
    from ropepatch.report.plots import figures_of_plans

    drawn, _ = participants(model, methods or ["yarn"], to=to)
    return figures_of_plans([plan for _, plan in drawn])


def _of_results(names: list[str]) -> dict[str, Figure]:
    from ropepatch.pipeline.results import read_results
    from ropepatch.report.plots import figures

    measured = [result for name in names for result in read_results(name)]
    try:
        return figures(measured)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RopepatchError(
            f"these results cannot be drawn: {type(error).__name__}: {error}",
            hint="a file of them was changed by hand, or is of another version: measure again",
        ) from error
