"""How a long call shows that it is alive, in a terminal and in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ropepatch.errors import printable
from ropepatch.processes import is_first

Advance = Callable[[int, int | None], None]  # how much is done, and how much there is, if known
Progress = Callable[[str], AbstractContextManager[Advance]]  # of the name of a stage
Say = Callable[[str], None]
Show = Callable[[Any], None]

LONGEST = 10_000  # characters of a line
WEIGHTS = "weights"  # the stage that copies them: its progress is in bytes


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
def no_bar(name: str) -> Iterator[Advance]:
    """No progress at all."""
    yield lambda done, total: None


@contextmanager
def bar(name: str) -> Iterator[Advance]:
    """A bar on stderr, or in a notebook with ipywidgets, which goes when it is done; else lines alone.

    The bar of `WEIGHTS` counts bytes.
    """
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    columns = rich.Progress.get_default_columns()
    if name == WEIGHTS:
        speed = (rich.TransferSpeedColumn(), rich.TimeRemainingColumn())
        columns = (rich.TextColumn(name), rich.BarColumn(), rich.DownloadColumn(), *speed)
    in_notebook = console.is_jupyter and find_spec("ipywidgets") is not None
    is_seen = is_first() and (in_notebook or sys.stderr.isatty())
    with rich.Progress(*columns, console=console, transient=True, disable=not is_seen) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def interruptible(say: Say, kept: Callable[[], str]) -> Iterator[None]:
    """A line on what is kept where the user interrupts the block; the innermost block says it."""
    try:
        yield
    except KeyboardInterrupt as error:
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
