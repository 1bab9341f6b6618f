"""Kill commands at random times, and check that nothing is lost and the same command resumes.

    python eval/benchmarks/kills.py [--campaigns 180] [--seed 0] [--json FILE]

A campaign kills a command one to three times with SIGKILL, SIGTERM or SIGINT, at random times, and
then runs it once more. The result is compared byte by byte (times excluded) with that of an undisturbed run.
The same command resumes an interrupted benchmark, from the campaigns in its file.
"""

# ruff: noqa: E402  # environment and import path are set before the imports that need them

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import cache
from pathlib import Path
from socketserver import BaseServer
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

from checkpoint_folders import write_checkpoint
from killed_commands import (
    Attack,
    Reference,
    attacks,
    attempt,
    nothing,
    reference_of,
    write_distilling_recipe,
)
from killing import HEAVY, Kill
from reporting import environment, lines
from run_recipes import small_recipe, write_recipe, write_recipe_and_suite

from ropepatch.data.texts import Texts
from ropepatch.files import whole_file
from ropepatch.model.source import TINY
from ropepatch.training.recipe import Data

HEAVY.append("__main__")
BaseServer.handle_error = lambda *_: None  # the Hub, when its client is killed
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
READING = """
to: [2x]
tasks:
  - {task: perplexity, windows: 4, lengths: [64, 128], text: text.txt}
"""
MEASURED = ("evaluation", "evaluation.html")
STORY = "Once upon a time there was a small red fox that lived by the lake number {}. " * 8


def write_text(place: Path) -> None:
    """Write a text, a suite that uses it, and `six.yaml`, a recipe that trains on it."""
    (place / "text.txt").write_text("<|endoftext|>".join(STORY.format(*[n] * 8) for n in range(60)))
    (place / "suite.yaml").write_text(READING)
    own = Data(sources=(Texts(text="text.txt"),), windows=(64,), tokens_per_batch=128)
    write_recipe(place, small_recipe(data=own, to=128))


def commands(folder: Path) -> dict[str, Attack]:
    """The commands to kill, each on tiny and on a random model with sharded weights."""
    shards = write_checkpoint(folder / "shards", by_bytes=True, max_shard_size="30KB")
    known = attacks(folder)
    train, distil = (known[name] for name in ("train", "distil"))
    compare = "compare {} --methods linear,yarn --windows 2 --haystacks 3 --keys 1 --out results"
    tiny = {
        "extend": Attack("extend tiny --to 512 --out out", nothing, TINY, "out"),
        "map": Attack("extend tiny --to 512 --method rerope --out out", nothing, TINY, "out"),
        "reading": Attack("extend tiny --to 512 --reading --out out", nothing, TINY, "out"),
        "extend --eval": Attack(
            "extend tiny --to 512 --eval suite.yaml --out out",
            write_recipe_and_suite,
            TINY,
            "out",
            later=MEASURED,
        ),
        "recipe": train,
        "distil": distil,
        "eval": known["eval"],
        "compare": Attack(f"{compare.format('tiny')} --to 512", nothing, TINY, "results", at_once=False),
        "push": known["push"],
    }
    text = "--text text.txt"
    several = {
        "extend": known["extend"],
        "map": Attack(f"extend {shards} --to 128 --method rerope --out out", nothing, shards, "out"),
        "reading": Attack(f"extend {shards} --to 128 --reading --out out", nothing, shards, "out"),
        "extend --eval": Attack(
            f"extend {shards} --to 128 --eval suite.yaml --out out",
            write_text,
            shards,
            "out",
            later=MEASURED,
        ),
        "recipe": Attack(f"extend {shards} --recipe six.yaml --out out", write_text, shards, "out"),
        "distil": replace(distil, lay_out=write_distilling_recipe),
        "eval": Attack(
            f"eval {shards} --suite suite.yaml --out results", write_text, shards, "results", at_once=False
        ),
        "compare": Attack(
            f"{compare.format(shards)} --to 128 {text}", write_text, shards, "results", at_once=False
        ),
        "push": known["push"],
    }
    return {
        f"{name}, {kind}": one
        for kind, of in (("tiny", tiny), ("shards", several))
        for name, one in of.items()
    }


