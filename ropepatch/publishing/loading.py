"""The line of Python that loads a checkpoint, for its card and `extend`."""

from __future__ import annotations

import json

from ropepatch.errors import printable


def quoted(text: str) -> str:
    """Return a Python literal in double quotes, with printable characters only."""
    literal = json.dumps(text, ensure_ascii=False)
    return printable(literal, len(literal))


def call(
    function: str, *texts: str, branch: str | None = None, code: bool = False
) -> str:
    """Return a call that loads a checkpoint; with `code` it passes trust_remote_code=True."""
    words = [*map(quoted, texts)]
    words += [f"revision={quoted(branch)}"] if branch else []
    words += ["trust_remote_code=True"] if code else []
    return f"{function}({', '.join(words)})"
