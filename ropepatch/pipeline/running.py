"""What a long call says, and how."""

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
    """Lines on stderr, where a notebook shows them too; of several processes the first alone says them."""
    if is_first():
        sys.stderr.write("".join(f"{printable(line, LONGEST)}\n" for line in text.split("\n")))
        sys.stderr.flush()


def warn_on_stderr(line: str) -> None:
    """A line on stderr if it warns."""
    if line.startswith("warning: "):
        say_on_stderr(line)


@contextmanager
def interruptible(say: Say, kept: Callable[[], str]) -> Iterator[None]:
    """A line on what is kept where the user or SIGTERM ends the block; the innermost block says it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        if not getattr(error, "__notes__", None):
            error.add_note(f"interrupted: {kept()}")
            say(error.__notes__[0])
        raise


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """How a long call speaks.

    Args:
        say: Takes lines that tell how far it is.
        progress: Called with the name of each stage; gives a context manager around a callback that takes how
            much is done and how much there is.
        show: Takes what is found on the way: `print`, or a notebook's `display`.
        command: The command line that asked, for reports.
    """

    say: Say = say_on_stderr
    progress: Progress = bar
    show: Show = lambda outcome: None
    command: str | None = None

    @contextmanager
    def announced(self, name: str) -> Iterator[Advance]:
        """The progress of a stage, and a line that stays."""
        self.say(name)
        with self.progress(name) as advance:
            yield advance
