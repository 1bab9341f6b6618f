"""Commands that are killed where it hurts, and what must hold afterwards.

A command runs in a fork of a process that has imported all that is heavy. Whatever it changes on the disk,
every step of an optimiser and every request to a Hub is counted; at a number drawn from a seed it kills
itself, or the kernel kills it in the middle of a file. No clock decides anything.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_folders import contents, write_checkpoint
from hub_server import Hub, serving, speak_to
from run_recipes import write_recipe_and_suite

import ropepatch
from ropepatch.model.source import TINY

HEAVY = [  # what the fork server imports, from anywhere
    *("torch", "transformers", "peft", "accelerate", "datasets", "matplotlib.pyplot", "ropepatch.cli"),
    *("transformers.models.llama.modeling_llama", "transformers.trainer", "ropepatch.pipeline.extension"),
    *("ropepatch.training.adaptation", "ropepatch.fitting", "ropepatch.publishing.hub", "safetensors.torch"),
    *("ropepatch.data.tiny.tales", "ropepatch.report.plots"),
]
KILLED = (-signal.SIGKILL, -signal.SIGXFSZ)
CHANGES = {  # audit events of what changes the disk, with the arguments that are paths
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
        point: The number of the event before which it dies; None for none.
        torn: Where a file that it writes would be longer than so many bytes; None for nowhere.
    """

    point: int | None
    torn: int | None = None


@dataclass(frozen=True)
class Ended:
    """How a process ended, what it said, and, of one that was not killed, its events."""

    code: int | None
    said: str
    events: tuple[str, ...] = ()


# --- in the process that is killed ---------------------------------------------------------------------


class Countdown:
    """Counts the events of this process, and ends it at one of them."""

    def __init__(self, place: str, kill: Kill | None) -> None:
        self.place, self.kill = place, kill
        self.seen: list[str] = []

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Of the interpreter's own events those that change something in the place."""
        if event not in CHANGES or (event == "open" and not self.is_writing(*arguments[1:])):
            return
        paths = [path for path in arguments[: CHANGES[event]] if isinstance(path, str | bytes | os.PathLike)]
        named = [os.path.abspath(os.fsdecode(path)) for path in paths]  # noqa: PTH100  # no links are followed
        if any(name.startswith(self.place) for name in named):
            self.count(f"{event} {Path(named[0]).name}")

    @staticmethod
    def is_writing(mode: str | None, flags: int) -> bool:
        return bool(flags & WRITES) or bool(set(mode or "") & set("wxa+"))

    def count(self, event: str) -> None:
        """One more event; the last thing that happens, if it is the one."""
        if self.kill is not None and len(self.seen) == self.kill.point:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.append(event)


def perform(
    words: list[str], place: str, hub: str | None, kill: Kill | None, said: Any, counted: str | None
) -> None:
    """What the fork does: the command, in its place."""
    for stream in (1, 2):
        os.dup2(said.fileno(), stream)
    said.close()
    sys.stdout, sys.stderr = (open(stream, "w", closefd=False) for stream in (1, 2))  # noqa: SIM115
    os.chdir(place)
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
    from ropepatch.cli import main

    try:
        main()
    finally:
        sys.stdout.flush()
        if counted is not None:
            Path(counted).write_text(json.dumps(countdown.seen))


def smaller_work(patch: pytest.MonkeyPatch, hub: str | None, count: Callable[[str], None]) -> None:
    """Less to read for a fit, and the address of a Hub whose requests are counted before and after."""
    for limit, number in {"examples.TALES": 8, "examples.HELD_OUT": 2, "course.MIXTURES": 2}.items():
        patch.setattr(f"ropepatch.fitting.{limit}", number)
    patch.setattr("ropepatch.fitting.course.BATCH_TOKENS", 512)
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


# --- in the process that looks on ------------------------------------------------------------------------


