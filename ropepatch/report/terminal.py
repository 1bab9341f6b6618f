"""Tables in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ropepatch.evaluation.comparisons import Comparison, comparisons
from ropepatch.evaluation.ranking import RULE, Ranking
from ropepatch.evaluation.results import Result
from ropepatch.evaluation.table import Table, aligned
from ropepatch.evaluation.tasks import task_of
from ropepatch.report.tables import ranking_table

FRONT = (
    "On the Pareto front of loss, short-range loss and passkeys, if the model can find them: no other is as "
    "good in all and better in one."
)


def print_results(results: Sequence[Result]) -> None:
    """A table for every task, model and target; the scalings are its columns."""
    sys.stdout.write("\n\n".join(map(_comparison_text, comparisons(results))) + "\n")


def print_ranking(ranking: Ranking, results: Sequence[Result], *, on_stderr: bool = False) -> None:
    """The scalings with their intervals, who is on the Pareto front, and the advice.

    Args:
        ranking: The ranking of the results.
        results: What was measured; the floor of the text, if it is known, is the last row.
        on_stderr: Print there.
    """
    table = table_text(ranking_table(ranking, results))
    lines = [table, "", f"* {FRONT}", f"Rule: {RULE}", "", *ranking.advice]
    (sys.stderr if on_stderr else sys.stdout).write("\n".join(lines) + "\n")


def table_text(table: Table) -> str:
    """A table as lines of text; no cell is cut, however narrow the terminal is."""
    heads = [" ".join(filter(None, head)) for head in table.heads]
    return aligned([heads, *([cell.line for cell in row] for row in table.rows)], left=table.labels)


def _comparison_text(comparison: Comparison) -> str:
    """What was measured, and its tables below each other in the same columns."""
    task = task_of(comparison.task)
    tables = [table.with_methods_across() for table in task.short_tables(comparison)]
    names = list(comparison.named())
    rows = [["", *names]]
    for table in tables:
        rows.append([table.caption, *[""] * len(names)])
        methods = [name for name, _ in table.heads[table.labels :]]
        for row in table.rows:
            label = " ".join(cell.text for cell in row[: table.labels])
            cells = dict(zip(methods, row[table.labels :], strict=True))
            lines = [cells[name].line if name in cells else "" for name in names]
            rows.append([f"  {label}", *lines])
    place = f"{comparison.model}, trained on {comparison.trained:,} tokens"
    return f"{place}: {task.setup(comparison)}\n{aligned(rows, left=1)}"
