"""How much of the loss beyond the trained window other means than learned frequencies remove.

    python eval/studies/fit/other_means.py --json eval/results/other-means.json [--only "tiny 4;tiny 8"]

Excess loss: in one pass over windows of factor x L tokens, less the base model's on the same tokens read
through its own window L, half a window at a time. Where far context helps it is below 0; for tiny, whose
tales have a least possible loss, shares are therefore of what is above that. Settings are chosen on other
texts than those of the rows: stories from the first 70 % of the documents against the last 15 %, tales of
other seeds for tiny. The study resumes from its file.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

import ropepatch
from ropepatch.attention import make_map
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import cut_windows
from ropepatch.data.tiny.tales import Narrator
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.intervals import Mean
from ropepatch.fitting.vectors import Vector
from ropepatch.model.survey import survey
from ropepatch.scaling import CustomDivisors, LongRoPESwitch, Scaling, YaRN
from ropepatch.scaling.rope import Frequencies, Rope
from ropepatch.settings import seed_of

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

import study
from study import STORIES, Row, Rows, cases_parser, chosen, excess

ADAPTATION = Path(__file__).parents[2] / "results" / "adaptation.json"
ATTENTION_FACTORS = [round(0.9 + 0.05 * k, 2) for k in range(13)]
RANDOM_POINTS, PATTERN_STEPS, SEED = 20, (0.4, 0.2, 0.1), 0
TO_CHOOSE = 12 * 1024  # tokens

Change = Scaling | tuple[str, dict[str, Any]]  # a scaling, or an attention map and its settings


@dataclass(frozen=True)
class Case(study.Case):
    """A checkpoint at a factor, with windows to choose on beside those to test on."""

    @cached_property
    def rope(self) -> Rope:
        """The rope before."""
        model = self.loaded[0]
        return survey(model.config.to_dict(), model).rope

    @cached_property
    def choosing(self) -> list[Any]:
        """Token ids of windows, none of a document that is tested on."""
        tokenizer, count = self.loaded[1], TO_CHOOSE // self.target
        if self.name == "tiny":
            narrator = Narrator(tokenizer)
            return [narrator.tale(self.target, seed_of("fit", index)).ids for index in range(count)]
        documents = list(stream_documents(STORIES))
        first = documents[: len(documents) * 7 // 10]
        return [ids for _, ids in cut_windows(tokenizer, first, length=self.target, count=count)]

    @cached_property
    def own(self) -> Row:
        """The losses through the model's own window."""
        return self.through_own_window()

    @cached_property
    def floor(self) -> float | None:
        """The least possible loss on the windows to test on, nats per token, where it is known."""
        if self.name != "tiny":
            return None
        return LossCurve(tuple(-tale.log_probs()[1:] for tale in self.tales)).at(self.target).mean

    def within(self, change: Change, length: int | None = None) -> Any:
        """The model with a change."""
        if isinstance(change, Scaling):
            return ropepatch.patch(self.loaded[0], change, length=length)
        name, settings = change
        return ropepatch.patch(self.loaded[0], name, to=self.target, **settings)

    def cost(self, change: Change) -> float:
        """Nats per token on the windows to choose on."""
        pieces = self.choosing  # read before the model is changed, as L is
        with self.within(change):
            return ropepatch.perplexity(self.loaded[0], None, pieces).at(self.target).mean

    def row(self, settings: Mapping[str, Any], change: Change) -> Row:
        """The excess on the windows to test on."""
        own = self.own  # read before the model is changed, as L is
        with self.within(change):
            read = self.losses(self.loaded[0])
        far = excess(read, own)
        return {
            "settings": dict(settings),
            "excess": far.value,
            "clusters": far.clusters,
            "short": excess(read, own, "short").value,
        }

    def custom(self, frequencies: Frequencies, attention_factor: float | None = None) -> CustomDivisors:
        """The frequencies as divisors, perhaps with another attention factor."""
        made = Vector.of(frequencies, self.rope).scaling(self.factor)
        return (
            made
            if attention_factor is None
            else made.model_copy(update={"attention_factor": attention_factor})
        )

    def at_target(self, method: str) -> Frequencies:
        """Those of a method of the registry at the target."""
        return self.scaling(method).frequencies(self.rope, self.target)

    def scaling(self, method: str) -> Scaling:
        """A method of the registry."""
        return ropepatch.make_scaling(method, factor=float(self.factor))


