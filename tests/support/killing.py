"""Commands that are killed at chosen events, and the checks afterwards.

A command runs in a fork of a process that has imported the heavy modules. Changes on disk, optimiser steps
and requests to a Hub are counted. At a number drawn from a seed the command kills itself, or the kernel kills
it in the middle of a file, independently of any clock.
"""

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from checkpoint_folders import contents, write_checkpoint
from hub_server import Hub, serving, speak_to
from run_recipes import ask_little, small_recipe, write_recipe, write_recipe_and_suite

import ropepatch
from ropepatch.model.checkpoint import READING, TINY
from ropepatch.training.recipe import Data, Distil, Generated, Watch

HEAVY = [  # modules that the fork server imports
    "datasets",
    "transformers.models.llama.modeling_llama",
    "ropepatch.verbs.extend",
    "ropepatch.training.fine_tuning",
    "ropepatch.publishing.hub",
    "ropepatch.data.tiny.tales",
    "ropepatch.report.plots",
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
REPO = "local/pushed"
VOLATILE = {"seconds", "minutes", "date"}
CACHED = re.compile(r"^cache/tokens/[^/]+")  # named after the time of the text
LEFTOVER = re.compile(r"\.[0-9a-f]{8}\.partial(/|$)")  # next to the unfinished output
TRACEBACK = re.compile(
    r"Traceback \(most recent|Exception ignored|Exception in thread|Fatal Python error"
)


class Kill(NamedTuple):
    """When a process dies.

    Args:
        point: The number of the event before which it dies; None for no event.
        torn: The size in bytes at which a file that it writes is cut off and the kernel kills it; None for no
            limit.
    """

    point: int | None = None
    torn: int | None = None


NEVER = Kill()


class Ended(NamedTuple):
    """The exit code of a process, its output, and its events if it was not killed."""

    code: int | None
    said: str
    events: list[str]


# --- in the process that is killed ---------------------------------------------------------------------


class Countdown:
    """Counts the events of this process, and kills it at one of them."""

    def __init__(self, place, point):
        self.place, self.point = f"{place}{os.sep}", point
        self.seen = []

    def audit(self, event, arguments):
        """Count the audit events of the interpreter that change something in the folder."""
        if event not in CHANGES:
            return
        if event == "open":
            _, mode, flags = arguments
            if not flags & WRITES and not set(mode or "") & set("wxa+"):
                return
        paths = [
            os.path.abspath(os.fsdecode(path))  # noqa: PTH100  # no links are followed
            for path in arguments[: CHANGES[event]]
            if isinstance(path, str | bytes | os.PathLike)
        ]
        if any(path.startswith(self.place) for path in paths):
            self.count(f"{event} {Path(paths[0]).name}")

    def count(self, event):
        """Count an event, or kill the process if it is the chosen one."""
        if len(self.seen) == self.point:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.append(event)


def perform(words, place, hub, kill, said):
    """Run the command in its folder, and note its events next to it; the main function of the fork."""
    os.write(said.fileno(), BEGUN)
    for stream in (1, 2):
        os.dup2(said.fileno(), stream)
    said.close()
    sys.stdout, sys.stderr = (open(stream, "w", closefd=False) for stream in (1, 2))  # noqa: SIM115
    os.chdir(place)
    os.environ |= {"ROPEPATCH_CACHE": f"{place}/cache", "TMPDIR": str(place.parent)}
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if kill.torn is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_FSIZE, (kill.torn, resource.RLIM_INFINITY))
    countdown = Countdown(place, kill.point)
    patch = pytest.MonkeyPatch()
    ask_little(patch)
    if hub is not None:
        count_requests(patch, hub, countdown.count)
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda *_: countdown.count("step"))
    sys.argv = ["ropepatch", *words.split()]
    sys.addaudithook(countdown.audit)
    from ropepatch.__main__ import main

    try:
        main()
    finally:
        sys.stdout.flush()
        if kill == NEVER:
            events_of(place).write_text(json.dumps(countdown.seen))


def count_requests(patch, hub, count):
    """Use a Hub at an address, and count the requests and answers."""
    from huggingface_hub import get_session

    speak_to(SimpleNamespace(url=hub), patch)
    client = type(get_session())
    send = client.send

    def counted(*arguments, **options):
        count("request")
        answer = send(*arguments, **options)
        count("answer")
        return answer

    patch.setattr(client, "send", counted)


# --- in the parent process -------------------------------------------------------------------------------


def events_of(place):
    return place.with_name(f"{place.name}.events")


