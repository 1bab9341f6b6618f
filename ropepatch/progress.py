"""How far a long call is: callbacks, and a bar in a terminal or a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec

from ropepatch.processes import is_first

Advance = Callable[[int, int | None], None]  # how much is done, and how much there is, if known
Progress = Callable[[str], AbstractContextManager[Advance]]  # of the name of a stage

WEIGHTS = "weights"  # the stage that copies them: its progress is in bytes


@contextmanager
def no_bar(name: str) -> Iterator[Advance]:
    """No progress at all."""
    yield lambda done, total: None


@contextmanager
def bar(name: str) -> Iterator[Advance]:
    """A bar on stderr, or in a notebook with ipywidgets, which goes when it is done.

    The bar of `WEIGHTS` counts bytes. Elsewhere, and in all processes but the first, there is none.
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
def advancing(progress: Advance | bool | None, name: str) -> Iterator[Advance]:
    """The caller's own callback, or that of a bar for True, or one that does nothing."""
    if callable(progress):
        yield progress
        return
    with (bar if progress else no_bar)(name) as advance:
        yield advance


def passes(advance: Advance, sizes: Sequence[int]) -> Iterator[Advance]:
    """A callback for each of several passes of such sizes, which together are done once."""
    before, whole = 0, sum(sizes)
    for size in sizes:

        def in_all(done: int, total: int | None, before: int = before, size: int = size) -> None:
            advance(before + done * size // (total or size), whole)

        yield in_all
        before += size
