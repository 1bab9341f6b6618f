"""Kill a command at chosen events.

A command runs in a fork of a process that has imported the heavy modules. Changes on disk, optimiser steps
and requests to a Hub are counted. At a number drawn from a seed the command kills itself, or the kernel kills
it in the middle of a file, independently of any clock.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub_server import speak_to
from run_recipes import ask_little

HEAVY = [  # modules that the fork server imports
    *(
        "torch",
        "transformers",
        "peft",
        "accelerate",
        "datasets",
        "matplotlib.pyplot",
        "ropepatch.cli",
    ),
    *(
        "transformers.models.llama.modeling_llama",
        "transformers.trainer",
        "ropepatch.verbs.extend",
    ),
    *(
        "ropepatch.training.fine_tuning",
        "ropepatch.publishing.hub",
        "safetensors.torch",
    ),
    *("ropepatch.data.tiny.tales", "ropepatch.report.plots"),
]
BEGUN = b"\0"  # the first output of a process
KILLED = (-signal.SIGKILL, -signal.SIGXFSZ)
CHANGES = {  # audit events that change the disk, and the number of their arguments that are paths
    "open": 1,
    "os.rename": 2,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.link": 2,
    "os.truncate": 1,
    "shutil.rmtree": 1,
}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Kill:
    """When a process dies.

    Args:
        point: The number of the event before which it dies; None for no event.
        torn: The size in bytes at which a file that it writes is cut off and the kernel kills it; None for no
            limit.
    """

    point: int | None
    torn: int | None = None


@dataclass(frozen=True)
class Ended:
    """The exit code of a process, its output, and its events if it was not killed."""

    code: int | None
    said: str
    events: tuple[str, ...] = ()


# --- in the process that is killed ---------------------------------------------------------------------


class Countdown:
    """Counts the events of this process, and kills it at one of them."""

    def __init__(self, place: str, kill: Kill | None) -> None:
        self.place, self.kill = place, kill
        self.seen: list[str] = []

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count the audit events of the interpreter that change something in the folder."""
        if event not in CHANGES or (
            event == "open" and not self.is_writing(*arguments[1:])
        ):
            return
        paths = [
            path
            for path in arguments[: CHANGES[event]]
            if isinstance(path, str | bytes | os.PathLike)
        ]
        named = [os.path.abspath(os.fsdecode(path)) for path in paths]  # noqa: PTH100  # no links are followed
        if any(name.startswith(self.place) for name in named):
            self.count(f"{event} {Path(named[0]).name}")

    @staticmethod
    def is_writing(mode: str | None, flags: int) -> bool:
        return bool(flags & WRITES) or bool(set(mode or "") & set("wxa+"))

    def count(self, event: str) -> None:
        """Count an event, or kill the process if it is the chosen one."""
        if self.kill is not None and len(self.seen) == self.kill.point:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.append(event)


def perform(
    words: list[str],
    place: str,
    hub: str | None,
    kill: Kill | None,
    said: Any,
    counted: str | None,
) -> None:
    """Run the command in its folder; the main function of the fork."""
    os.write(said.fileno(), BEGUN)
    for stream in (1, 2):
        os.dup2(said.fileno(), stream)
    said.close()
    sys.stdout, sys.stderr = (open(stream, "w", closefd=False) for stream in (1, 2))  # noqa: SIM115
    os.chdir(place)
    os.environ |= {
        "ROPEPATCH_CACHE": f"{place}/cache",
        "TMPDIR": str(Path(place).parent),
    }
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if kill is not None and kill.torn is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_FSIZE, (kill.torn, resource.RLIM_INFINITY))
    countdown = Countdown(f"{place}{os.sep}", kill)
    smaller_work(pytest.MonkeyPatch(), hub, countdown.count)
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda *_: countdown.count("step"))
    sys.argv = ["ropepatch", *words]
    sys.addaudithook(countdown.audit)
    from ropepatch.__main__ import main

    try:
        main()
    finally:
        sys.stdout.flush()
        if counted is not None:
            Path(counted).write_text(json.dumps(countdown.seen))


def smaller_work(
    patch: pytest.MonkeyPatch, hub: str | None, count: Callable[[str], None]
) -> None:
    """Ask few questions in an exam, and use a Hub at an address, whose requests and answers are counted."""
    ask_little(patch)
    if hub is None:
        return
    from huggingface_hub import get_session

    speak_to(SimpleNamespace(url=hub), patch)
    client = type(get_session())
    send = client.send

    def counted(*arguments: Any, **options: Any) -> object:
        count("request")
        answer = send(*arguments, **options)
        count("answer")
        return answer

    patch.setattr(client, "send", counted)


# --- in the parent process -------------------------------------------------------------------------------


def run(
    words: list[str],
    place: Path,
    *,
    hub: str | None = None,
    kill: Kill | None = None,
    counted: Path | None = None,
) -> Ended:
    """Run a command of ropepatch in a folder until it ends or is killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(HEAVY)
    reader, writer = context.Pipe(duplex=False)
    arguments = (words, str(place), hub, kill, writer, counted and str(counted))
    process = context.Process(target=perform, args=arguments)
    process.start()
    writer.close()
    said = os.read(reader.fileno(), len(BEGUN))
    while block := os.read(reader.fileno(), 1 << 16):
        said += block
    reader.close()
    process.join()
    events = json.loads(counted.read_text()) if counted and counted.exists() else ()
    return Ended(
        process.exitcode,
        said.removeprefix(BEGUN).decode(errors="replace"),
        tuple(events),
    )
