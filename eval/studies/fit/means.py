"""The other means of `other_means.py`: what each chooses on some windows, and what it then does on others."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import ropepatch
from ropepatch.attention import make_map
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.intervals import Mean, difference
from ropepatch.fitting.vectors import Vector
from ropepatch.scaling import CustomDivisors, LongRoPESwitch, Scaling, YaRN
from ropepatch.scaling.rope import Frequencies, Rope

ADAPTATION = Path(__file__).parents[2] / "results" / "adaptation.json"
ATTENTION_FACTORS = [round(0.9 + 0.05 * k, 2) for k in range(13)]
RANDOM_POINTS, PATTERN_STEPS, SEED = 20, (0.4, 0.2, 0.1), 0

Within = Callable[[], AbstractContextManager[Any]]  # a model that is changed within a block
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Reading:
    """A model and the windows that it reads.

    Attributes:
        model: The baseline.
        trained: L, in tokens.
        pieces: Token ids of windows, all of one length, each of another document.
    """

    model: Any
    trained: int
    pieces: Sequence[Any]

    @cached_property
    def length(self) -> int:
        """Tokens of a window."""
        return len(self.pieces[0])

    @cached_property
    def base(self) -> LossCurve:
        """The losses through the model's own window, half a window at a time."""
        half = self.trained // 2
        return ropepatch.perplexity(self.model, None, self.pieces, window=self.trained, stride=half)

    def curve(self, within: Within, length: int | None = None) -> LossCurve:
        """The losses in one pass over so many tokens of every window, or all."""
        with within():
            return ropepatch.perplexity(self.model, None, self.pieces, length=length)

    def excess(self, curve: LossCurve, length: int) -> Mean:
        """Nats per token above the base, over the first tokens of every window."""
        return difference(curve.at(length).loss, self.base.at(length).loss)


@dataclass(frozen=True, eq=False)
class Case:
    """A checkpoint at a factor, with windows to choose on and windows to test on."""

    name: str
    factor: int
    model: Any
    rope: Rope
    choosing: Reading
    testing: Reading
    floor: float | None  # the least possible loss on the windows to test on, nats per token, where known

    def scaled(self, scaling: Scaling, length: int | None = None) -> Within:
        """The model with a scaling."""
        return lambda: ropepatch.patch(self.model, scaling, length=length)

    def mapped(self, name: str, settings: Mapping[str, Any]) -> Within:
        """The model with an attention map."""
        return lambda: ropepatch.patch(self.model, name, to=self.testing.length, **settings)

    def cost(self, within: Within) -> float:
        """Nats per token on the windows to choose on."""
        return self.choosing.curve(within).at(self.choosing.length).mean

    def row(self, settings: Mapping[str, Any], within: Within) -> Row:
        """What the windows to test on say."""
        curve = self.testing.curve(within)
        excess = self.testing.excess(curve, self.testing.length)
        return {
            "settings": dict(settings),
            "excess": excess.value,
            "clusters": [list(cluster) for cluster in excess.clusters],
            "short": self.testing.excess(curve, self.testing.trained).value,
        }

    def custom(self, frequencies: Frequencies, attention_factor: float | None = None) -> CustomDivisors:
        """The frequencies as divisors, perhaps with another attention factor."""
        made = Vector.of(frequencies, self.rope).scaling(self.factor)
        if attention_factor is None:
            return made
        return CustomDivisors(factor=made.factor, divisors=made.divisors, attention_factor=attention_factor)

    def target_frequencies(self, method: str) -> Frequencies:
        """Those of a method of the registry at the target."""
        scaling = ropepatch.make_scaling(method, factor=float(self.factor))
        return scaling.frequencies(self.rope, self.testing.length)


def methods() -> list[str]:
    """The methods of the registry that need nothing but the target."""
    return [name for name, method in ropepatch.METHODS.items() if not method.required()]


def published(case: Case, rows: Mapping[str, Row]) -> Row:
    """The best method of the registry."""
    costs = {name: case.cost(case.scaled(case.custom(case.target_frequencies(name)))) for name in methods()}
    best = min(costs, key=lambda name: costs[name])
    settings = {"method": best, "tried": len(costs)}
    return case.row(settings, case.scaled(ropepatch.make_scaling(best, factor=float(case.factor))))


def temperature(case: Case, rows: Mapping[str, Row]) -> Row:
    """The divisors of the best method with another constant attention factor."""
    method = rows["published"]["settings"]["method"]
    frequencies = case.target_frequencies(method)
    made = [case.custom(frequencies, a) for a in (None, *ATTENTION_FACTORS)]
    best = min(made, key=lambda scaling: case.cost(case.scaled(scaling)))
    settings = {"method": method, "attention_factor": best.attention_factor, "tried": len(made)}
    return case.row(settings, case.scaled(best))


