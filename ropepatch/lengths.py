"""How lengths are written: 4096, 32k (32 x 1024), 1m; in suites also 4x, four times the trained context."""

from __future__ import annotations

import re

from ropepatch.errors import RopepatchError

Length = int | str  # what `relative_length` takes
UNITS = {"": 1, "k": 1024, "m": 1024**2}


def parse_length(text: str) -> int:
    """Tokens, from `4096`, `32k` or `1m`.

    Raises:
        RopepatchError: If the text is none of these.
    """
    match = re.fullmatch(r"([0-9]{1,12})([kKmM]?)", text.strip())
    if not match or int(match[1]) == 0:
        raise RopepatchError(f"{text!r} is not a length in tokens", hint="write 4096, 32k (32 x 1024) or 1m")
    return int(match[1]) * UNITS[match[2].lower()]


def parse_lengths(text: str) -> list[int]:
    """Lengths separated by commas, ascending and each once."""
    return sorted({parse_length(part) for part in text.split(",")})


def relative_length(text: str | int, trained: int) -> int:
    """Tokens, from what `parse_length` takes or from a multiple of the trained context: `4x`, `1.5x`.

    Raises:
        RopepatchError: If the text is none of these.
    """
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)x", str(text).strip())
    return round(float(match[1]) * trained) if match else parse_length(str(text))


def short_length(tokens: int) -> str:
    """The opposite of `parse_length`: 32768 as 32k."""
    for unit, size in reversed(UNITS.items()):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)
