"""The processes of one call: their ranks, their shares of the work, and their devices.

Only this module uses the environment of a launcher and torch.distributed.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from ropepatch.errors import RopepatchError

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

# How long the others wait while the first tokenises, merges and saves
PATIENCE = timedelta(days=2)
MOMENT = 0.2  # seconds for the threads of a process group, at the end


def is_first() -> bool:
    """Return whether this process has rank 0 and prints, also before the processes are joined."""
    return os.environ.get("RANK", "0") == "0"


def on_cpu() -> bool:
    """Return whether accelerate must use the CPU, where it does not support FSDP."""
    import torch

    return (
        not torch.accelerator.is_available()
        and os.environ.get("ACCELERATE_USE_FSDP") != "true"
    )


@dataclass(frozen=True)
class Processes:
    """The processes of a call, and which of them this one is.

    Args:
        rank: The rank of this process.
        count: The number of processes.
        device: The device of this process; `auto` lets accelerate use all devices of a machine.
    """

    rank: int = 0
    count: int = 1
    device: str = "cpu"

    @property
    def first(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the items of this process: with n processes, every n-th from its rank on."""
        return items[self.rank :: self.count]

    def deal(
        self,
        items: Sequence[Item],
        work: Callable[[Item], Outcome],
        key: Callable[[Item], str] = str,
    ) -> list[Outcome]:
        """Do ``work`` for every item, each in one process, and return all results in every process.

        An exception in one process ends the call in all. If a process is killed, the others wait for their
        launcher or the time limit of the process group. ``key`` names an item, to check that all processes
        have the same items.
        """
        if self.count == 1:
            return [work(item) for item in items]
        from torch import distributed

        done: list[Outcome] = []
        error: Exception | None = None
        try:
            done = [work(item) for item in self.share(items)]
        except Exception as caught:  # sent to the others, then raised
            error = caught
        names = [key(item) for item in items]
        gathered: list[Any] = [None] * self.count
        distributed.all_gather_object(
            gathered, (names, done, error and f"{type(error).__name__}: {error}")
        )
        if error is not None:
            raise error
        for other, (other_names, _, failure) in enumerate(gathered):
            if failure:
                raise RopepatchError(
                    f"rank {other} failed: {failure}",
                    hint="see the output of that rank",
                )
            if other_names != names:
                raise RopepatchError(
                    f"rank {other} reads other documents than rank {self.rank}",
                    hint="give every rank the same documents in the same order",
                )
        return [
            gathered[index % self.count][1][index // self.count]
            for index in range(len(items))
        ]

    def wait(self) -> None:
        """Wait until all processes reach this point."""
        self.deal([], str)

    def write_once(self, make: Callable[[], Outcome]) -> Outcome:
        """Call ``make`` in the first process and return its result in all; the others wait for it.

        ``make`` must not share work itself.
        """
        self.wait()  # the others may still use what ``make`` changes
        (made,) = self.deal([make], lambda make: make(), lambda make: "")
        return made


ALONE = Processes()  # on the CPU


def join(device: str | None = None) -> Processes:
    """Join the processes that torchrun or accelerate started with this one, if they are not yet joined.

    Args:
        device: The device of this process; None for a GPU, one per process, or else the CPU.
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
            hint="without GPUs it has no FSDP: start them by torchrun",
        )
    if not joined:
        atexit.register(_leave, state)
    rank, count = distributed.get_rank(), distributed.get_world_size()
    return Processes(rank, count, device or str(state.device))


def _leave(state: Any) -> None:
    """Destroy the process group, and let its threads release the tensors of the last exchange.

    Each needs the GIL for that. If Python ends first, such a thread aborts a process that ended normally.
    """
    state.destroy_process_group()
    time.sleep(MOMENT)
