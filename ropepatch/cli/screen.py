"""How commands print results and progress."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from ropepatch.errors import printable_lines
from ropepatch.progress import bar, no_bar, say_on_stderr, warn_on_stderr


def command_line() -> str:
    """The command line that the user typed."""
    return shlex.join(["ropepatch", *sys.argv[1:]])


def feedback(quiet: bool) -> dict[str, Any]:
    """The progress arguments of a command for the public functions."""
    return (
        {"say": warn_on_stderr, "progress": no_bar}
        if quiet
        else {"say": say_on_stderr, "progress": bar}
    )


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows below headers; cells too long for the screen are wrapped."""
    from rich.console import Console

    from ropepatch.columns import PLAIN, columns

    # Users copy names
    Console(**PLAIN).print(columns(rows, headers, whole=[0]))


def screen_width() -> int | None:
    """The characters of a line of the terminal; None if stdout is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_text(text: str) -> None:
    """Print lines, escaped; on a screen, long ones are wrapped between words and indented."""
    import textwrap

    width = screen_width()
    for line in printable_lines(text).split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        print(
            line
            if width is None
            else textwrap.fill(
                line, width, subsequent_indent=indent, break_on_hyphens=False
            )
        )


def paragraphs(docstring: str) -> str:
    """A docstring with each paragraph on one line; indented lines stay as they are."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", docstring)
