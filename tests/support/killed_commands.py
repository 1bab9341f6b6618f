"""Commands that are killed, and the checks afterwards."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint_folders import contents, write_checkpoint
from hub_server import Hub, serving
from killing import KILLED, Kill, run
from run_recipes import small_recipe, write_recipe, write_recipe_and_suite

import ropepatch
from ropepatch.model.checkpoint import TINY
from ropepatch.training.recipe import Data, Distil, Generated, Watch

CACHED = re.compile(r"^cache/tokens/[^/]+")
VOLATILE = {"seconds", "minutes", "date"}


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, also hidden ones, without times and dates; folders end with a slash.

    The name of a folder with cached tokens depends on the modification time of the text; it is replaced.
    """
    return {
        f"{CACHED.sub('cache/tokens/*', str(path.relative_to(folder)))}{'/' if path.is_dir() else ''}": b""
        if path.is_dir()
        else settled(path.name, path.read_bytes())
        for path in sorted(folder.rglob("*"))
    }


def settled(name: str, content: bytes) -> bytes:
    """The content of a file without times."""
    try:
        if name.endswith(".html"):
            return re.sub(rb"\d{4}-\d\d-\d\d|<dt>seconds</dt><dd>[^<]*", b"", content)
        return (
            json.dumps(without_times(json.loads(content))).encode()
            if name.endswith(".json")
            else content
        )
    except ValueError:  # torn
        return content


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: without_times(item)
            for key, item in sorted(value.items())
            if key not in VOLATILE
        }
    return [without_times(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Attack:
    """A command that is killed.

    Args:
        words: The command.
        lay_out: Writes the inputs of the command to a folder.
        source: The checkpoint that it reads.
        made: The output: a file that exists only when it is complete, or a folder of such files.
        at_once: Whether the output folder appears with all of its files at once.
        later: The files and folders of the output that the command, or a second run, adds later.
        hub: Whether it pushes to a Hub.
    """

    words: str
    lay_out: Callable[[Path], object]
    source: Path
    made: str
    at_once: bool = True
    hub: bool = False
    later: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reference:
    """The result of a command that is not killed.

    Args:
        tree: The files of its folder.
        events: The events at which it can be killed.
        largest: The size of the largest file that it wrote.
        pushed: The files on the Hub.
    """

    tree: dict[str, bytes]
    events: tuple[str, ...]
    largest: int
    pushed: dict[str, bytes]


REPO = "local/pushed"


@contextmanager
def laid_out(attack: Attack, place: Path) -> Iterator[Hub]:
    """Yield a Hub, with the inputs of a command in a folder that is removed in the end."""
    place.mkdir(parents=True)
    attack.lay_out(place)
    with serving(Hub()) as hub:
        yield hub
    shutil.rmtree(place)


def on_hub(hub: Hub) -> dict[str, bytes]:
    """The files of the repository; empty if it does not exist."""
    return (
        {}
        if REPO not in hub.models
        else {name: settled(name, at) for name, at in hub.files(REPO).items()}
    )


def reference_of(attack: Attack, place: Path) -> Reference:
    """Run the command to its end.

    Raises:
        AssertionError: If it fails.
    """
    events = place.with_name(f"{place.name}.events")
    with laid_out(attack, place) as hub:
        before = set(place.rglob("*"))
        ended = run(
            attack.words.split(),
            place,
            hub=hub.url if attack.hub else None,
            counted=events,
        )
        assert ended.code == 0, ended.said
        written = [
            path.stat().st_size
            for path in {*place.rglob("*")} - before
            if path.is_file()
        ]
        return Reference(tree(place), ended.events, max(written), on_hub(hub))


def kills_of(reference: Reference, number: int, seed: str) -> Iterator[Kill]:
    """A number of kills, some in the middle of a file, determined by the seed."""
    draw = random.Random(seed)
    for _ in range(number):
        if draw.random() < 0.3:
            yield Kill(None, int(reference.largest ** draw.random()))
        else:
            yield Kill(draw.randrange(len(reference.events)))


def attempt(attack: Attack, place: Path, reference: Reference, kill: Kill) -> list[str]:
    """Kill the command, run it again; return the faults."""
    untouched = contents(attack.source)
    faults: list[str] = []
    with laid_out(attack, place) as hub:
        address = hub.url if attack.hub else None
        killed = run(attack.words.split(), place, hub=address, kill=kill)
        left = tree(place)
        if killed.code not in KILLED:
            faults.append(f"it was not killed: {killed.code}, {killed.said[-300:]}")
        if found := TRACEBACK.search(killed.said):
            faults.append(f"a traceback: {killed.said[found.start() :][:1500]}")
        if wrong := half_written(attack, reference.tree, left):
            faults.append(f"half-written: {', '.join(wrong)}")
        if on_hub(hub) not in ({}, reference.pushed):
            faults.append(f"half a commit: {difference(reference.pushed, on_hub(hub))}")
        again = run(attack.words.split(), place, hub=address)
        is_there = (
            left.keys() & {attack.made, f"{attack.made}/"}
            and "already exists" in again.said
        )
        if again.code != 0 and not is_there:
            faults.append(
                f"the same command ends with {again.code}: {again.said[-500:]}"
            )
        kept = {
            path: content
            for path, content in tree(place).items()
            if not LEFTOVER.search(path)
        }
        if wrong := difference(reference.tree, kept):
            faults.append(f"it ends otherwise: {wrong}")
        if wrong := difference(reference.pushed, on_hub(hub)):
            faults.append(f"what is pushed is otherwise: {wrong}")
        if len(hub.arrived) != len({*hub.arrived}):
            faults.append("a file was sent twice")
    if contents(attack.source) != untouched:
        faults.append("the source was touched")
    return faults


LEFTOVER = re.compile(r"\.[0-9a-f]{8}\.partial(/|$)")  # next to the unfinished output
TRACEBACK = re.compile(
    r"Traceback \(most recent|Exception ignored|Exception in thread|Fatal Python error"
)


def half_written(
    attack: Attack, whole: dict[str, bytes], found: dict[str, bytes]
) -> list[str]:
    """The files of the output that differ from the reference, except records that are still incomplete."""

    def is_part(path: str) -> bool:
        try:
            part, content = json.loads(found[path]), json.loads(whole[path])
            return all(value in ({}, content.get(key)) for key, value in part.items())
        except (KeyError, ValueError, AttributeError):
            return False

    made = [path for path in whole if f"{path}/".startswith(f"{attack.made}/")]
    made = [
        path
        for path in made
        if path in found or not {*Path(path).parts} & {*attack.later}
    ]
    if not attack.at_once or not found.keys() & {attack.made, f"{attack.made}/"}:
        made = [path for path in made if path in found]
    return [
        path for path in made if found.get(path) != whole[path] and not is_part(path)
    ]


def difference(one: dict[str, bytes], other: dict[str, bytes]) -> str:
    """The files in which two folders differ; empty if they are equal."""
    lost, new = sorted(one.keys() - other.keys()), sorted(other.keys() - one.keys())
    unlike = [path for path in one.keys() & other.keys() if one[path] != other[path]]
    changes = {"lost": lost, "new": new, "different": sorted(unlike)}
    return "; ".join(
        f"{kind} {', '.join(paths)}" for kind, paths in changes.items() if paths
    )


def attacks(folder: Path) -> dict[str, Attack]:
    """The commands that are killed.

    Args:
        folder: The folder for the checkpoints that they read.
    """
    large = {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "max_shard_size": "20MB",
    }  # 50 MB
    source = write_checkpoint(folder / "source", **large)
    small = write_checkpoint(folder / "small")
    made = ropepatch.extend(ropepatch.plan(small, to=256), folder / "made").folder
    extend = f"extend {source} --to 256 --out out"
    train = "train tiny --recipe six.yaml --out out"
    evaluate = "eval tiny --suite suite.yaml --out results"
    return {
        "extend": Attack(extend, nothing, source, "out", later=("reading.json",)),
        "train": Attack(
            train, write_recipe_and_suite, TINY, "out", later=("reading.json",)
        ),
        "distil": Attack(
            train, write_distilling_recipe, TINY, "out", later=("reading.json",)
        ),
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


def write_distilling_recipe(place: Path) -> None:
    """Write `six.yaml` for self-distillation on self-generated text."""
    own = Data(
        sources=(Generated(generated="self"),), windows=(64,), tokens_per_batch=128
    )
    watch = Watch(every=3, windows=1, passkey_trials=0, max_short_loss_increase=0.9)
    write_recipe(place, small_recipe(data=own, distil=Distil(), watch=watch))


def nothing(place: Path) -> None:
    """For a command that needs nothing in its folder."""
