"""What a command does while it measures: where, and how it shows that it is alive."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def device() -> str:
    """The GPU, if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr; yields a callback that takes how much is done and how much there is."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
