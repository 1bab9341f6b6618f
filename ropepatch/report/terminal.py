"""Tables in a terminal."""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

from ropepatch.errors import printable
from ropepatch.evaluation.comparisons import Comparison, comparisons
from ropepatch.evaluation.ranking import RULE, Ranking
from ropepatch.evaluation.results import Result
from ropepatch.evaluation.table import Cell, Table, aligned
from ropepatch.report.tables import ranking_table, tables_of
from ropepatch.report.words import setup


def print_results(results: Sequence[Result]) -> None:
    """A table for every task, model and target; the scalings are its columns."""
    width = _width(sys.stdout)
    texts = [_comparison_text(comparison, width) for comparison in comparisons(results)]
    _write("\n\n".join(texts), sys.stdout)


def print_ranking(
    ranking: Ranking, results: Sequence[Result], *, command: str = "", on_stderr: bool = False
) -> None:
    """The scalings with their intervals, the advice, and how both are to be read.

    Args:
        ranking: The ranking of the results.
        results: What was measured; the floor of the text, if it is known, is the last row.
        command: What makes the recommended checkpoint.
        on_stderr: Print there.
    """
    stream = sys.stderr if on_stderr else sys.stdout
    width = _width(stream)
    table = table_text(ranking_table(ranking, results), width)
    advice = [_folded(line, width) for line in ranking.advice]
    warnings = [_folded(f"Warning: {line}", width) for line in ranking.warnings]
    rule = _folded(f"Rule: {RULE}", width)
    _write(
        "\n".join([table, "", *warnings, *advice, *([f"  {command}"] if command else []), "", rule]), stream
    )


def table_text(table: Table, width: int | None = None) -> str:
    """A table as lines of text; no cell is cut, however narrow the terminal is.

    Args:
        table: What is shown.
        width: In characters, beyond which cells are folded; None folds none.
    """
    heads = [Cell(" ".join(filter(None, head))) for head in table.heads]
    return _text([heads, *table.rows], table.labels, width)


def _write(text: str, stream: TextIO) -> None:
    """Print lines, in which names of folders and models may hold what moves a cursor."""
    stream.write("".join(f"{printable(line, len(line))}\n" for line in text.split("\n")))


def _folded(line: str, width: int | None) -> str:
    return line if width is None else textwrap.fill(line, width, break_on_hyphens=False)


def _width(stream: TextIO) -> int | None:
    return shutil.get_terminal_size().columns if stream.isatty() else None


def _text(rows: Sequence[Sequence[Cell]], left: int, width: int | None) -> str:
    """Rows of cells in columns, the details behind the values, or below them where lines are too long."""
    text = aligned([[cell.line for cell in row] for row in rows], left=left)
    if width is None or max(map(len, text.splitlines())) <= width:
        return text
    from rich.console import Console
    from rich.table import Table as Folded

    folded = Folded(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for place in range(len(rows[0])):
        folded.add_column(justify="left" if place < left else "right", overflow="fold")
    for row in rows:
        folded.add_row(*("\n".join(filter(None, [cell.text, cell.detail])) for cell in row))
    file = io.StringIO()
    Console(file=file, force_jupyter=False, highlight=False, markup=False, emoji=False, width=width).print(
        folded
    )
    return "\n".join(map(str.rstrip, file.getvalue().splitlines()))


def _comparison_text(comparison: Comparison, width: int | None) -> str:
    """What was measured, and its tables below each other in the same columns."""
    tables = [table.with_methods_across() for table in tables_of(comparison)]
    names = list(comparison.named())
    rows = [[Cell(""), *map(Cell, names)]]
    for table in tables:
        rows.append([Cell(table.caption), *[Cell("")] * len(names)])
        methods = [name for name, _ in table.heads[table.labels :]]
        for row in table.rows:
            label = " ".join(cell.text for cell in row[: table.labels])
            cells = dict(zip(methods, row[table.labels :], strict=True))
            rows.append([Cell(f"  {label}"), *(cells.get(name, Cell("")) for name in names)])
    place = f"{comparison.model}, {comparison.history}"
    warnings = [f"Warning: {line}" for line in comparison.warnings()]
    return "\n".join([f"{place}: {setup(comparison)}", _text(rows, 1, width), *warnings])
