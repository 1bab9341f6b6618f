"""The exceptions for users, the names of arguments in them, and escaping for the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

MOST = 1000  # characters of a message
LONGEST = 10_000  # characters of a line


def in_python(name: str, value: str = "") -> str:
    """Format an argument in Python syntax: `to`, `to=32k`."""
    return f"`{name}={value}`" if value else f"`{name}`"


_writing: ContextVar[Callable[[str, str], str]] = ContextVar(
    "writing", default=in_python
)


def argument(name: str, value: object = "") -> str:
    """Format an argument in the caller's syntax: `to=32k` in Python, --to 32k on the command line."""
    return _writing.get()(name, str(value))


@contextmanager
def arguments_written(by: Callable[[str, str], str]) -> Iterator[None]:
    """Set how messages format arguments: ``by`` takes a name and a value or an empty string."""
    before = _writing.set(by)
    try:
        yield
    finally:
        _writing.reset(before)


def printable(text: str, most: int = MOST) -> str:
    """Make one line for a terminal: escape control characters, and cut the middle of a long text.

    Args:
        text: Any text, e.g. an error message.
        most: The number of characters to keep.
    """
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def printable_lines(text: str) -> str:
    """Make every line of a text `printable`."""
    return "\n".join(printable(line, LONGEST) for line in text.split("\n"))


def plain(number: float) -> str:
    """Write a number with all digits of its whole part, which `:g` rounds to six."""
    if float(number).is_integer() and abs(number) < 1e15:
        return f"{number:.0f}"
    return f"{number:g}" if abs(number) < 1000 else f"{number:.1f}"


OUT_OF_MEMORY = re.compile(
    r"out of memory|can(?:'t|not) allocate memory|not enough memory|_ALLOC_FAILED",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: in Python, in the system, or in torch on any device."""
    return isinstance(error, MemoryError) or bool(OUT_OF_MEMORY.search(str(error)))


class RopepatchError(Exception):
    """An error the user can fix.

    Args:
        message: One line: what is wrong, got, expected.
        hint: One line: what to type or change.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(printable(message))
        self.hint = printable(hint) if hint else hint
        if hint:
            # Shown by a traceback, for example in a notebook
            self.add_note(f"hint: {self.hint}")


@contextmanager
def requiring(purpose: str, package: str) -> Iterator[None]:
    """Turn a failed import within the block into an error that says what to install.

    Args:
        purpose: What needs the import.
        package: The argument of `pip install`.
    """
    try:
        yield
    except ImportError as error:
        raise RopepatchError(
            f"{purpose} needs {error.name or error}", hint=f'pip install "{package}"'
        ) from error
