"""Progress and interruption of long calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ropepatch.errors import printable
from ropepatch.processes import is_first
from ropepatch.progress import Advance, Progress, bar

Say = Callable[[str], None]
Show = Callable[[Any], None]

LONGEST = 10_000  # characters of a line


def say_on_stderr(text: str) -> None:
    """Write lines to stderr, only from the first of several processes."""
    if is_first():
        sys.stderr.write("".join(f"{printable(line, LONGEST)}\n" for line in text.split("\n")))
        sys.stderr.flush()


def warn_on_stderr(line: str) -> None:
    """Write a line to stderr if it is a warning."""
    if line.startswith("warning: "):
        say_on_stderr(line)


@contextmanager
def interruptible(say: Say, kept: Callable[[], str]) -> Iterator[None]:
    """If the user or SIGTERM interrupts the block, say what is kept; only the innermost block does."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        if not getattr(error, "__notes__", None):
            error.add_note(f"interrupted: {kept()}")
            say(error.__notes__[0])
        raise


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """How a long call reports.

    Args:
        say: A function that takes lines of progress.
        progress: A function of the name of a stage; returns a context manager that yields a callback of
            (done, total).
        show: A function that takes intermediate results: `print`, or a notebook's `display`.
        command: The command line, for reports.
    """

    say: Say = say_on_stderr
    progress: Progress = bar
    show: Show = lambda outcome: None
    command: str | None = None

    @contextmanager
    def announced(self, name: str) -> Iterator[Advance]:
        """The progress of a stage, after a line with its name."""
        self.say(name)
        with self.progress(name) as advance:
            yield advance
