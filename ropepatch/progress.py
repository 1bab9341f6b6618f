"""Progress of long calls: lines, a bar or a line per minute, and the finished parts of interrupted ones."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from ropepatch.errors import RopepatchError, printable_lines
from ropepatch.processes import Processes, is_first

Item = TypeVar("Item")
Say = Callable[[str], None]  # takes a line of progress
Advance = Callable[[int, int | None], None]  # of (done, total), the total if known
Progress = Callable[[str], AbstractContextManager[Advance]]  # of the name of a stage

WEIGHTS = "weights"  # the stage that copies them, with progress in bytes
EVERY = 60.0  # seconds between two lines without a bar


def silent(line: str) -> None:
    """Discard a line of progress."""


def say_on_stderr(text: str) -> None:
    """Write lines to stderr, only from the first of several processes."""
    if is_first():
        with suppress(OSError):  # the terminal was closed, and the work goes on
            sys.stderr.write(f"{printable_lines(text)}\n")
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


def unseen(done: int, total: int | None) -> None:
    """Show no progress."""


@contextmanager
def no_bar(name: str) -> Iterator[Advance]:
    """Show no progress."""
    yield unseen


@contextmanager
def bar(name: str) -> Iterator[Advance]:
    """Show a progress bar on stderr, or in a notebook with ipywidgets, until the stage is done.

    The bar of `WEIGHTS` counts bytes. Without a terminal the first process shows it once a minute.
    """
    from tqdm.auto import tqdm

    seconds = 0.1 if sys.stderr.isatty() else EVERY
    with tqdm(
        desc=name,
        unit="B" if name == WEIGHTS else " ",
        unit_scale=True,
        leave=False,
        mininterval=seconds,
        delay=seconds,
        disable=not is_first(),
    ) as shown:

        def advance(done: int, total: int | None) -> None:
            shown.total = total
            shown.update(done - shown.n)

        yield advance


@contextmanager
def advancing(progress: Advance | bool | None, name: str) -> Iterator[Advance]:
    """The caller's callback, that of a bar for True, or one that does nothing."""
    if callable(progress):
        yield progress
        return
    with (bar if progress else no_bar)(name) as advance:
        yield advance


def passes(advance: Advance, sizes: Sequence[int]) -> Iterator[Advance]:
    """A callback for each of several passes of these sizes, with progress over all of them."""
    before, whole = 0, sum(sizes)
    for size in sizes:

        def in_all(
            done: int, total: int | None, before: int = before, size: int = size
        ) -> None:
            advance(before + done * size // (total or size), whole)

        yield in_all
        before += size


class Kept:
    """A folder of partial results by key, from which an interrupted measurement resumes.

    Each process appends lines of JSON to its own file; incomplete lines are ignored. Floats are restored
    exactly. The caller guarantees that the folder belongs to one model and one measurement; without a folder
    nothing is kept.

    Attributes:
        found: The values kept by earlier runs.
    """

    def __init__(self, folder: Path | None) -> None:
        self.found: dict[Any, Any] = {}
        self._file = folder and folder / f"{secrets.token_hex(8)}.jsonl"
        if folder is None:
            return
        with _disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for file in sorted(folder.glob("*.jsonl")):
                text = file.read_text(encoding="utf-8", errors="replace")
                for line in text.splitlines():
                    with suppress(ValueError):
                        key, value = json.loads(line)
                        self.found[key] = value

    def write(self, key: str, value: Any) -> None:
        """Keep a value."""
        if self._file is None:
            return
        with _disk_errors(self._file.parent):
            # Another process that finished first may have removed it.
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                # The line before may be incomplete
                file.write(f"\n{json.dumps([key, value], default=_numbers)}")


def _numbers(tensor: Any) -> Any:
    return tensor.tolist()


def deal_resumed(
    processes: Processes,
    items: Sequence[Item],
    work: Callable[[Item], Any],
    *,
    keys: Sequence[str],
    sizes: Sequence[int],
    keep: Path | None,
    advance: Advance,
) -> list[Any]:
    """The values of work for every item, in all processes; those in the folder ``keep`` are not made again.

    Tensors come back from the folder as lists.
    """
    kept, done, total = Kept(keep), 0, sum(processes.share(sizes))

    def once(index: int) -> Any:
        nonlocal done
        value = kept.found.get(keys[index])
        if value is None:
            value = work(items[index])
            kept.write(keys[index], value)
        done += sizes[index]
        advance(done, total)
        return value

    return processes.deal(range(len(items)), once, keys.__getitem__)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RopepatchError(
            f"cannot keep results in {folder}: {error}",
            hint="choose a folder that you can write to",
        ) from error