@dataclass(frozen=True)
class Attack:
    """A command that is killed.

    Args:
        words: The command.
        lay_out: Writes the inputs of the command to a folder.
        source: The checkpoint that it reads.
        made: The output: a file that exists only when it is complete, or a folder of such files.
        at_once: Whether the output folder appears with all of its files, except the fingerprint, at once.
        hub: Whether it pushes to a Hub.
    """

    words: str
    lay_out: Callable[[Path], object]
    source: Path
    made: str
    at_once: bool = True
    hub: bool = False

    @contextmanager
    def laid_out(self, place):
        """Yield a Hub, with the inputs of the command in a folder that is removed in the end."""
        place.mkdir(parents=True)
        self.lay_out(place)
        with serving(Hub()) as hub:
            yield hub
        shutil.rmtree(place)

    def run(self, place, hub, kill=NEVER):
        """Run the command until it ends or is killed."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(HEAVY)
        reader, writer = context.Pipe(duplex=False)
        arguments = (self.words, place, hub.url if self.hub else None, kill, writer)
        process = context.Process(target=perform, args=arguments)
        process.start()
        writer.close()
        said = os.read(reader.fileno(), len(BEGUN))
        while block := os.read(reader.fileno(), 1 << 16):
            said += block
        reader.close()
        process.join()
        noted = events_of(place)
        events = json.loads(noted.read_text()) if noted.exists() else []
        return Ended(
            process.exitcode, said.strip(BEGUN).decode(errors="replace"), events
        )

    def is_there(self, found):
        return not found.keys().isdisjoint({self.made, f"{self.made}/"})

    def half_written(self, whole, found):
        """The files of the output that differ from the whole, except records that are still incomplete."""

        def is_part(path):
            try:
                part, content = json.loads(found[path]), json.loads(whole[path])
                return all(
                    value in ({}, content.get(key)) for key, value in part.items()
                )
            except (KeyError, ValueError, AttributeError):
                return False

        needed = self.at_once and self.is_there(found)
        return ", ".join(
            path
            for path in whole
            if f"{path}/".startswith(f"{self.made}/")
            and (path in found or (needed and not path.endswith(READING)))
            and found.get(path) != whole[path]
            and not is_part(path)
        )


def tree(folder):
    """Every file below a folder, also hidden ones, without times and dates; folders end with a slash."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = CACHED.sub("cache/tokens/*", str(path.relative_to(folder)))
        if path.is_dir():
            found[f"{name}/"] = b""
        else:
            found[name] = settled(name, path.read_bytes())
    return found


def settled(name, content):
    """The content of a file without times."""
    if name.endswith(".json"):
        try:
            return json.dumps(without_times(json.loads(content))).encode()
        except ValueError:  # torn
            return content
    return content


def without_times(value):
    if isinstance(value, dict):
        kept = sorted(value.keys() - VOLATILE)
        return {key: without_times(value[key]) for key in kept}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def on_hub(hub):
    """The files of the repository; empty if it does not exist."""
    files = hub.files(REPO) if REPO in hub.models else {}
    return {name: settled(name, content) for name, content in files.items()}


class Reference(NamedTuple):
    """The files of a command that is not killed, its events, its largest file, and what it pushed."""

    tree: dict[str, bytes]
    events: list[str]
    largest: int
    pushed: dict[str, bytes]


def reference_of(attack, place):
    """Run the command to its end.

    Raises:
        AssertionError: If it fails.
    """
    with attack.laid_out(place) as hub:
        before = set(place.rglob("*"))
        ended = attack.run(place, hub)
        assert ended.code == 0, ended.said
        written = {*place.rglob("*")} - before
        largest = max(path.stat().st_size for path in written if path.is_file())
        return Reference(tree(place), ended.events, largest, on_hub(hub))


def kills_of(reference, number, seed):
    """A number of kills, some in the middle of a file, determined by the seed."""
    draw = random.Random(seed)
    for _ in range(number):
        if draw.random() < 0.3:
            yield Kill(torn=int(reference.largest ** draw.random()))
        else:
            yield Kill(draw.randrange(len(reference.events)))


def attempt(attack, place, reference, kill):
    """Kill the command, run it again; return the faults."""
    untouched = contents(attack.source)
    with attack.laid_out(place) as hub:
        killed = attack.run(place, hub, kill)
        left, committed = tree(place), on_hub(hub)
        again = attack.run(place, hub)
        ended = again.code == 0 or (
            attack.is_there(left) and "already exists" in again.said
        )
        kept = {
            path: content
            for path, content in tree(place).items()
            if not LEFTOVER.search(path)
        }
        faults = {
            "not killed": "" if killed.code in KILLED else f"{killed.code}",
            "traceback": killed.said[-1500:] if TRACEBACK.search(killed.said) else "",
            "half-written": attack.half_written(reference.tree, left),
            "half a commit": committed and difference(reference.pushed, committed),
            "no end": "" if ended else again.said[-500:],
            "other end": difference(reference.tree, kept),
            "other push": difference(reference.pushed, on_hub(hub)),
            "sent twice": "" if len(hub.arrived) == len({*hub.arrived}) else "a file",
            "source": "" if contents(attack.source) == untouched else "touched",
        }
    return {fault: words for fault, words in faults.items() if words}


def difference(one, other):
    """The files in which two folders differ; empty if they are equal."""
    paths = sorted({*one, *other})
    return ", ".join(path for path in paths if one.get(path) != other.get(path))


def attacks(folder):
    """The commands that are killed; the folder is for the checkpoints that they read."""
    large = {"hidden_size": 1024, "intermediate_size": 2048}  # 50 MB
    source = write_checkpoint(folder / "source", max_shard_size="20MB", **large)
    small = write_checkpoint(folder / "small")
    made = ropepatch.extend(ropepatch.plan(small, to=256), folder / "made").folder
    extend = f"extend {source} --to 256 --out out"
    train = "train tiny --recipe six.yaml --out out"
    evaluate = "eval tiny --suite suite.yaml --out results"
    return {
        "extend": Attack(extend, lambda place: None, source, "out"),
        "train": Attack(train, write_recipe_and_suite, TINY, "out"),
        "distil": Attack(train, write_distilling_recipe, TINY, "out"),
        "eval": Attack(
            evaluate, write_recipe_and_suite, TINY, "results", at_once=False
        ),
        "push": Attack(
            f"push made {REPO}",
            lambda place: shutil.copytree(made, place / "made"),
            made,
            "made/README.md",
            hub=True,
        ),
    }


def write_distilling_recipe(place):
    """Write `six.yaml` for self-distillation on self-generated text."""
    own = Data(
        sources=(Generated(generated="self"),), windows=(64,), tokens_per_batch=128
    )
    watch = Watch(every=3, windows=1, passkey_trials=0, max_short_loss_increase=0.9)
    write_recipe(place, small_recipe(data=own, distil=Distil(), watch=watch))
