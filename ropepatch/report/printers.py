"""Tables as data, and as text and Markdown; `template.html` has them as HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ropepatch.columns import as_text, columns


class Cell(NamedTuple):
    """One value.

    Args:
        text: Its text.
        detail: A smaller text behind it: an interval.
        value: The sort key in its column; None comes last.
        best: Whether it is the best of its kind.
    """

    text: str
    detail: str = ""
    value: float | str | None = None
    best: bool = False

    @property
    def line(self) -> str:
        """Text and detail on one line."""
        return f"{self.text} ({self.detail})" if self.detail else self.text


MISSING = Cell("–")


class Table(NamedTuple):
    """Cells below heads.

    Args:
        caption: The caption.
        heads: The name of each column.
        rows: The cells by row; the first `labels` of each name the row.
        labels: The number of cells that name a row.
    """

    caption: str
    heads: list[str]
    rows: list[list[Cell]]
    labels: int = 1


def table_text(table: Table, width: int | None = None) -> str:
    """A table below its caption, with details behind the values, or below them if lines are too long.

    Args:
        table: The table.
        width: The most characters of a line, beyond which cells are wrapped; None for no limit.
    """
    right = range(table.labels, len(table.heads))
    lines = [[cell.line for cell in row] for row in table.rows]
    text = as_text([columns(lines, table.heads, right=right)])
    if width is not None and max(map(len, text.splitlines())) > width:
        lines = [
            [cell.line.replace(" (", "\n(", 1) for cell in row] for row in table.rows
        ]
        text = as_text([columns(lines, table.heads, right=right)], width)
    return f"{table.caption}\n{text}"


def markdown_table(table: Table, marked: str | None = None, note: str = "") -> str:
    """A table in Markdown.

    Args:
        table: The table.
        marked: The name of a method that is bold.
        note: Text after that name.
    """
    rows = []
    for row in table.rows:
        name, *cells = (plain(cell.line) for cell in row)
        rows.append([f"**{name}**{note}" if row[0].text == marked else name, *cells])
    return markdown_rows([plain(head) for head in table.heads], rows)


def markdown_rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table from cells and heads that are already Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(text: object) -> str:
    """Text escaped for Markdown, on one line; addresses do not become links."""
    return re.sub(r"([\\`*_{}\[\]<>|#~$&]|:(?=//)|(?<=www)\.)", r"\\\1", one_line(text))


def one_line(text: object) -> str:
    """Text on one line without unprintable characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
