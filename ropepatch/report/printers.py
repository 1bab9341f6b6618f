"""A table printed three ways: as text, as HTML and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from ropepatch.columns import as_text, columns
from ropepatch.evaluation.table import Cell, Table

# Text


def table_text(table: Table, width: int | None = None) -> str:
    """A table as lines of text, with details behind the values, or below them if lines are too long.

    Args:
        table: The table.
        width: The most characters of a line, beyond which cells are wrapped; None for no limit.
    """
    heads = [Cell(" ".join(filter(None, head))) for head in table.heads]
    rows = [heads, *table.rows]
    right = range(table.labels, len(heads))
    text = as_text([columns([[cell.line for cell in row] for row in rows], right=right)])
    if width is None or max(map(len, text.splitlines())) <= width:
        return text
    below = [["\n".join(filter(None, [cell.text, cell.detail])) for cell in row] for row in rows]
    return as_text([columns(below, right=right)], width)


# HTML


def html_table(table: Table) -> str:
    """A table in a scrolling box, with a caption and sort keys."""

    def cell(scope: str, k: int, text: str, detail: str, attributes: str = "") -> str:
        inner = escaped(text) + (f"<small>{escaped(detail)}</small>" if detail else "")
        if not scope:
            return f"<td{attributes}>{inner}</td>"
        label = ' class="label"' if k < table.labels else ""
        return f'<th scope="{scope}"{label}{attributes}>{inner}</th>'

    lines = ["".join(cell("col", k, *head) for k, head in enumerate(table.heads))]
    for row in table.rows:
        line = ""
        for k, one in enumerate(row):
            scope = "row" if k < table.labels else ""
            attributes = ' class="best"' if one.best and not scope else ""
            attributes += "" if one.value is None else f' data-value="{escaped(str(one.value))}"'
            line += cell(scope, k, one.text, one.detail, attributes)
        lines.append(line)
    heads, *rows = (f"<tr>{line}</tr>" for line in lines)
    body, caption = "\n".join(rows), escaped(table.caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}">\n<table>\n'
        f"<caption>{caption}</caption>\n<thead>\n{heads}\n</thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def escaped(text: str) -> str:
    """Text escaped for HTML, whose lines cannot begin with a percent sign."""
    return escape(text).replace(" %", "\u00a0%")


# Markdown


def markdown_table(table: Table, marked: str | None = None, note: str = "") -> str:
    """A table with the methods side by side.

    Args:
        table: The table.
        marked: The name of a method whose head is bold.
        note: Text after that head.
    """
    across = table.with_methods_across()
    heads = [
        f"**{plain(name)}**{note}" if k >= across.labels and name == marked else plain(name)
        for k, (name, _) in enumerate(across.heads)
    ]
    return markdown_rows(heads, [[plain(cell.line) for cell in row] for row in across.rows])


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
