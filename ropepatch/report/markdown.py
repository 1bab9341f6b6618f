"""Tables in Markdown, in which no name from a file can break a cell."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ropepatch.evaluation.table import Table


def markdown_table(tables: Sequence[Table], marked: str | None = None, note: str = "") -> str:
    """Tables of the same heads and rows as one, the methods side by side, their cells below each other.

    Args:
        tables: At least one.
        marked: The name of a method whose head is bold.
        note: What stands behind that head.
    """
    first, *others = (table.with_methods_across() for table in tables)
    heads = [
        f"**{plain(name)}**{note}" if k >= first.labels and name == marked else plain(name)
        for k, (name, _) in enumerate(first.heads)
    ]
    rows = [
        [
            "<br>".join(plain(cell.line) for cell in (cell, *(table.rows[number][k] for table in others)))
            for k, cell in enumerate(row[first.labels :], start=first.labels)
        ]
        for number, row in enumerate(first.rows)
    ]
    labels = [[plain(cell.text) for cell in row[: first.labels]] for row in first.rows]
    return table(heads, [label + row for label, row in zip(labels, rows, strict=True)])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells below heads; all of them Markdown already."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(text: object) -> str:
    """Text that means itself, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#~$&])", r"\\\1", one_line(text))


def one_line(text: object) -> str:
    """Text without line breaks and what cannot be printed."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
