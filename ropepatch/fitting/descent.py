"""The descent of a fit: many starts, a race of a few, one long descent; what is held out decides.

Shapes: P rotary pairs, Q factors of queries.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropepatch.data.questions import ANSWERS
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.exam import LESS_LIKELY
from ropepatch.fitting.examples import rows_of_step
from ropepatch.fitting.loss import BACKWARD, FitLoss, Outcome
from ropepatch.fitting.vectors import Vector, mixtures, named, published
from ropepatch.progress import Advance
from ropepatch.scaling.rope import rotations
from ropepatch.settings import Count, Settings, Text, Whole, seed_of

MIXTURES = 160  # random starts beside the published ones
SCREENED = 16  # starts that are tried again on more text
CANDIDATES = 4  # starts that take some steps before the best continues
RACE = 5  # of all steps, one in so many
CHECKS = 8  # how often the validation windows are read on the way
PATIENCE = 4  # checks without a new best, after which it stops

LEARNING_RATE = 0.08  # in logarithms: a step moves the divisor of a slow pair by up to 8 %
ATTENTION_SCALE = 0.3  # of its step against those of the divisors: it moves every logit by its square
QUERY_SCALE = 0.4  # of the steps of amplitudes and phases
BETAS = (0.9, 0.99)
WARMUP = 5  # steps
LEAST = 0.02  # of the learning rate, at the end
AVERAGED = 0.93  # decay of the running mean of the vectors


class FitSettings(Settings):
    """The settings that decide the outcome of a fit; `ropepatch.fit` says what each means."""

    steps: Count = 200
    init: Text = "auto"
    queries: bool = True
    seed: Whole = 0

    @property
    def race(self) -> int:
        """Steps of a race; fewer than in all."""
        return self.steps // RACE

    def planned_steps(self, candidates: int = CANDIDATES) -> int:
        """Steps of the long descent and of those that lose the race."""
        return self.steps + (candidates - 1) * self.race


@dataclass(frozen=True, eq=False)
class Descent:
    """One descent after a step; vectors are [P + 1 + Q], in the order of `Vector.flat`."""

    step: int
    vector: Tensor
    mean: Tensor  # of the vectors so far, running: what is validated
    adam: Mapping[str, Tensor]
    loss: float | None = None  # of the last step's windows; None before the first, and where not finite

    @classmethod
    def at(cls, start: Vector, factors: int = 0) -> Descent:
        """Before the first step, with so many factors of queries to learn."""
        flat = replace(start, log_queries=torch.zeros(factors)).flat()
        zeros = torch.zeros_like(flat)
        return cls(0, flat, flat, {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros})


@dataclass(frozen=True, eq=False)
class Validated:
    """A vector [P + 1 (+ Q)] after some steps from a start, and its loss on the validation windows."""

    vector: Tensor
    loss: float
    start: str
    step: int = 0
    short: float = 0.0  # the loss of the tokens within the original length
    log_prob: float = 0.0  # of the answers at the target

    @property
    def combined(self) -> float:
        """What is the least for the best: the loss, and that of the answers."""
        return self.loss - ANSWERS * self.log_prob

    def not_worse(self, other: Validated) -> bool:
        """Whether neither the original length is read worse nor less is found."""
        return self.short <= other.short and self.log_prob >= other.log_prob - LESS_LIKELY


@dataclass(frozen=True, eq=False)
class FitState:
    """A fit between two steps."""

    candidates: dict[str, Descent]  # by the names of their starts, the best start first
    reference: Validated  # YaRN or, where that is no start, the best of them
    best: Validated  # of those that are not worse than the reference
    num_candidates: int  # at first
    forward_tokens: int = 0
    steps: int = 0  # of all candidates
    checks_without_improvement: int = 0
    history: tuple[dict[str, Any], ...] = ()  # a row per check
    finished: bool = False

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers, for `torch.save`."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> FitState:
        """The inverse of `state_dict`."""
        candidates = {name: Descent(**descent) for name, descent in state["candidates"].items()}
        ends = {name: Validated(**state[name]) for name in ("reference", "best")}
        return cls(**dict(state) | ends | {"candidates": candidates})

    def planned_steps(self, settings: FitSettings) -> int:
        """Those of so many candidates."""
        return settings.planned_steps(self.num_candidates)

    def decided(self) -> FitState:
        """With the winner of the race alone, one that is not worse than the reference where there is one."""
        if len(self.candidates) == 1:
            return self
        last = {row["start"]: (not row["not_worse"], row["held_out"]) for row in self.history}
        winner = min(self.candidates, key=last.__getitem__)
        return replace(self, candidates={winner: self.candidates[winner]}, checks_without_improvement=0)

    def validated(self, name: str, validation: FitLoss) -> FitState:
        """With the running mean of a candidate validated."""
        descent = self.candidates[name]
        now = _validated(validation, descent.mean, name, descent.step)
        fair = now.not_worse(self.reference)
        found = {"train": descent.loss, "held_out": now.combined, "not_worse": fair}
        row = {"start": name, "step": descent.step, **found}
        lowest = min((row["held_out"] for row in self.history), default=math.inf)
        checks = 0 if now.combined < lowest else self.checks_without_improvement + 1
        is_best = now.combined < self.best.combined and fair
        best = now if is_best else self.best
        history = (*self.history, row)
        return replace(self, history=history, best=best, checks_without_improvement=checks)


def batch_of(train: FitLoss) -> int:
    """Windows of a step."""
    return rows_of_step(train.ids.shape[1])


# Starts


def starts_of(train: FitLoss, settings: FitSettings) -> dict[str, Vector]:
    """The methods that are named, or all published ones."""
    if settings.init == "auto":
        return published(train.rope, train.factor)
    names = [name.strip() for name in settings.init.split(",")]
    return {name: named(name, train.rope, train.factor) for name in names}


def screened(
    train: FitLoss,
    starts: dict[str, Vector],
    settings: FitSettings,
    *,
    until: float = math.inf,
    advance: Advance = lambda done, total: None,
) -> list[str]:
    """The names of the starts by their loss on the text to learn from, the best first.

    All are tried on as much as half a step reads, and the best on as much as two; `until` a time by
    `time.perf_counter`, after which the rest is left out. Processes share the starts. `advance` is called
    with the number of windows read and that of all.
    """
    generator = torch.Generator().manual_seed(seed_of("screen", settings.seed) % 2**63)
    windows = torch.randperm(len(train.ids), generator=generator).tolist()
    order, done = list(starts), 0
    few, many = max(1, batch_of(train) // 2), 2 * batch_of(train)
    total = few * len(order) + many * min(SCREENED, len(order))
    for count, places in ((few, SCREENED), (many, None)):
        spent, first = train.spent, done

        def score(name: str, count: int = count, first: int = first) -> float | None:
            nonlocal done
            if done > first and time.perf_counter() > until:
                return None
            found, done = train.score(starts[name], windows[:count]), done + count * train.processes.count
            advance(min(done, total), total)
            return found

        found = zip(order, train.processes.deal(order, score), strict=True)
        scores = {name: loss for name, loss in found if loss is not None}
        train.spent = spent + len(scores) * train.cost(count)
        finite = [name for name in scores if math.isfinite(scores[name])]
        order = sorted(finite, key=scores.__getitem__)[:places]
    return order


def begin(
    train: FitLoss,
    validation: FitLoss,
    settings: FitSettings,
    *,
    factors: int = 0,
    until: float = math.inf,
    advance: Advance = lambda done, total: None,
) -> FitState:
    """The state before the first step, with so many factors of queries; see `screened`."""
    methods = starts_of(train, settings)
    starts = dict(methods)
    if settings.init == "auto":
        starts |= mixtures(methods, count=MIXTURES, seed=settings.seed)
    order = screened(train, starts, settings, until=until, advance=advance)
    if not order:
        raise RopepatchError(
            "no method has a finite loss on this text", hint="load the model in float32 or bfloat16"
        )
    named = "yarn" if "yarn" in methods else next((name for name in order if name in methods), order[0])
    racing = [*dict.fromkeys([named, *order])][: CANDIDATES if settings.race else 1]
    tried = {name: _validated(validation, starts[name].flat(), name) for name in racing}
    reference = tried[named]
    fair = (start for start in tried.values() if start.not_worse(reference))
    best = min(fair, key=lambda start: start.combined)
    candidates = {name: Descent.at(starts[name], factors) for name in racing}
    return FitState(candidates, reference, best, len(racing), forward_tokens=train.spent + validation.spent)


def _validated(validation: FitLoss, vector: Tensor, start: str, step: int = 0) -> Validated:
    """A vector with its outcome on the validation windows; the worst there is if that is not finite."""
    found = validation.validate(Vector.from_flat(vector, validation.rope.num_pairs))
    if not all(map(math.isfinite, found)):
        found = Outcome(sys.float_info.max, sys.float_info.max, 0.0)
    return Validated(vector, found.loss, start, step, found.short, found.log_prob)


# Steps


def proceed(
    train: FitLoss, validation: FitLoss, settings: FitSettings, state: FitState
) -> Iterator[FitState]:
    """The state after each further step, until it is over.

    The starts race, each on a process of its own if there are many; then the one whose descent has the lowest
    validation loss continues alone.
    """
    batch, every = batch_of(train), max(1, settings.steps // CHECKS)
    earlier = state.forward_tokens - train.spent - validation.spent
    race = settings.race if state.num_candidates > 1 else 0
    move = partial(step, train, batch=batch, settings=settings)
    while not state.finished:
        if all(descent.step >= race for descent in state.candidates.values()):
            state = state.decided()
        candidates, spent = state.candidates, train.spent
        last = min(descent.step for descent in candidates.values())
        names = [name for name, descent in candidates.items() if descent.step == last]
        moved = train.processes.deal([candidates[name] for name in names], move, _digits)
        train.spent = spent + len(names) * train.cost(batch) * (1 + BACKWARD)
        for name, descent in zip(names, moved, strict=True):
            candidates = state.candidates | {name: descent}
            state = replace(state, candidates=candidates, steps=state.steps + 1)
            if descent.step % every == 0 or descent.step in (race, settings.steps):
                state = state.validated(name, validation)
        over = len(state.candidates) == 1 and (
            last + 1 >= settings.steps or state.checks_without_improvement >= PATIENCE
        )
        tokens = earlier + train.spent + validation.spent
        state = replace(state, forward_tokens=tokens, finished=over)
        yield state


def stopped(validation: FitLoss, state: FitState) -> FitState:
    """A state that goes no further, with its last vectors validated."""
    before = validation.spent
    known = {(row["start"], row["step"]) for row in state.history}
    for name, descent in state.candidates.items():
        if descent.step and (name, descent.step) not in known:
            state = state.validated(name, validation)
    return replace(state, forward_tokens=state.forward_tokens + validation.spent - before)


def step(train: FitLoss, state: Descent, *, batch: int, settings: FitSettings) -> Descent:
    """The state after one more step of gradient descent.

    Adam (arXiv:1412.6980) with a cosine to `LEAST` of its rate. The windows follow from the seed and the
    number of the step, so that a descent resumes from any state. Pairs that rotate r > 1 times inside L move
    by steps smaller by sqrt(r): the loss has more valleys along them. `batch` windows are read.
    """
    pairs = train.rope.num_pairs
    turns = rotations(train.rope.inv_freq(), train.rope.original_max_position_embeddings)
    scale = torch.full_like(state.vector, QUERY_SCALE)
    scale[: pairs + 1] = torch.cat([turns.clamp(min=1).rsqrt().float(), torch.tensor([ATTENTION_SCALE])])
    values = (state.vector / scale).requires_grad_()
    decayed = 0.5 * (1 + math.cos(math.pi * state.step / settings.steps))
    rate = LEARNING_RATE * (min(1.0, (state.step + 1) / WARMUP) * max(LEAST, decayed))
    optimizer = torch.optim.Adam([values], lr=rate, betas=BETAS)
    optimizer.state[values] = {name: tensor.clone() for name, tensor in state.adam.items()}
    windows = draw_windows(len(train.ids), batch, state.step, settings.seed)
    loss, gradient = train.gradient(Vector.from_flat(values.detach() * scale, pairs), windows)
    if train.skips:  # few keys, beside which an attention factor for many is too large
        gradient[pairs] = 0
    sound = math.isfinite(loss) and bool(gradient.isfinite().all())
    values.grad = gradient * scale if sound else torch.zeros_like(gradient)
    optimizer.step()
    vector = Vector.from_flat(values.detach() * scale, pairs).clamped().flat()
    return Descent(
        step=state.step + 1,
        vector=vector,
        mean=state.mean.lerp(vector, 1 - AVERAGED),
        adam=dict(optimizer.state[values]),
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


def _digits(descent: Descent) -> str:
    return str(descent.vector.tolist())
