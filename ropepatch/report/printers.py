"""Text and tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ropepatch.report.tables import Table


def markdown_table(table: Table, own: str) -> str:
    """A table in Markdown, with the name of the checkpoint's own result in bold."""
    rows = []
    for row in table.rows:
        name, *cells = (plain(cell.line()) for cell in row)
        if row[0].text == own:
            name = f"**{name}** (this checkpoint)"
        rows.append([name, *cells])
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
