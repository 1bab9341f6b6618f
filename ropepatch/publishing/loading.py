"""The line of Python that loads a checkpoint, for its card and `extend`."""

from __future__ import annotations

import json


def quoted(text: str) -> str:
    """Return a Python literal in double quotes, with printable characters only."""
    literal = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in literal)


def call(
    function: str, *texts: str, branch: str | None = None, code: bool = False
) -> str:
    """Return a call that loads a checkpoint; with `code` it passes trust_remote_code=True."""
    words = [*map(quoted, texts)]
    words += [f"revision={quoted(branch)}"] if branch else []
    words += ["trust_remote_code=True"] if code else []
    return f"{function}({', '.join(words)})"