CASES = (Case("babyllama-361", 4), Case("stories-260k", 4), Case("tiny", 4), Case("tiny", 8))


def published(case: Case, rows: Mapping[str, Row]) -> Row:
    """The best of the methods of the registry that need nothing but the target."""
    names = [name for name, method in ropepatch.METHODS.items() if not method.required()]
    costs = {name: case.cost(case.custom(case.at_target(name))) for name in names}
    best = min(costs, key=costs.__getitem__)
    return case.row({"method": best, "tried": len(costs)}, case.scaling(best))


def temperature(case: Case, rows: Mapping[str, Row]) -> Row:
    """The divisors of the best method with another constant attention factor."""
    method = rows["published"]["settings"]["method"]
    made = [case.custom(case.at_target(method), a) for a in (None, *ATTENTION_FACTORS)]
    best = min(made, key=case.cost)
    settings = {"method": method, "attention_factor": best.attention_factor, "tried": len(made)}
    return case.row(settings, best)


def pair(case: Case, rows: Mapping[str, Row]) -> Row:
    """The best method beyond L and unscaled divisors up to L, as `longrope` stores it.

    In one pass over the target it is that method: only texts of at most L tokens gain. The attention factor
    is one for both, so those gain all only where it is 1; unscaled in all, they would lose nothing.
    """
    method = rows["published"]["settings"]["method"]
    long = case.custom(case.at_target(method))
    switch = LongRoPESwitch(
        factor=float(case.factor),
        short_factor=(1.0,) * case.rope.num_pairs,
        long_factor=long.divisors,
        attention_factor=long.attention_factor,
    )
    row = case.row({"method": method, "attention_factor": long.attention_factor}, switch)
    pieces = [ids for _, ids in case.pieces]
    with case.within(switch, case.trained):
        short = ropepatch.perplexity(case.loaded[0], None, pieces, length=case.trained).at(case.trained).mean
    return row | {"short": short - Mean.of(case.own["short"]).value}


def attention_map(name: str, case: Case, rows: Mapping[str, Row]) -> Row:
    """An attention map, its settings from a small grid."""
    options = list(map_settings(name, case.trained, case.target))
    best = min(options, key=lambda settings: case.cost((name, settings)))
    return case.row({**best, "tried": len(options)}, (name, best))


