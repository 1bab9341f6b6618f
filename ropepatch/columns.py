"""Text in columns, laid out by rich."""

from __future__ import annotations

import io
import random
from collections.abc import Collection, Iterable, Sequence
from typing import Any

_state = random.getstate()  # from which rich draws when it is first imported
from rich.console import Console  # noqa: E402  # between taking the state and putting it back
from rich.table import Table as Table  # noqa: E402  # as above

random.setstate(_state)

PLAIN: dict[str, Any] = {"force_jupyter": False, "highlight": False, "markup": False, "emoji": False}
UNFOLDED = 1_000_000  # characters, wider than any line


def columns(
    rows: Iterable[Iterable[str]],
    heads: Sequence[str] = (),
    *,
    right: Collection[int] = (),
    whole: Collection[int] = (),
) -> Table:
    """Rows below heads, if any, in columns to the left but for those to the ``right``.

    Cells that are too long are folded, never cut, and later than others where a column is ``whole``.
    """
    cells = [list(row) for row in rows]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(heads))
    for place in range(max(len(row) for row in ([*heads], *cells))):
        justify: Any = "right" if place in right else "left"
        head = heads[place] if heads else ""
        table.add_column(head, justify=justify, overflow="fold", no_wrap=place in whole)
    for row in cells:
        table.add_row(*row)
    return table


def as_text(parts: Iterable[str | Table], width: int = UNFOLDED) -> str:
    """Lines and columns as plain text; the first line, which may be a path to copy, is never folded."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, **PLAIN)
    for number, part in enumerate(parts):
        console.print(part, soft_wrap=number == 0 and isinstance(part, str))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()
