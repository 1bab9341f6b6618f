"""The line of Python that loads a checkpoint: one writer for its card, for `extend` and for `push`."""

from __future__ import annotations

import json


def quoted(text: str) -> str:
    """A text as a literal of Python in double quotes, of printable characters alone."""
    literal = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in literal)


def call(function: str, *texts: str, branch: str | None = None, code: bool = False) -> str:
    """A call that loads a checkpoint; `code` says that it has a remapping, whose code has to be trusted."""
    words = [*map(quoted, texts)]
    words += [f"revision={quoted(branch)}"] if branch else []
    words += ["trust_remote_code=True"] if code else []
    return f"{function}({', '.join(words)})"


def load_adapter(name: str, *, branch: str | None = None, base: str | None = None, module: str = "") -> str:
    """A call that loads an adapter, whose `base` is named where its record does not say it."""
    folder = call(f"{module}snapshot_download", name, branch=branch) if "/" in name else quoted(name)
    return f"ropepatch.load_adapter({folder}{f', base={quoted(base)}' if base else ''})"
