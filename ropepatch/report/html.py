"""Tables in HTML."""

from __future__ import annotations

from html import escape

from ropepatch.evaluation.table import Cell, Table


def html_table(table: Table) -> str:
    """A table in a box that scrolls, its caption above it; cells carry what they are sorted by."""
    heads = [
        f'<th scope="col"{_kind(k, table)}>{_text(name, detail)}</th>'
        for k, (name, detail) in enumerate(table.heads)
    ]
    rows = ["".join(_cell(cell, k, table) for k, cell in enumerate(row)) for row in table.rows]
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    caption = _escaped(table.caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}">\n<table>\n'
        f"<caption>{caption}</caption>\n<thead>\n<tr>{''.join(heads)}</tr>\n</thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _cell(cell: Cell, place: int, table: Table) -> str:
    value = "" if cell.value is None else f' data-value="{_escaped(str(cell.value))}"'
    text = _text(cell.text, cell.detail)
    if place < table.labels:
        return f'<th scope="row"{_kind(place, table)}{value}>{text}</th>'
    best = ' class="best"' if cell.best else ""
    return f"<td{best}{value}>{text}</td>"


def _kind(place: int, table: Table) -> str:
    return ' class="label"' if place < table.labels else ""


def _text(text: str, detail: str) -> str:
    return _escaped(text) + (f"<small>{_escaped(detail)}</small>" if detail else "")


def _escaped(text: str) -> str:
    """Text that means itself, in which no line begins with a percent sign."""
    return escape(text).replace(" %", "\u00a0%")
