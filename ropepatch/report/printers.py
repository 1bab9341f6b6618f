"""Tables as data, and printed three ways: as text, as HTML and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from ropepatch.columns import as_text, columns


class Cell(NamedTuple):
    """One value.

    Args:
        text: Its text.
        detail: A smaller text behind it: an interval.
        value: The sort key in its column; None comes last.
        best: Whether it is the best of its column.
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
    """A table as lines of text, with details behind the values, or below them if lines are too long.

    Args:
        table: The table.
        width: The most characters of a line, beyond which cells are wrapped; None for no limit.
    """
    right = range(table.labels, len(table.heads))
    behind = [[cell.line for cell in row] for row in table.rows]
    text = as_text([columns([table.heads, *behind], right=right)])
    if width is None or max(map(len, text.splitlines())) <= width:
        return text
    below = [
        ["\n".join(filter(None, [cell.text, cell.detail])) for cell in row]
        for row in table.rows
    ]
    return as_text([columns([table.heads, *below], right=right)], width)


def html_table(table: Table) -> str:
    """A table in a scrolling box, with a caption and sort keys."""
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in table.heads)
    lines = []
    for row in table.rows:
        line = ""
        for number, cell in enumerate(row):
            tag = 'th scope="row"' if number < table.labels else "td"
            best = ' class="best"' if cell.best else ""
            value = (
                "" if cell.value is None else f' data-value="{escape(str(cell.value))}"'
            )
            detail = f"<small>{escape(cell.detail)}</small>" if cell.detail else ""
            line += f"<{tag}{best}{value}>{escape(cell.text)}{detail}</{tag[:2]}>"
        lines.append(f"<tr>{line}</tr>\n")
    caption = escape(table.caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}">\n<table>\n'
        f"<caption>{caption}</caption>\n<thead>\n<tr>{heads}</tr>\n</thead>\n"
        f"<tbody>\n{''.join(lines)}</tbody>\n</table>\n</div>"
    )


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
