"""What every measurement runs with: a bar, the processes that share it, and what an interrupted one kept."""

from __future__ import annotations

import json
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ropepatch.errors import RopepatchError

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Advance = Callable[[int, Any], None]


@contextmanager
def advancing(progress: Advance | bool | None, name: str) -> Iterator[Advance | None]:
    """Takes how much is done and how much there is: the caller's own, a bar, or nothing.

    The bar is on stderr or in the notebook, and goes when it is done.
    """
    if not isinstance(progress, bool) or not progress:
        yield progress or None
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a notebook without ipywidgets has a bar of letters
        tqdm: Any = import_module("tqdm.auto")
    with tqdm.tqdm(desc=name, leave=False) as bar:

        def advance(done: int, total: int | None) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance


class Kept:
    """A folder of what a measurement has done so far, by keys, from which an interrupted one resumes.

    Each process appends lines of JSON to a file of its own; a line that was not written to its end is left
    out. Floats come back as they were. Whoever names the folder guarantees that it belongs to one model and
    one measurement; without one nothing is kept.

    Attributes:
        found: The values that were kept before.
    """

    def __init__(self, folder: Path | None) -> None:
        self.found: dict[Any, Any] = {}
        self._folder, self._name = folder, f"{secrets.token_hex(8)}.jsonl"
        if folder is None:
            return
        with _disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for file in sorted(folder.glob("*.jsonl")):
                for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                    with suppress(ValueError):
                        key, value = json.loads(line)
                        self.found[key] = value

    def write(self, key: int | str, value: Any) -> None:
        """Keep a value."""
        if self._folder is not None:
            with _disk_errors(self._folder):
                # Another process that ended first may have removed it.
                self._folder.mkdir(parents=True, exist_ok=True)
                with (self._folder / self._name).open("a", encoding="utf-8") as file:
                    file.write(f"\n{json.dumps([key, value])}")  # the line before may be half a one


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RopepatchError(
            f"cannot keep results in {folder}: {error}", hint="name a folder you may write to"
        ) from error


def rank_and_ranks(split: bool) -> tuple[int, int]:
    """This process and how many share the work; (0, 1) if it is not split or nobody started others."""
    if split and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def is_first_process() -> bool:
    """Whether this process is the one that prints and writes."""
    return rank_and_ranks(True)[0] == 0


def distribute(
    items: Sequence[Item], work: Callable[[Item], Outcome], *, key: Callable[[Item], str], split: bool
) -> list[Outcome]:
    """``work`` of every item, item i done by rank i mod n, and all of it returned by every rank.

    An exception on one rank ends the call on all of them. A rank that is killed does not say so: the others
    wait until their launcher ends them or the time limit of the process group is over. ``key`` names an item,
    which shows whether all ranks have the same.
    """
    rank, ranks = rank_and_ranks(split)
    if ranks == 1:
        return [work(item) for item in items]
    done: list[Outcome] = []
    error: Exception | None = None
    try:
        done = [work(item) for item in items[rank::ranks]]
    except Exception as caught:  # told to the others, then raised
        error = caught
    names = [key(item) for item in items]
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, (names, done, error and f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    for other, (other_names, _, failure) in enumerate(gathered):
        if failure:
            raise RopepatchError(f"rank {other} failed: {failure}", hint="see the output of that rank")
        if other_names != names:
            raise RopepatchError(
                f"rank {other} reads other documents than rank {rank}",
                hint="give every rank the same documents in the same order",
            )
    return [gathered[index % ranks][1][index // ranks] for index in range(len(items))]