def run(
    words: list[str],
    place: Path,
    *,
    hub: str | None = None,
    kill: Kill | None = None,
    counted: Path | None = None,
) -> Ended:
    """Run a command of ropepatch in a folder, to its end or to its death."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(HEAVY)
    reader, writer = context.Pipe(duplex=False)
    arguments = (words, str(place), hub, kill, writer, counted and str(counted))
    process = context.Process(target=perform, args=arguments)
    process.start()
    writer.close()
    said = b""
    while block := os.read(reader.fileno(), 1 << 16):
        said += block
    reader.close()
    process.join()
    events = json.loads(counted.read_text()) if counted and counted.exists() else ()
    return Ended(process.exitcode, said.decode(errors="replace"), tuple(events))


VOLATILE = {"seconds", "minutes", "date"}


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too, without what a clock says; folders end with a slash."""
    return {
        f"{path.relative_to(folder)}{'/' if path.is_dir() else ''}": b""
        if path.is_dir()
        else settled(path.name, path.read_bytes())
        for path in sorted(folder.rglob("*"))
    }


def settled(name: str, content: bytes) -> bytes:
    """What a file holds, but for times."""
    try:
        return json.dumps(without_times(json.loads(content))).encode() if name.endswith(".json") else content
    except ValueError:  # torn
        return content


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in sorted(value.items()) if key not in VOLATILE}
    return [without_times(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Attack:
    """A command that is killed.

    Args:
        words: The command.
        lay_out: Puts what it needs into a folder.
        source: The checkpoint that it reads.
        made: The file that is there only when it is whole, or a folder of such files.
        at_once: The folder has all of them or is not there.
        hub: It pushes to a Hub.
    """

    words: str
    lay_out: Callable[[Path], object]
    source: Path
    made: str
    at_once: bool = True
    hub: bool = False


@dataclass(frozen=True)
class Reference:
    """What comes of a command that nobody kills.

    Args:
        tree: The files of its folder.
        events: Where it could have died.
        largest: The size of the largest file that it wrote.
        pushed: What the Hub has.
    """

    tree: dict[str, bytes]
    events: tuple[str, ...]
    largest: int
    pushed: dict[str, bytes]


REPO = "local/pushed"


@contextmanager
def laid_out(attack: Attack, place: Path) -> Iterator[Hub]:
    """A folder with what a command needs, which is gone in the end, and a Hub."""
    place.mkdir(parents=True)
    attack.lay_out(place)
    with serving(Hub()) as hub:
        yield hub
    shutil.rmtree(place)


def on_hub(hub: Hub) -> dict[str, bytes]:
    """What users of the repository get; nothing where there is none."""
    return {} if REPO not in hub.models else {name: settled(name, at) for name, at in hub.files(REPO).items()}


def reference_of(attack: Attack, place: Path) -> Reference:
    """Run the command to its end.

    Raises:
        AssertionError: It does not end well.
    """
    events = place.with_name(f"{place.name}.events")
    with laid_out(attack, place) as hub:
        before = set(place.rglob("*"))
        ended = run(attack.words.split(), place, hub=hub.url if attack.hub else None, counted=events)
        assert ended.code == 0, ended.said
        written = [path.stat().st_size for path in {*place.rglob("*")} - before if path.is_file()]
        return Reference(tree(place), ended.events, max(written), on_hub(hub))


def kills_of(reference: Reference, number: int, seed: str) -> Iterator[Kill]:
    """So many deaths, some in the middle of a file; the same ones in every run."""
    draw = random.Random(seed)
    for _ in range(number):
        if draw.random() < 0.3:
            yield Kill(None, int(reference.largest ** draw.random()))
        else:
            yield Kill(draw.randrange(len(reference.events)))


def attempt(attack: Attack, place: Path, reference: Reference, kill: Kill) -> list[str]:
    """Kill the command, give it again, and say what is wrong."""
    untouched = contents(attack.source)
    faults = []
    with laid_out(attack, place) as hub:
        address = hub.url if attack.hub else None
        killed = run(attack.words.split(), place, hub=address, kill=kill)
        if killed.code not in KILLED:
            faults.append(f"it was not killed: {killed.code}, {killed.said[-300:]}")
        left = tree(place)
        if wrong := half_written(attack, reference.tree, left):
            faults.append(f"half-written: {', '.join(wrong)}")
        if on_hub(hub) not in ({}, reference.pushed):
            faults.append(f"half a commit: {difference(reference.pushed, on_hub(hub))}")
        again = run(attack.words.split(), place, hub=address)
        is_there = left.keys() & {attack.made, f"{attack.made}/"} and "already exists" in again.said
        if again.code != 0 and not is_there:
            faults.append(f"the same command ends with {again.code}: {again.said[-500:]}")
        if wrong := difference(reference.tree, tree(place)):
            faults.append(f"it ends otherwise: {wrong}")
        if wrong := difference(reference.pushed, on_hub(hub)):
            faults.append(f"what is pushed is otherwise: {wrong}")
        if len(hub.arrived) != len({*hub.arrived}):
            faults.append("a file was sent twice")
        for name in left:
            if LEFTOVER.search(name) and (place / name).parent.is_dir() and Path(name).name not in again.said:
                faults.append(f"{name} is not spoken of")
    if contents(attack.source) != untouched:
        faults.append("the source was touched")
    return faults


LEFTOVER = re.compile(r"\.[0-9a-f]{8}\.partial/?$")


def half_written(attack: Attack, whole: dict[str, bytes], found: dict[str, bytes]) -> list[str]:
    """Files under their final names that are not as they must be; a record may not know all of it yet."""

    def is_part(path: str) -> bool:
        try:
            part, content = json.loads(found[path]), json.loads(whole[path])
            return all(content.get(key) == value for key, value in part.items())
        except (KeyError, ValueError, AttributeError):
            return False

    made = [path for path in whole if f"{path}/".startswith(f"{attack.made}/")]
    if not attack.at_once or not found.keys() & {attack.made, f"{attack.made}/"}:
        made = [path for path in made if path in found]
    return [path for path in made if found.get(path) != whole[path] and not is_part(path)]


def difference(one: dict[str, bytes], other: dict[str, bytes]) -> str:
    """In which files two folders differ; empty if in none."""
    lost, new = sorted(one.keys() - other.keys()), sorted(other.keys() - one.keys())
    unlike = [path for path in one.keys() & other.keys() if one[path] != other[path]]
    told = {"lost": lost, "new": new, "unlike": sorted(unlike)}
    return "; ".join(f"{kind} {', '.join(paths)}" for kind, paths in told.items() if paths)


def attacks(folder: Path) -> dict[str, Attack]:
    """The commands that are killed.

    Args:
        folder: Where the checkpoints are made that they read.
    """
    large = {"hidden_size": 1024, "intermediate_size": 2048, "max_shard_size": "20MB"}  # 50 MB
    source = write_checkpoint(folder / "source", **large)
    small = write_checkpoint(folder / "small")
    made = ropepatch.extend(ropepatch.plan(small, to=256), folder / "made").folder
    fit = "fit tiny --to 512 --steps 4 --init yarn --out fitted.json"
    evaluate = "eval tiny --suite suite.yaml --out results"
    return {
        "extend": Attack(f"extend {source} --to 256 --out out", nothing, source, "out"),
        "train": Attack("extend tiny --recipe six.yaml --out out", write_recipe_and_suite, TINY, "out"),
        "fit": Attack(fit, nothing, TINY, "fitted.json"),
        "eval": Attack(evaluate, write_recipe_and_suite, TINY, "results", at_once=False),
        "push": Attack(
            f"push made {REPO}",
            lambda place: shutil.copytree(made, place / "made"),
            made,
            "made/README.md",
            hub=True,
        ),
    }


def nothing(place: Path) -> None:
    """For a command that needs nothing in its folder."""
