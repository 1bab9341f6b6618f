"""A ranking in a terminal: the table, the rule and what follows from it."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ropepatch.evaluation.ranking import Ranked, Ranking
    from ropepatch.evaluation.results import Result

FRONT = (
    "On the Pareto front of loss, short-range loss and pass keys, if the model can find them: no other is as "
    "good in all and better in one."
)
WIDTH = 160  # cells are never cut: a narrow terminal folds lines instead


def print_ranking(ranking: Ranking, results: Sequence[Result], *, on_stderr: bool = False) -> None:
    """The scalings with their intervals, who is on the Pareto front, and the advice.

    Args:
        ranking: Of the results.
        results: What was measured; the floor of the text, if it is known, is the last row.
        on_stderr: Print there.
    """
    from rich.console import Console
    from rich.table import Table

    from ropepatch.evaluation.comparisons import FLOOR
    from ropepatch.evaluation.ranking import RULE

    read = next(result for result in results if result.task == "perplexity")
    to, trained = read.target, read.model["trained"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    whole, inside = ("", f"nats to {to}", "95 %", "behind", "95 %"), (f"nats to {trained}", "price", "95 %")
    for number, head in enumerate((*whole, *inside, f"keys at {to}", "front")):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    for row in ranking.rows:
        table.add_row(*_cells(row, first=row is ranking.rows[0]))
    for result in results:
        if result.label == FLOOR:
            table.add_row(FLOOR, f"{result.tables['by_length'][-1]['nats']:.3f}")
    console = Console(stderr=on_stderr, highlight=False, markup=False, emoji=False, width=WIDTH)
    console.print(table)
    lines = ["", f"* {FRONT}", f"Rule: {RULE}", "", *ranking.advice]
    print("\n".join(lines), file=sys.stderr if on_stderr else sys.stdout)


def _cells(row: Ranked, *, first: bool) -> list[str]:
    behind = ["", ""]
    if not first:
        behind = [f"{row.behind:.3f}", " ".join(["tied"] * row.tied + [_interval(row.behind_interval)])]
    return [
        row.label,
        f"{row.nats:.3f}",
        _interval(row.interval),
        *behind,
        f"{row.inside:.3f}",
        f"{row.price:+.3f}",
        _interval(row.price_interval, sign="+"),
        "" if row.keys is None else f"{row.keys[0]}/{row.keys[1]}",
        "*" * row.front,
    ]


def _interval(interval: tuple[float, float], sign: str = "") -> str:
    low, high = interval
    return f"{low:{sign}.3f} to {high:{sign}.3f}" if math.isfinite(low) else ""
