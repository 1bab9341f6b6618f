"""Results and rankings in a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

from ropepatch.errors import printable
from ropepatch.evaluation.comparisons import Comparison, comparisons
from ropepatch.evaluation.ranking import Ranking
from ropepatch.evaluation.results import Result
from ropepatch.evaluation.table import Cell, Table
from ropepatch.evaluation.tasks import task_of
from ropepatch.report.printers import table_text
from ropepatch.report.tables import ranking_tables, tables_of
from ropepatch.report.verdict import ranking_lines

PROSE = 100  # characters of a line of advice where there is no terminal


def print_results(results: Sequence[Result]) -> None:
    """Print a table for every task, model and target, with a column for each method."""
    _write(results_text(results, _width(sys.stdout)), sys.stdout)


def results_text(results: Sequence[Result], width: int | None = None) -> str:
    """The text of `print_results`, in lines of at most ``width`` characters."""
    blocks = []
    for group in comparisons(results):
        head = f"{group.model}, {group.history}: {_setup(group)}"
        warnings = _folded([f"Warning: {warning}." for warning in group.warnings()], width)
        blocks.append("\n".join([head, table_text(_joined(group), width), *warnings]))
    return "\n\n".join(blocks)


def print_ranking(
    ranking: Ranking, results: Sequence[Result], *, command: str = "", on_stderr: bool = False
) -> None:
    """Print the methods with their intervals, and the verdict.

    Args:
        ranking: The ranking of the results.
        results: The measurements; if they contain the floor of the text, it is the last row.
        command: The command that writes the recommended checkpoint.
        on_stderr: Print on stderr.
    """
    stream = sys.stderr if on_stderr else sys.stdout
    text = ranking_text(ranking, results, _width(stream))
    _write("\n".join([text, *([f"  {command}"] if command else [])]), stream)


def ranking_text(ranking: Ranking, results: Sequence[Result], width: int | None = None) -> str:
    """The text of `print_ranking`, in lines of at most ``width`` characters."""
    tables = [f"{one.caption}\n{table_text(one, width)}\n" for one in ranking_tables(ranking, results)]
    return "\n".join([*tables, *_folded(ranking_lines(ranking), width or PROSE)])


def _joined(comparison: Comparison) -> Table:
    """The tables of a comparison below each other, with a column for each method."""
    names = list(comparison.named())
    rows = []
    for table in (table.with_methods_across() for table in tables_of(comparison)):
        rows.append([Cell(table.caption), *[Cell("")] * len(names)])
        methods = [name for name, _ in table.heads[table.labels :]]
        for row in table.rows:
            label = " ".join(cell.text for cell in row[: table.labels])
            cells = dict(zip(methods, row[table.labels :], strict=True))
            rows.append([Cell(f"  {label}"), *(cells.get(name, Cell("")) for name in names)])
    return Table("", [("", ""), *((name, "") for name in names)], rows)


def _setup(group: Comparison) -> str:
    """The measurement in a few words."""
    of = group.parameters
    if "pieces" in of:
        sliding = f", stride {of['stride']}" if of.get("stride") else ""
        return f"{of['text']}, {of['pieces']} x {of['tokens'] // of['pieces']} tokens{sliding}"
    if "haystacks" in of:
        each = f"{of['keys']} question{'s' * (of['keys'] > 1)} of each kind"
        return f"{of['haystacks']} prompts, {each}: {', '.join(of['kinds'])}"
    return task_of(group.task).title


def _write(text: str, stream: TextIO) -> None:
    """Print lines, escaped: names of folders and models may contain control characters."""
    stream.write("".join(f"{printable(line, len(line))}\n" for line in text.split("\n")))


def _folded(lines: Sequence[str], width: int | None) -> list[str]:
    if width is None:
        return [*lines]
    return [textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False) for line in lines]


def _width(stream: TextIO) -> int | None:
    return shutil.get_terminal_size().columns if stream.isatty() else None