def drawn(number: int, seed: int, names: list[str]) -> tuple[str, int, list[float]]:
    """The command of a campaign, its signal, and its times as shares of an undisturbed run."""
    draw = random.Random(f"{seed} {number}")
    times = [draw.random() for _ in range(draw.randint(1, 3))]
    return names[number % len(names)], SIGNALS[number // len(names) % len(SIGNALS)], times


def campaign(
    number: int, seed: int, folder: Path, known: dict[str, Attack], undisturbed: Any
) -> dict[str, Any]:
    """Run one campaign; return the command, the number of kills that hit, and the errors."""
    name, sent, times = drawn(number, seed, list(known))
    reference: Reference = undisturbed(name)
    kills = [Kill(None, seconds=reference.seconds * share, signal=sent) for share in times]
    faults, alive = attempt(known[name], folder / f"campaign-{number}", reference, *kills)
    return {
        "number": number,
        "command": name,
        "signal": signal.Signals(sent).name,
        "shares": [round(share, 4) for share in times],
        "alive": alive,
        "faults": faults,
    }


def once(make: Callable[[str], Any]) -> Callable[[str], Any]:
    """Make a value once for each name, also with several threads."""
    locks: dict[str, Lock] = {}
    made = cache(make)

    def get(name: str) -> Any:
        with locks.setdefault(name, Lock()):
            return made(name)

    return get


def table(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The numbers of campaigns, hits and losses by command and signal."""
    for command, sent in sorted({(row["command"], row["signal"]) for row in rows}):
        own = [row for row in rows if (row["command"], row["signal"]) == (command, sent)]
        yield {
            "command": command,
            "signal": sent,
            "tried": len(own),
            "hit_alive": sum(row["alive"] > 0 for row in own),
            "kills": sum(len(row["shares"]) for row in own),
            "lost": sum(bool(row["faults"]) for row in own),
        }


def earlier(file: Path, seed: int, commit: str | None) -> list[dict[str, Any]]:
    """The campaigns in the file, if it has the same seed and commit."""
    if not file.exists():
        return []
    content = json.loads(file.read_text(encoding="utf-8"))
    is_ours = (content["seed"], content["environment"]["commit"]) == (seed, commit)
    return content["campaigns"] if is_ours else []


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--campaigns", type=int, default=180)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="commands at a time")
    parser.add_argument("--json", type=Path, default=ROOT / "eval" / "results" / "kills.json")
    asked = parser.parse_args()
    here = environment()
    rows = earlier(asked.json, asked.seed, here["commit"])
    done = {row["number"] for row in rows}
    with TemporaryDirectory(prefix="kills-") as place, ThreadPoolExecutor(asked.workers) as pool:
        known = commands(Path(place))
        undisturbed = once(
            lambda name: reference_of(known[name], Path(place) / f"reference of {name}".replace(" ", "-"))
        )
        waiting = [
            pool.submit(campaign, number, asked.seed, Path(place), known, undisturbed)
            for number in range(asked.campaigns)
            if number not in done
        ]
        for future in as_completed(waiting):
            if future.exception():
                pool.shutdown(cancel_futures=True)
            rows = sorted([*rows, row := future.result()], key=lambda row: row["number"])
            print(
                f"{len(rows)}/{asked.campaigns} {row['command']}, {row['signal']}: {row['faults'] or 'whole'}"
            )
            lost = sum(bool(row["faults"]) for row in rows)
            result = {
                "benchmark": "kills",
                "seed": asked.seed,
                "tried": len(rows),
                "hit_alive": sum(row["alive"] > 0 for row in rows),
                "lost": lost,
                "table": [*table(rows)],
                "campaigns": rows,
                "environment": here,
            }
            with whole_file(asked.json) as partial:
                partial.write_text(lines(result), encoding="utf-8")
    print(f"{'command':<24}{'signal':<10}{'tried':>6}{'hit alive':>11}{'lost':>6}")
    for row in table(rows):
        print(
            f"{row['command']:<24}{row['signal']:<10}{row['tried']:>6}{row['hit_alive']:>11}{row['lost']:>6}"
        )
    return int(any(row["faults"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
