"""Pieces of Markdown that no name from a file can break."""

from __future__ import annotations

import json
import re

from ropepatch.report.printers import markdown_rows as table
from ropepatch.report.printers import one_line, plain

__all__ = ["code", "fenced", "link", "one_line", "plain", "table", "text"]


def code(text: object) -> str:
    """Text between backticks."""
    line = one_line(text)
    ticks = "`" * (_longest_run(line) + 1)
    pad = " " if "`" in line else ""
    return f"{ticks}{pad}{line}{pad}{ticks}"


def fenced(text: str, language: str) -> str:
    """Lines of code."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def link(text: object, address: str) -> str:
    """Text that leads somewhere."""
    return f"[{plain(text)}]({address})"


def text(value: str) -> str:
    """A text as Python writes it."""
    return json.dumps(value, ensure_ascii=False)


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
