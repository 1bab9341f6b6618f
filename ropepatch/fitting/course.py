"""The course of a fit: many starts, a race of a few, one long descent; the held-out windows decide.

Shapes: P rotary pairs; H held-out windows.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.running import distribute, rank_and_ranks
from ropepatch.fitting.problem import BACKWARD, Problem
from ropepatch.fitting.settings import FitSettings
from ropepatch.fitting.vectors import Vector, mixtures, named, project, published
from ropepatch.scaling.rope import rotations
from ropepatch.settings import seed_of

MIXTURES = 160  # random starts beside the published ones
SCREENED = 16  # starts that are tried again on more text
BATCH_TOKENS = 4096  # of a step; one window at least
RACERS = 4  # starts that take some steps before the best goes on
RACE = 5  # of all steps, one in so many
CHECKS = 15  # how often the held-out windows are read on the way
PATIENCE = 8  # checks without a new best, after which it stops

LEARNING_RATE = 0.08  # in logarithms: a step moves the divisor of a slow pair by up to 8 %
ATTENTION_SCALE = 0.3  # of its step against those of the divisors: it moves every logit by its square
BETAS = (0.9, 0.99)
WARMUP = 5  # steps
LEAST = 0.02  # of the learning rate, at the end
AVERAGED = 0.93  # decay of the running mean of the vectors


@dataclass(frozen=True)
class Descent:
    """Where a descent stands after a step; small, and JSON-ready.

    Args:
        step: Steps taken.
        vector: [P + 1], in the order of `Vector.flat`.
        mean: The running mean of the vectors [P + 1]: what is judged and kept.
        first: Adam's first moments [P + 1].
        second: Adam's second moments [P + 1].
        loss: The objective of the last step's windows; None before the first, and where it is not finite.
    """

    step: int
    vector: tuple[float, ...]
    mean: tuple[float, ...]
    first: tuple[float, ...]
    second: tuple[float, ...]
    loss: float | None = None

    @classmethod
    def at(cls, start: Vector) -> Descent:
        """Before the first step."""
        values = start.numbers()
        zeros = (0.0,) * len(values)
        return cls(0, values, values, zeros, zeros)

    @property
    def averaged(self) -> Vector:
        """The running mean."""
        return Vector.from_flat(self.mean)


@dataclass(frozen=True)
class JudgedVector:
    """A vector, and how well it reads the held-out windows.

    Args:
        vector: [P + 1], in the order of `Vector.flat`.
        loss: The objective on the held-out windows.
        start: The start it came from.
        step: After so many steps.
    """

    vector: tuple[float, ...]
    loss: float
    start: str
    step: int = 0

    @property
    def point(self) -> Vector:
        """The vector in tensors."""
        return Vector.from_flat(self.vector)


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
    first: JudgedVector
    best: JudgedVector
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
        return TypeAdapter(cls).validate_python(content)


def steps_in_all(settings: FitSettings, course: Course) -> int:
    """Steps of the long descent and of those that lose the race."""
    return settings.steps + (course.raced - 1) * _race(settings)


def _race(settings: FitSettings) -> int:
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


def screened(
    problem: Problem,
    starts: dict[str, Vector],
    settings: FitSettings,
    *,
    until: float = math.inf,
    advance: Callable[[int, int | None], None] = lambda done, total: None,
) -> dict[str, Vector]:
    """The starts in the order in which they read the text to learn from, the best first.

    All are tried on as much as half a step reads, and the best on as much as two. Processes share the starts.

    Args:
        problem: What scores them.
        starts: The starts; after the time that is given, those that are not yet tried are left out.
        settings: The seed of the windows.
        until: That time, by `time.perf_counter`.
        advance: Called with how many windows are read, and how many there are.
    """
    generator = torch.Generator().manual_seed(seed_of("screen", settings.seed) % 2**63)
    windows = torch.randperm(problem.num_windows, generator=generator).tolist()
    order, done = list(starts), 0
    few, many = max(1, batch_of(problem) // 2), 2 * batch_of(problem)
    total = few * len(order) + many * min(SCREENED, len(order))
    for count, places in ((few, SCREENED), (many, None)):
        spent, first = problem.spent, done

        def score(name: str, count: int = count, first: int = first) -> float | None:
            nonlocal done
            if done > first and time.perf_counter() > until:
                return None
            found, done = problem.score(starts[name], windows[:count]), done + count * rank_and_ranks(True)[1]
            advance(min(done, total), total)
            return found

        found = zip(order, distribute(order, score, key=str, split=True), strict=True)
        scores = {name: loss for name, loss in found if loss is not None}
        problem.spent = spent + len(scores) * problem.cost(count)
        finite = [name for name in scores if math.isfinite(scores[name])]
        order = sorted(finite, key=scores.__getitem__)[:places]
    return {name: starts[name] for name in order}


def begin(
    problem: Problem,
    held_out: Problem,
    settings: FitSettings,
    *,
    until: float = math.inf,
    advance: Callable[[int, int | None], None] = lambda done, total: None,
) -> Course:
    """The course before its first step; `screened` says what `until` and `advance` are.

    Raises:
        RopepatchError: An unknown method among those that are named, or no loss that is finite.
    """
    methods = starts_of(problem, settings)
    starts = dict(methods)
    if settings.init == "auto":
        more = mixtures(methods, count=MIXTURES, seed=settings.seed)
        starts |= {name: project(start, settings.shape, settings.keep) for name, start in more.items()}
    racing = list(screened(problem, starts, settings, until=until, advance=advance))[
        : RACERS if _race(settings) else 1
    ]
    if not racing:
        raise RopepatchError(
            "no method reads this text with a finite loss", hint="load the model in float32 or bfloat16"
        )
    judged = {
        name: JudgedVector(starts[name].numbers(), _judged(held_out, starts[name]), name)
        for name in dict.fromkeys([*methods, *racing])
    }
    first = min((judged[name] for name in methods), key=lambda start: start.loss)
    best = min(judged.values(), key=lambda start: start.loss)
    racers = {name: Descent.at(starts[name]) for name in racing}
    return Course(racers, first, best, len(racers), spent=problem.spent + held_out.spent)


def proceed(problem: Problem, held_out: Problem, settings: FitSettings, course: Course) -> Iterator[Course]:
    """The course after each further step, until it is over.

    The starts race, each on a process of its own if there are many; then the one whose descent reads the
    held-out windows best goes on alone. It is judged by the running mean of its vectors.
    """
    batch = batch_of(problem)
    earlier = course.spent - problem.spent - held_out.spent
    every = max(1, settings.steps // CHECKS)
    race = _race(settings) if course.raced > 1 else 0
    while not course.finished:
        if all(racer.step >= race for racer in course.racers.values()):
            course = _decided(course)
        racers, spent = course.racers, problem.spent
        last = min(racer.step for racer in racers.values())
        names = [name for name, racer in racers.items() if racer.step == last]
        move = partial(step, problem, batch=batch, settings=settings)
        moved = distribute([racers[name] for name in names], move, key=repr, split=True)
        problem.spent = spent + len(names) * problem.cost(batch) * (1 + BACKWARD)
        for name, racer in zip(names, moved, strict=True):
            course = replace(course, racers=course.racers | {name: racer}, taken=course.taken + 1)
            if racer.step % every == 0 or racer.step in (race, settings.steps):
                course = _checked(course, name, _judged(held_out, racer.averaged))
        over = len(course.racers) == 1 and (last + 1 >= settings.steps or course.unchanged >= PATIENCE)
        course = replace(course, spent=earlier + problem.spent + held_out.spent, finished=over)
        yield course


def stopped(held_out: Problem, course: Course) -> Course:
    """A course that goes no further, with its last vectors judged."""
    before = held_out.spent
    judged = {(row["start"], row["step"]) for row in course.history}
    for name, racer in course.racers.items():
        if racer.step and (name, racer.step) not in judged:
            course = _checked(course, name, _judged(held_out, racer.averaged))
    return replace(course, spent=course.spent + held_out.spent - before)


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
        course = replace(course, best=JudgedVector(racer.mean, loss, name, racer.step), unchanged=0)
    return course


def step(problem: Problem, state: Descent, *, batch: int, settings: FitSettings) -> Descent:
    """The state after one more step of gradient descent.

    Adam (arXiv:1412.6980) with a cosine to `LEAST` of its rate; every vector is projected onto the shape. The
    windows follow from the seed and the number of the step, so that a descent goes on from any state. Pairs
    that turn r > 1 times inside L move by steps smaller by sqrt(r): the loss has more valleys along them.

    Args:
        problem: What is minimised.
        state: Where the descent stands.
        batch: Windows of the step.
        settings: How many steps there are in all, shape and seed.
    """
    turns = rotations(problem.rope.inv_freq(), problem.rope.original_max_position_embeddings)
    scale = torch.cat([turns.clamp(min=1).rsqrt().float(), torch.tensor([ATTENTION_SCALE])])
    values = (torch.tensor(state.vector) / scale).requires_grad_()
    decayed = 0.5 * (1 + math.cos(math.pi * state.step / settings.steps))
    rate = LEARNING_RATE * (min(1.0, (state.step + 1) / WARMUP) * max(LEAST, decayed))
    optimizer = torch.optim.Adam([values], lr=rate, betas=BETAS)
    optimizer.state[values] = {
        "step": torch.tensor(float(state.step)),
        "exp_avg": torch.tensor(state.first),
        "exp_avg_sq": torch.tensor(state.second),
    }
    windows = draw_windows(problem.num_windows, batch, state.step, settings.seed)
    loss, gradient = problem.gradient(Vector.from_flat(values.detach() * scale), windows)
    sound = math.isfinite(loss) and bool(gradient.isfinite().all())
    values.grad = gradient * scale if sound else torch.zeros_like(gradient)
    optimizer.step()
    moments: dict[str, Tensor] = optimizer.state[values]
    vector = project(Vector.from_flat(values.detach() * scale), settings.shape, settings.keep).flat()
    mean = torch.tensor(state.mean).lerp(vector, 1 - AVERAGED)
    return Descent(
        step=state.step + 1,
        vector=tuple(vector.tolist()),
        mean=tuple(mean.tolist()),
        first=tuple(moments["exp_avg"].tolist()),
        second=tuple(moments["exp_avg_sq"].tolist()),
        loss=loss if sound else None,
    )


def draw_windows(available: int, batch: int, step: int, seed: int) -> list[int]:
    """The windows of a step: all of them in one random order before any comes again, in another."""
    indices = range(step * batch, (step + 1) * batch)
    orders = {}
    for lap in {index // available for index in indices}:
        generator = torch.Generator().manual_seed(seed_of("windows", seed, lap) % 2**63)
        orders[lap] = torch.randperm(available, generator=generator).tolist()
    return [orders[index // available][index % available] for index in indices]
