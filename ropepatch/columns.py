"""Text in columns, laid out by rich, and pandas frames."""

from __future__ import annotations

import io
import random
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ropepatch.errors import requiring

_state = random.getstate()  # rich draws from it when it is first imported
from rich.console import Console as Console  # noqa: E402  # while the random state is saved
from rich.table import Table as Table  # noqa: E402  # as above

random.setstate(_state)

if TYPE_CHECKING:
    from pandas import DataFrame

PLAIN: dict[str, Any] = {
    "force_jupyter": False,
    "highlight": False,
    "markup": False,
    "emoji": False,
}
UNFOLDED = 1_000_000  # characters, wider than any line


def columns(
    rows: Iterable[Iterable[str]],
    heads: Sequence[str] = (),
    *,
    right: Collection[int] = (),
    whole: Collection[int] = (),
) -> Table:
    """A table of rows below heads, if any; columns are left-aligned except those in ``right``.

    Cells that are too long are wrapped, never cut; those of columns in ``whole`` last.
    """
    cells = [list(row) for row in rows]
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(heads)
    )
    for place in range(max(len(row) for row in ([*heads], *cells))):
        justify: Any = "right" if place in right else "left"
        head = heads[place] if heads else ""
        table.add_column(head, justify=justify, overflow="fold", no_wrap=place in whole)
    for row in cells:
        table.add_row(*row)
    return table


def as_text(parts: Iterable[str | Table], width: int = UNFOLDED) -> str:
    """Lines and columns as plain text; the first line, which may be a path to copy, is never wrapped."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, **PLAIN)
    for number, part in enumerate(parts):
        console.print(part, soft_wrap=number == 0 and isinstance(part, str))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()


def data_frame(rows: Iterable[dict[str, Any]]) -> DataFrame:
    """A pandas frame of rows."""
    with requiring("a frame", "pandas"):
        from pandas import DataFrame
    return DataFrame(list(rows))
