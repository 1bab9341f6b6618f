"""One measurement across the processes of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from ropepatch.errors import RopepatchError

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


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
    wait until their launcher ends them or the time limit of the process group is over.

    Args:
        items: The same on every rank.
        work: What is done with an item.
        key: What names an item; shows whether they are the same.
        split: Whether to share the work at all.

    Raises:
        RopepatchError: Another rank failed, or has other items.
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
