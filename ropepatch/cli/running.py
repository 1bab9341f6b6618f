"""What a command does while it measures: where, and how it shows that it is alive."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def device() -> str:
    """The GPU, if there is one; of several processes (`accelerate launch`, torchrun) each has its own."""
    import torch

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        return str(PartialState(cpu=not torch.cuda.is_available()).device)
    return "cuda" if torch.cuda.is_available() else "cpu"


def is_first() -> bool:
    """Whether this is the process that prints, also before torch.distributed knows of the others."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def progress(name: str) -> Iterator[Callable[[int, int | None], None]]:
    """A bar on stderr; yields a callback that takes how much is done and how much there is, if known."""
    from rich.console import Console
    from rich.progress import Progress

    from ropepatch.evaluation.processes import is_first_process

    shown = sys.stderr.isatty() and is_first_process()
    with Progress(console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def bytes_progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr for bytes; yields a callback that takes those done and those in all."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn(name),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
