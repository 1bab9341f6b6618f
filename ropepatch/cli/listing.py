"""What the commands that list something have in common."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

from ropepatch.errors import printable
from ropepatch.pipeline.running import LONGEST

REQUIRED = "required"  # stands for the default of a parameter that has none


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int = 0) -> None:
    """Print rows below headers, or alone where all are empty; cells too long for the screen are folded.

    Args:
        headers: One for each column.
        rows: The cells.
        numbers: So many of the last columns are aligned at the right.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(headers))
    console = Console(force_jupyter=False, highlight=False, markup=False, emoji=False)
    rows = list(rows)
    words = [max(map(len, " ".join(column).split())) for column in zip(headers, *rows, strict=True)]
    fits = sum(words) + 2 * len(words) <= console.width
    for place, header in enumerate(headers):
        right = place >= len(headers) - numbers
        # names and addresses are copied
        whole = place == 0 or (fits and not any(" " in row[place] for row in rows))
        table.add_column(header, overflow="fold", justify="right" if right else "left", no_wrap=whole)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_text(text: str) -> None:
    """Print lines, escaped; on a screen those too long for it are folded between words, and indented."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in (printable(line, LONGEST) for line in text.split("\n")):
        if width is None or len(line) <= width:
            print(line)
            continue
        margin, label = re.findall(r"^( *)(\S+ {2,})?", line)[0]
        indent = " " * (len(margin + label) + 4 * bool(margin and not label))
        print(textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False))


def paragraphs(docstring: str) -> str:
    """A docstring with each paragraph, and each argument, on a line of its own."""
    lines: list[str] = []
    for line in docstring.splitlines():
        before = lines[-1] if lines else ""
        depth, above = (len(one) - len(one.lstrip()) for one in (line, before))
        goes_on = line and before and not before.endswith(":") and (depth > above or depth == above == 0)
        if goes_on:
            lines[-1] += f" {line.lstrip()}"
        else:
            lines.append(line)
    return "\n".join(lines)
