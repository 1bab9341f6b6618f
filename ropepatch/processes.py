"""The processes that share a call: which one this is, what each of them does, and on which device.

Nobody else reads what a launcher put into the environment, or asks torch.distributed.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from ropepatch.errors import RopepatchError

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

PATIENCE = timedelta(days=2)  # the others wait while the first tokenises, merges and saves


def is_first() -> bool:
    """Whether this is the process that prints, of those that were started together, joined or not."""
    return os.environ.get("RANK", "0") == "0"


def on_cpu() -> bool:
    """Whether accelerate is kept on the CPU, where it has no FSDP."""
    import torch

    return not torch.accelerator.is_available() and os.environ.get("ACCELERATE_USE_FSDP") != "true"


@dataclass(frozen=True)
class Processes:
    """The processes of a call, as one of them sees them.

    Args:
        rank: The number of this one.
        count: How many there are.
        device: Where this one computes; `auto` for all devices of a machine, by accelerate.
    """

    rank: int = 0
    count: int = 1
    device: str = "cpu"

    @property
    def first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Those of the items that this process does: of n processes, number r does every n-th from r on."""
        return items[self.rank :: self.count]

    def deal(
        self, items: Sequence[Item], work: Callable[[Item], Outcome], key: Callable[[Item], str] = str
    ) -> list[Outcome]:
        """``work`` of every item, each done by the process whose share it is in, and returned by all of them.

        An exception in one process ends the call in all of them. A process that is killed does not say so:
        the others wait until their launcher ends them or the time limit of the process group is over. ``key``
        names an item, which shows whether all processes have the same.
        """
        if self.count == 1:
            return [work(item) for item in items]
        from torch import distributed

        done: list[Outcome] = []
        error: Exception | None = None
        try:
            done = [work(item) for item in self.share(items)]
        except Exception as caught:  # told to the others, then raised
            error = caught
        names = [key(item) for item in items]
        gathered: list[Any] = [None] * self.count
        distributed.all_gather_object(gathered, (names, done, error and f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        for other, (other_names, _, failure) in enumerate(gathered):
            if failure:
                raise RopepatchError(f"rank {other} failed: {failure}", hint="see the output of that rank")
            if other_names != names:
                raise RopepatchError(
                    f"rank {other} reads other documents than rank {self.rank}",
                    hint="give every rank the same documents in the same order",
                )
        return [gathered[index % self.count][1][index // self.count] for index in range(len(items))]

    def wait(self) -> None:
        """Wait until all have come here."""
        self.deal([], str)

    def write_once(self, make: Callable[[], Outcome]) -> Outcome:
        """What the first process makes, once all have come here; the others wait for it.

        ``make`` must not deal anything out.
        """
        self.wait()  # what the others have looked at before is not changed under their eyes
        (made,) = self.deal([make], lambda make: make(), lambda make: "")
        return made


ALONE = Processes()  # on the CPU


def join(device: str | None = None) -> Processes:
    """Join the processes that torchrun or accelerate started with this one, if they are not yet joined.

    Args:
        device: Where this one computes; None for a GPU, of several processes one for each, or else the CPU.
    """
    from torch import distributed

    started = int(os.environ.get("WORLD_SIZE", "1"))
    joined = distributed.is_available() and distributed.is_initialized()
    if started == 1 and not joined:
        from ropepatch.model.precision import best_device

        return Processes(device=device or best_device())
    try:
        from accelerate import PartialState

        state = PartialState(cpu=device == "cpu" or on_cpu(), timeout=PATIENCE)
    except (ImportError, ValueError, RuntimeError) as error:
        raise RopepatchError(
            f"{started} processes cannot be joined: {' '.join(str(error).split())[:300]}",
            hint="start them by torchrun or `accelerate launch`",
        ) from error
    if not distributed.is_initialized():
        raise RopepatchError(
            f"accelerate counts {state.num_processes} where {started} processes were started",
            hint="without GPUs it has no FSDP: start them by torchrun, or with DeepSpeed",
        )
    if not joined:
        # Or its threads may abort a process that has ended well.
        atexit.register(state.destroy_process_group)
    rank, count = distributed.get_rank(), distributed.get_world_size()
    return Processes(rank, count, device or str(state.device))
