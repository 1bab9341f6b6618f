"""The course of a fit: many starts, a race of a few, one long descent; the held-out windows decide.

Shapes: P rotary pairs; H held-out windows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ropepatch.errors import RopepatchError
from ropepatch.fitting.descent import Descent, step
from ropepatch.fitting.problem import Problem
from ropepatch.fitting.settings import FitSettings
from ropepatch.fitting.shapes import project
from ropepatch.fitting.starts import mixtures, named, published
from ropepatch.fitting.vectors import Vector
from ropepatch.settings import seed_of

MIXTURES = 160  # random starts beside the published ones
SCREENED = 16  # starts that are tried again on more text
BATCH_TOKENS = 4096  # of a step; one window at least
RACERS = 4  # starts that take some steps before the best goes on
RACE = 5  # of all steps, one in so many
CHECKS = 15  # how often the held-out windows are read on the way
PATIENCE = 8  # checks without a new best, after which it stops


@dataclass(frozen=True)
class Found:
    """A vector, and how well it reads the held-out windows.

    Args:
        vector: [P + 1].
        loss: The objective on them.
        start: The start it came from.
        step: After so many steps.
    """

    vector: tuple[float, ...]
    loss: float
    start: str
    step: int = 0


@dataclass(frozen=True)
class Course:
    """Where a fit stands; JSON-ready.

    Args:
        racers: The descents by the names of their starts, the best start first.
        first: The best of the published or named methods.
        best: The best of all so far.
        raced: How many descents there were.
        spent: Forward tokens so far.
        taken: Steps so far, of all racers.
        unchanged: Checks since there was a new best.
        history: A row per check.
        finished: Whether it is over.
    """

    racers: dict[str, Descent]
    first: Found
    best: Found
    raced: int
    spent: int = 0
    taken: int = 0
    unchanged: int = 0
    history: tuple[dict[str, Any], ...] = ()
    finished: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Course:
        """The inverse of `to_dict`, also after JSON."""
        racers = {name: _rebuilt(Descent, one) for name, one in content["racers"].items()}
        ends = {key: _rebuilt(Found, content[key]) for key in ("first", "best")}
        history = tuple(content["history"])
        return cls(**content | ends | {"racers": racers, "history": history})


def _rebuilt(kind: Any, content: dict[str, Any]) -> Any:
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in content.items()})


def steps_in_all(settings: FitSettings, course: Course) -> int:
    """Steps of the long descent and of those that lose the race."""
    return settings.steps + (course.raced - 1) * race_of(settings)


def race_of(settings: FitSettings) -> int:
    """Steps of a race; fewer than in all."""
    return settings.steps // RACE


def batch_of(problem: Problem) -> int:
    """Windows of a step."""
    return max(1, BATCH_TOKENS // problem.examples.length)


def starts_of(problem: Problem, settings: FitSettings) -> dict[str, Vector]:
    """The methods that are named, or all published ones."""
    if settings.init == "auto":
        starts = published(problem.rope, problem.factor)
    else:
        names = [name.strip() for name in settings.init.split(",")]
        starts = {name: named(name, problem.rope, problem.factor) for name in names}
    return {name: project(start, settings.shape, settings.keep) for name, start in starts.items()}


def screened(problem: Problem, starts: dict[str, Vector], settings: FitSettings) -> dict[str, Vector]:
    """The starts in the order in which they read the text to learn from, the best first.

    All are tried on as much as half a step reads, and the best of these on as much as two steps do.
    """
    generator = torch.Generator().manual_seed(seed_of("screen", settings.seed) % 2**63)
    windows = torch.randperm(problem.num_windows, generator=generator).tolist()
    order = list(starts)
    for count, kept in ((max(1, batch_of(problem) // 2), SCREENED), (2 * batch_of(problem), None)):
        scores = {name: problem.score(starts[name], windows[:count]) for name in order}
        order = sorted(filter(lambda name: math.isfinite(scores[name]), order), key=scores.__getitem__)[:kept]
    return {name: starts[name] for name in order}


def begin(problem: Problem, held_out: Problem, settings: FitSettings) -> Course:
    """The course before its first step.

    Raises:
        RopepatchError: An unknown method among those that are named, or no loss that is finite.
    """
    given = starts_of(problem, settings)
    starts = dict(given)
    if settings.init == "auto":
        more = mixtures(given, count=MIXTURES, seed=settings.seed)
        starts |= {name: project(start, settings.shape, settings.keep) for name, start in more.items()}
    racing = list(screened(problem, starts, settings))[: RACERS if race_of(settings) else 1]
    if not racing:
        raise RopepatchError(
            "no method reads this text with a finite loss", hint="load the model in float32 or bfloat16"
        )
    judged = {
        name: Found(tuple(starts[name].flat().tolist()), _judged(held_out, starts[name]), name)
        for name in dict.fromkeys([*given, *racing])
    }
    first = min((judged[name] for name in given), key=lambda found: found.loss)
    best = min(judged.values(), key=lambda found: found.loss)
    racers = {name: Descent.at(starts[name]) for name in racing}
    return Course(racers, first, best, len(racers), spent=_spent(problem, held_out))


def proceed(problem: Problem, held_out: Problem, settings: FitSettings, course: Course) -> Iterator[Course]:
    """The course after each further step, until it is over.

    The starts race; then the one whose descent reads the held-out windows best goes on alone. It is judged by
    the running mean of its vectors.
    """
    earlier = course.spent - _spent(problem, held_out)
    every = max(1, settings.steps // CHECKS)
    race = race_of(settings) if course.raced > 1 else 0
    while not course.finished:
        name = next((name for name, racer in course.racers.items() if racer.step < race), None)
        if name is None:
            course = _decided(course)
            (name,) = course.racers
        racer = step(problem, course.racers[name], batch=batch_of(problem), settings=settings)
        course = replace(course, racers=course.racers | {name: racer}, taken=course.taken + 1)
        if racer.step % every == 0 or racer.step in (race, settings.steps):
            course = _checked(course, name, _judged(held_out, racer.averaged))
        alone = len(course.racers) == 1
        over = racer.step >= settings.steps or course.unchanged >= PATIENCE
        yield (course := replace(course, spent=earlier + _spent(problem, held_out), finished=alone and over))


def _decided(course: Course) -> Course:
    """With the winner of the race alone."""
    if len(course.racers) == 1:
        return course
    last = {row["start"]: row["held_out"] for row in course.history}
    winner = min(course.racers, key=last.__getitem__)
    return replace(course, racers={winner: course.racers[winner]}, unchanged=0)


def _judged(held_out: Problem, vector: Vector) -> float:
    """How well a vector reads the windows that decide; a loss that is not finite is the worst there is."""
    loss = held_out.by_window(vector).mean().item()
    return loss if math.isfinite(loss) else sys.float_info.max


def _checked(course: Course, name: str, loss: float) -> Course:
    racer = course.racers[name]
    row = {"start": name, "step": racer.step, "train": racer.loss, "held_out": loss}
    course = replace(course, history=(*course.history, row), unchanged=course.unchanged + 1)
    if loss < course.best.loss:
        best = Found(racer.mean, loss, name, racer.step)
        course = replace(course, best=best, unchanged=0)
    return course


def _spent(problem: Problem, held_out: Problem) -> int:
    return problem.spent + held_out.spent
