"""Names as others may see them: of a path its last part alone, as the rest is the user's own."""

from __future__ import annotations

import re
import shlex

from ropepatch.model.source import HUB_ID


def shown_name(name: str) -> str:
    """A model or a text as the user named it; a Hub id whole, of a path the last part.

    `owner/name` may also be a folder within a folder: it stays, and tells nothing of the machine.
    """
    if HUB_ID.fullmatch(name):
        return name
    return re.split(r"[/\\]+", name.rstrip("/\\"))[-1] or "/"


def shown_command(command: str) -> str:
    """A command line with the last part of every path."""
    try:
        words = shlex.split(command)
    except ValueError:  # quotes that do not close
        words = command.split()
    return shlex.join(map(_shown_word, words))


def _shown_word(word: str) -> str:
    option, equals, value = word.partition("=")
    if equals and not re.search(r"[/\\]", option):
        return f"{option}={shown_name(value)}"
    return shown_name(word)
