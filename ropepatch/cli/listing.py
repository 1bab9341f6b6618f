"""What the commands that list something have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

REQUIRED = "required"  # stands for the default of a parameter that has none


def print_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, width: int | None = None, numbers: int = 0
) -> None:
    """Print rows below headers, or alone where all are empty; cells too long for the screen are folded.

    Args:
        headers: One for each column.
        rows: The cells.
        width: Of the screen, in characters; None for what it is.
        numbers: So many of the last columns are aligned at the right.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(headers))
    for place, header in enumerate(headers):
        right = place >= len(headers) - numbers
        first = place == 0  # a name, which is copied
        table.add_column(header, overflow="fold", justify="right" if right else "left", no_wrap=first)
    for row in rows:
        table.add_row(*row)
    Console(force_jupyter=False, highlight=False, markup=False, emoji=False, width=width).print(table)