def map_settings(name: str, trained: int, target: int) -> Iterator[dict[str, Any]]:
    """Windows of a part of L; the other number from the least with which the target stays within L."""
    if name == "rerope":
        yield from ({"window": trained * quarters // 4} for quarters in (1, 2, 3))
        return
    for window in (trained // 2, trained * 3 // 4):
        least = (target - window) / (trained - window)
        for more in (1, 1.5, 2):
            if name == "leaky-rerope":
                yield {"window": window, "divisor": least * more}
                continue
            group = math.ceil(least * more)
            while make_map(name, window=window, group=group).reach(trained) < target:
                group += 1
            yield {"window": window, "group": group}


@dataclass(frozen=True)
class Point:
    """A ramp from pairs that are kept to pairs that are divided, and an attention factor, as logarithms."""

    fast: float
    width: float
    scale: float
    attention: float

    def scaling(self) -> YaRN:
        """Kept from e^fast rotations within L on, divided by e^scale from e^(fast - width) down."""
        return YaRN(
            factor=max(1.0, math.exp(self.scale)),
            beta_fast=math.exp(self.fast),
            beta_slow=math.exp(self.fast - max(self.width, 0.01)),
            truncate=False,
            attention_factor=math.exp(self.attention),
        )


def search(case: Case, rows: Mapping[str, Row]) -> Row:
    """The best ramp that a search without gradients finds; it does not know the method that was best."""

    def made(point: Point) -> CustomDivisors:
        return case.custom(point.scaling().frequencies(case.rope))

    best, tried = searched(lambda point: case.cost(made(point)), case.factor)
    ramp = best.scaling()
    settings = {"beta_fast": ramp.beta_fast, "beta_slow": ramp.beta_slow, "scale": ramp.factor}
    settings |= {"attention_factor": made(best).attention_factor, "tried": tried}
    return case.row(settings, made(best))


def searched(cost: Callable[[Point], float], factor: float) -> tuple[Point, int]:
    """A grid of ramps and attention factors, random points, then steps from the best while they help."""
    scale, draw = math.log(factor), random.Random(SEED)
    points = [
        Point(math.log(fast), math.log(fast / slow), scale, math.log(a))
        for fast in (4, 8, 16, 32)
        for slow in (0.5, 1, 2)
        for a in (1.0, 1.05, 1.1, 1.15, 1.2)
    ]
    for _ in range(RANDOM_POINTS):
        ramp = draw.uniform(0, math.log(64)), draw.uniform(0.1, 5)
        points.append(Point(*ramp, scale + draw.uniform(-0.5, 1.5), draw.uniform(-0.05, 0.3)))
    known: dict[Point, float] = {}

    def known_cost(point: Point) -> float:
        if point not in known:
            known[point] = cost(point)
        return known[point]

    best = min(points, key=known_cost)
    for step in PATTERN_STEPS:
        sizes = {"fast": 2 * step, "width": 2 * step, "scale": step, "attention": step / 4}
        moved = True
        while moved:
            near = [
                Point(**(vars(best) | {name: getattr(best, name) + sign * size}))
                for name, size in sizes.items()
                for sign in (-1, 1)
            ]
            better = min(near, key=known_cost)
            moved = known_cost(better) < known_cost(best) - 1e-4
            best = better if moved else best
    return best, len(known)


def adaptation(case: Case, rows: Mapping[str, Row]) -> Row | None:
    """The run of `adaptation.py` that ended lowest, on the same held-out tales; None where there is none."""
    if (case.name, case.factor) != ("tiny", 8) or not ADAPTATION.exists():
        return None
    runs = json.loads(ADAPTATION.read_text(encoding="utf-8"))["runs"]
    runs = {name: run for name, run in runs.items() if "nats" in run}
    best = min(runs, key=lambda name: runs[name]["nats"]["0 to 2048"])
    nats = runs[best]["nats"]
    return {
        "settings": {"run": best, "steps": runs[best]["steps"], "tokens": runs[best]["tokens"]},
        "excess": nats["0 to 2048"] - Mean.of(case.own["all"]).value,
        "clusters": [],
        "short": nats["0 to 256"] - Mean.of(case.own["short"]).value,
    }


MEANS: dict[str, Callable[[Case, Mapping[str, Row]], Row | None]] = {
    "published": published,
    "temperature": temperature,
    "short/long pair": pair,
    **{name: partial(attention_map, name) for name in ("rerope", "leaky-rerope", "self-extend")},
    "search": search,
    "adaptation": adaptation,
}


def measure(case: Case, rows: Rows) -> None:
    """Add the rows of a case that are not there."""
    for mean, make in MEANS.items():
        found = {row["mean"]: row for row in rows.of(model=case.name, factor=case.factor)}
        if mean in found:
            continue
        began = time.perf_counter()
        row = make(case, found)
        if row is None:
            continue
        base = Mean.of(case.own["all"]).value
        least = 0.0 if case.floor is None else case.floor - base
        row |= {
            "share_of_published": (row["excess"] - least) / (found.get("published", row)["excess"] - least),
            "base": base,
            "floor": case.floor,
            "windows": len(case.pieces),
            "windows_to_choose": len(case.choosing),
            "digest": case.own["digest"],
            "seconds": time.perf_counter() - began,
        }
        rows.add({"model": case.name, "factor": case.factor, "mean": mean} | row, case.loaded[0])
        print(f"{case.name} {case.factor} x {mean}: {row['excess']:.4f}", file=sys.stderr, flush=True)


def main() -> None:
    """Measure what the file does not hold yet, and write it after every row."""
    parser = cases_parser(__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = Rows(arguments.json, "other means")
    for case in chosen(CASES, arguments.only):
        measure(case, rows)


if __name__ == "__main__":
    main()
