"""The line of Python that loads a checkpoint, for its card, `extend` and `push`."""

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


def load_adapter(
    name: str, *, branch: str | None = None, base: str | None = None, module: str = ""
) -> str:
    """Return a call that loads an adapter; `base` is for a base that its record does not name."""
    folder = (
        call(f"{module}snapshot_download", name, branch=branch)
        if "/" in name
        else quoted(name)
    )
    return f"ropepatch.load_adapter({folder}{f', base={quoted(base)}' if base else ''})"