def pair(case: Case, rows: Mapping[str, Row]) -> Row:
    """The best method beyond L and unscaled divisors up to L, as `longrope` stores it.

    In one pass over the target it is that method: only texts of at most L tokens gain. The attention factor
    is one for both, so those gain all only where it is 1; unscaled in all, they would lose nothing.
    """
    method = rows["published"]["settings"]["method"]
    long = case.custom(case.target_frequencies(method))
    unscaled = (1.0,) * case.rope.num_pairs
    switch = LongRoPESwitch(
        factor=float(case.factor),
        short_factor=unscaled,
        long_factor=long.divisors,
        attention_factor=long.attention_factor,
    )
    settings = {"method": method, "attention_factor": long.attention_factor}
    row = case.row(settings, case.scaled(switch))
    trained = case.testing.trained
    short = case.testing.curve(case.scaled(switch, trained), trained)
    return row | {"short": case.testing.excess(short, trained).value}


def attention_map(name: str, case: Case, rows: Mapping[str, Row]) -> Row:
    """An attention map, its settings from a small grid."""
    options = list(map_settings(name, case))
    best = min(options, key=lambda settings: case.cost(case.mapped(name, settings)))
    return case.row({**best, "tried": len(options)}, case.mapped(name, best))


def map_settings(name: str, case: Case) -> Iterable[dict[str, Any]]:
    """Windows of a part of L; the other number from the least with which the target stays within L."""
    trained, target = case.testing.trained, case.testing.length
    if name == "rerope":
        yield {"window": trained // 4}
    for window in (trained // 2, trained * 3 // 4):
        if name == "rerope":
            yield {"window": window}
            continue
        least = (target - window) / (trained - window)
        for more in (1, 1.5, 2):
            if name == "leaky-rerope":
                yield {"window": window, "divisor": least * more}
            else:
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

    def frequencies(self, rope: Rope) -> Frequencies:
        """Kept from e^fast rotations within L on, divided by e^scale from e^(fast - width) down."""
        return YaRN(
            factor=max(1.0, math.exp(self.scale)),
            beta_fast=math.exp(self.fast),
            beta_slow=math.exp(self.fast - max(self.width, 0.01)),
            truncate=False,
            attention_factor=math.exp(self.attention),
        ).frequencies(rope)


def search(case: Case, rows: Mapping[str, Row]) -> Row:
    """A grid of ramps and attention factors, random points, then steps from the best while they help.

    It knows nothing of gradients nor of the method that was best.
    """
    scale, draw = math.log(case.factor), random.Random(SEED)
    grid = [
        Point(math.log(fast), math.log(fast / slow), scale, math.log(a))
        for fast in (4, 8, 16, 32)
        for slow in (0.5, 1, 2)
        for a in (1.0, 1.05, 1.1, 1.15, 1.2)
    ]
    around = [
        Point(
            draw.uniform(0, math.log(64)),
            draw.uniform(0.1, 5),
            scale + draw.uniform(-0.5, 1.5),
            draw.uniform(-0.05, 0.3),
        )
        for _ in range(RANDOM_POINTS)
    ]
    known: dict[Point, float] = {}

    def cost(point: Point) -> float:
        if point not in known:
            known[point] = case.cost(case.scaled(case.custom(point.frequencies(case.rope))))
        return known[point]

    best = min((*grid, *around), key=cost)
    for step in PATTERN_STEPS:
        sizes = {"fast": 2 * step, "width": 2 * step, "scale": step, "attention": step / 4}
        moved = True
        while moved:
            near = [
                Point(**(vars(best) | {name: getattr(best, name) + sign * size}))
                for name, size in sizes.items()
                for sign in (-1, 1)
            ]
            better = min(near, key=cost)
            moved = cost(better) < cost(best) - 1e-4
            best = better if moved else best
    made = case.custom(best.frequencies(case.rope))
    settings = {
        "beta_fast": math.exp(best.fast),
        "beta_slow": math.exp(best.fast - max(best.width, 0.01)),
        "scale": max(1.0, math.exp(best.scale)),
        "attention_factor": made.attention_factor,
        "tried": len(known),
    }
    return case.row(settings, case.scaled(made))


def adaptation(case: Case, rows: Mapping[str, Row]) -> Row | None:
    """The run of `adaptation.py` that ended lowest, on the same held-out tales; None where there is none."""
    if (case.name, case.factor) != ("tiny", 8) or not ADAPTATION.exists():
        return None
    runs = json.loads(ADAPTATION.read_text(encoding="utf-8"))["runs"]
    runs = {name: run for name, run in runs.items() if "nats" in run}
    best = min(runs, key=lambda name: runs[name]["nats"]["0 to 2048"])
    nats, base = runs[best]["nats"], case.testing.base
    return {
        "settings": {"run": best, "steps": runs[best]["steps"], "tokens": runs[best]["tokens"]},
        "excess": nats["0 to 2048"] - base.at(2048).mean,
        "clusters": [],
        "short": nats["0 to 256"] - base.at(256).mean,
    }


MEANS: dict[str, Callable[[Case, Mapping[str, Row]], Row | None]] = {
    "published": published,
    "temperature": temperature,
    "short/long pair": pair,
    "rerope": partial(attention_map, "rerope"),
    "leaky-rerope": partial(attention_map, "leaky-rerope"),
    "self-extend": partial(attention_map, "self-extend"),
    "search": search,
    "adaptation": adaptation,
}
