"""Results as a notebook shows them: as a table, a pandas frame and a figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, overload

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.table import data_frame
from ropepatch.files import json_text
from ropepatch.report import html_table, results_tables
from ropepatch.settings import refuse_unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from ropepatch.evaluation.results import Result

TABLES = ("by_length", "scores")  # what a frame holds if nothing else is asked for


@dataclass(frozen=True)
class Results(Sequence["Result"]):
    """Results that were measured together, in the order in which they came.

    Args:
        results: One for every task, model, target and scaling.
    """

    results: tuple[Result, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Result]: ...
    def __getitem__(self, index: int | slice) -> Result | Sequence[Result]:
        return self.results[index]

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def to_json(self) -> str:
        """All of them as a JSON list."""
        return json_text([asdict(result) for result in self.results])

    def to_pandas(self, table: str | None = None) -> DataFrame:
        """The rows of one table of every result, beside its model, target, task and label.

        Args:
            table: A name from `Result.tables`, such as `by_position`; None for what was read or found at
                every length and for the scores of lm-eval.

        Raises:
            RopepatchError: If pandas is not installed.
        """
        return data_frame(
            {"model": result.model["name"]}
            | {key: getattr(result, key) for key in ("target", "task", "label")}
            | row
            for result in self.results
            for name in (TABLES if table is None else (table,))
            for row in result.tables.get(name, ())
        )

    def plot(self, name: str | None = None) -> Figure:
        """A figure of the results.

        Args:
            name: Such as `perplexity`, `positions` or `passkey`; None for the first that the results allow.

        Raises:
            RopepatchError: If there are no results, no figure of that name, or no matplotlib.
        """
        from ropepatch.report.plots import figures

        drawn = figures(self.results)
        if not drawn:
            raise RopepatchError("no results to draw", hint="measure first: evaluate=SUITE")
        chosen = name or next(iter(drawn))
        refuse_unknown([chosen], drawn, "figure")
        return inline(drawn[chosen])

    def _repr_html_(self) -> str:
        return "".join(map(html_table, results_tables(self.results)))


def inline(figure: Figure) -> Figure:
    """The same figure, which a notebook shows also where nothing has imported pyplot."""
    from io import BytesIO

    def png() -> bytes:
        drawn = BytesIO()
        figure.savefig(drawn, format="png")
        return drawn.getvalue()

    figure._repr_png_ = png  # type: ignore[attr-defined]
    return figure
