"""Pieces of Markdown that no name from a file can break."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def plain(text: object) -> str:
    """Text that means itself, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#~$&])", r"\\\1", one_line(text))


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


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells below heads; all of them Markdown already."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def link(text: object, address: str) -> str:
    """Text that leads somewhere."""
    return f"[{plain(text)}]({address})"


def text(value: str) -> str:
    """A text as Python writes it."""
    return json.dumps(value, ensure_ascii=False)


def one_line(text: object) -> str:
    """Text without line breaks and what cannot be printed."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
