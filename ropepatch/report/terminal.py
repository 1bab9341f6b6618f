"""Results and rankings in a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from ropepatch.errors import printable
from ropepatch.evaluation.comparisons import comparisons
from ropepatch.evaluation.ranking import Ranking
from ropepatch.evaluation.results import Result
from ropepatch.evaluation.tasks import task_of
from ropepatch.report.printers import Table, table_text
from ropepatch.report.tables import ranking_tables, tables_of
from ropepatch.report.verdict import ranking_lines

PROSE = 100  # characters of a line of advice where there is no terminal


def print_results(results: Sequence[Result]) -> None:
    """Print the tables of every task, model and target."""
    _write(results_text(results, _width()))


def results_text(results: Sequence[Result], width: int | None = None) -> str:
    """The text of `print_results`, in lines of at most ``width`` characters."""
    blocks = []
    for group in comparisons(results):
        method = task_of(group.task).method(group.parameters)
        blocks += _folded([f"{group.model}, {group.history}. {method}"], width)
        blocks += [_titled(table, width) for table in tables_of(group)]
        blocks += _folded(
            [f"Warning: {warning}." for warning in group.warnings()], width
        )
    return "\n\n".join(blocks)


def _titled(table: Table, width: int | None) -> str:
    """A table below its caption."""
    return f"{table.caption}\n{table_text(table, width)}"


def print_ranking(
    ranking: Ranking, results: Sequence[Result], *, command: str = ""
) -> None:
    """Print the methods with their intervals, and the verdict.

    Args:
        ranking: The ranking of the results.
        results: The measurements; if they contain the floor of the text, it is the last row.
        command: The command that writes the recommended checkpoint.
    """
    text = ranking_text(ranking, results, _width())
    _write("\n".join([text, *([f"  {command}"] if command else [])]))


def ranking_text(
    ranking: Ranking, results: Sequence[Result], width: int | None = None
) -> str:
    """The text of `print_ranking`, in lines of at most ``width`` characters."""
    tables = [_titled(table, width) for table in ranking_tables(ranking, results)]
    verdict = "\n".join(_folded(ranking_lines(ranking), width or PROSE))
    return "\n\n".join([*tables, verdict])


def _write(text: str) -> None:
    """Print lines, escaped: names of folders and models may contain control characters."""
    sys.stdout.write(
        "".join(f"{printable(line, len(line))}\n" for line in text.split("\n"))
    )


def _folded(lines: Sequence[str], width: int | None) -> list[str]:
    if width is None:
        return [*lines]
    return [
        textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False)
        for line in lines
    ]


def _width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
