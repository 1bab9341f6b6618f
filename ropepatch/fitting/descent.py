"""The gradient descent of a fit: many starts, a race of a few, one long descent, selected on held-out text.

Shapes: P rotary pairs, Q query factors.
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
SCREENED = 16  # starts that are screened again on more text
CANDIDATES = 4  # starts that race
RACE = 5  # the race takes one in so many of all steps
CHECKS = 8  # validations during the descent
PATIENCE = 4  # checks without a new best before it stops
NEARER = (0.5, 0.25)  # shares of the way from YaRN to the last vector, tried if no vector is better on both

LEARNING_RATE = 0.08  # in logarithms: a step changes the divisor of a slow pair by up to 8 %
ATTENTION_SCALE = 0.3  # relative step of the attention factor, whose square scales every logit
QUERY_SCALE = 0.4  # relative step of amplitudes and phases
SKIPPING_SCALE = 0.1  # the same at skipped positions, of a few short sequences per step
BETAS = (0.9, 0.99)
WARMUP = 5  # steps
LEAST = 0.02  # relative learning rate at the end
AVERAGED = 0.93  # decay of the running mean of the vectors


class FitSettings(Settings):
    """The settings that decide the outcome of a fit; see `ropepatch.fit`."""

    steps: Count = 200
    init: Text = "auto"
    queries: bool = True
    seed: Whole = 0

    @property
    def race(self) -> int:
        """Steps of the race, per candidate."""
        return self.steps // RACE

    @property
    def methods(self) -> list[str]:
        """The methods to start from; none for all published ones and their mixtures."""
        return [] if self.init == "auto" else [name.strip() for name in self.init.split(",")]

    def planned_steps(self, candidates: int | None = None) -> int:
        """Steps of the long descent and of the losers of the race; by default among the most candidates."""
        if candidates is None:
            candidates = min(CANDIDATES, len(self.methods) or CANDIDATES)
        return self.steps + (candidates - 1) * self.race


@dataclass(frozen=True, eq=False)
class Descent:
    """A descent after a step; vectors are [P + 1 + Q], in the order of `Vector.flat`."""

    step: int
    vector: Tensor
    mean: Tensor  # running mean of the vectors, which is validated
    adam: Mapping[str, Tensor]
    loss: float | None = None  # of the last step; None before the first, and if not finite

    @classmethod
    def at(cls, start: Vector, factors: int = 0) -> Descent:
        """Return the state before the first step, with a number of query factors to learn."""
        flat = replace(start, log_queries=torch.zeros(factors)).flat()
        zeros = torch.zeros_like(flat)
        return cls(0, flat, flat, {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros})


@dataclass(frozen=True, eq=False)
class Validated:
    """A vector [P + 1 (+ Q)] after some steps from a start, and its validation loss."""

    vector: Tensor
    loss: float
    start: str
    step: int = 0
    short: float = 0.0  # the loss of the tokens within the original length
    log_prob: float = 0.0  # of the answers at the target

    @property
    def combined(self) -> float:
        """The selection criterion, to minimise: the loss, and that of the answers."""
        return self.loss - ANSWERS * self.log_prob

    def not_worse(self, other: Validated) -> bool:
        """Whether neither the short-context loss nor the answer log-prob is worse."""
        return self.short <= other.short and self.log_prob >= other.log_prob - LESS_LIKELY


@dataclass(frozen=True, eq=False)
class FitState:
    """A fit between two steps."""

    candidates: dict[str, Descent]  # by the names of their starts, the best start first
    reference: Validated  # YaRN or, if that is no start, the best start
    best: Validated  # the best that is not worse than the reference
    num_candidates: int  # before the race
    forward_tokens: int = 0
    steps: int = 0  # over all candidates
    checks_without_improvement: int = 0
    history: tuple[dict[str, Any], ...] = ()  # a row per check
    finished: bool = False

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and numbers, for `torch.save`."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> FitState:
        """Invert `state_dict`."""
        candidates = {name: Descent(**descent) for name, descent in state["candidates"].items()}
        ends = {name: Validated(**state[name]) for name in ("reference", "best")}
        return cls(**dict(state) | ends | {"candidates": candidates})

    def planned_steps(self, settings: FitSettings) -> int:
        """Steps in all, with the number of candidates of this fit."""
        return settings.planned_steps(self.num_candidates)

    def decided(self) -> FitState:
        """Keep only the winner of the race, if possible one that is not worse than the reference."""
        if len(self.candidates) == 1:
            return self
        last = {row["start"]: (not row["not_worse"], row["held_out"]) for row in self.history}
        winner = min(self.candidates, key=last.__getitem__)
        return replace(self, candidates={winner: self.candidates[winner]}, checks_without_improvement=0)

    def validated(self, name: str, validation: FitLoss, share: float = 1.0) -> FitState:
        """Validate the running mean of a candidate, or a vector on the way to it from the reference."""
        descent = self.candidates[name]
        before = torch.zeros_like(descent.mean)
        before[: len(self.reference.vector)] = self.reference.vector  # it may have no query factors
        now = _validated(validation, before.lerp(descent.mean, share), name, descent.step)
        fair = now.not_worse(self.reference)
        found = {"train": descent.loss, "held_out": now.combined, "not_worse": fair}
        found |= {"short": now.short, "log_prob": now.log_prob}
        row = {"start": name, "step": descent.step, "share": share, **found}
        lowest = min((row["held_out"] for row in self.history), default=math.inf)
        checks = 0 if now.combined < lowest else self.checks_without_improvement + 1
        is_best = now.combined < self.best.combined and fair
        best = now if is_best else self.best
        history = (*self.history, row)
        return replace(self, history=history, best=best, checks_without_improvement=checks)

    def descended(self, settings: FitSettings) -> bool:
        """Whether no further step of the descent follows."""
        if len(self.candidates) > 1:
            return False
        (descent,), nearing = self.candidates.values(), any(row["share"] < 1 for row in self.history)
        patient = self.checks_without_improvement < PATIENCE and not nearing
        return descent.step >= settings.steps or not patient

    @property
    def nearer(self) -> list[float]:
        """The shares of `NEARER` not validated yet; none if a vector of this descent is the best."""
        tried = {row["share"] for row in self.history}
        return [] if self.best.step else [share for share in NEARER if share not in tried]


def batch_of(train: FitLoss) -> int:
    """Return the number of windows of a step."""
    return rows_of_step(train.ids.shape[1])


# Starts


def starts_of(train: FitLoss, settings: FitSettings) -> dict[str, Vector]:
    """Return the vectors of the methods in `init`, or of all published ones."""
    if not settings.methods:
        return published(train.rope, train.factor)
    return {name: named(name, train.rope, train.factor) for name in settings.methods}


def screened(
    train: FitLoss,
    starts: dict[str, Vector],
    settings: FitSettings,
    *,
    until: float = math.inf,
    advance: Advance = lambda done, total: None,
) -> list[str]:
    """Sort the names of the starts by their training loss, the best first.

    It screens all starts on half the windows of a step, and the best on those of two. After the time
    `until`, by `time.perf_counter`, it skips the rest. Processes share the starts. `advance` is called with
    the number of windows done and their total.
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
    """Return the state before the first step, with a number of query factors; see `screened`."""
    methods = starts_of(train, settings)
    starts = dict(methods)
    if not settings.methods:
        starts |= mixtures(methods, count=MIXTURES, seed=settings.seed)
    order = screened(train, starts, settings, until=until, advance=advance)
    if not order:
        raise RopepatchError(
            "no method has a finite loss on this text", hint="load the model in float32 or bfloat16"
        )
    baseline = "yarn" if "yarn" in methods else next((name for name in order if name in methods), order[0])
    racing = [*dict.fromkeys([baseline, *order])][: CANDIDATES if settings.race else 1]
    tried = {name: _validated(validation, starts[name].flat(), name) for name in racing}
    reference = tried[baseline]
    fair = (start for start in tried.values() if start.not_worse(reference))
    best = min(fair, key=lambda start: start.combined)
    candidates = {name: Descent.at(starts[name], factors) for name in racing}
    return FitState(candidates, reference, best, len(racing), forward_tokens=train.spent + validation.spent)


def _validated(validation: FitLoss, vector: Tensor, start: str, step: int = 0) -> Validated:
    """Validate a vector; a loss that is not finite becomes the largest float."""
    found = validation.validate(Vector.from_flat(vector, validation.rope.num_pairs))
    if not all(map(math.isfinite, found)):
        found = Outcome(sys.float_info.max, sys.float_info.max, 0.0)
    return Validated(vector, found.loss, start, step, found.short, found.log_prob)


# Steps


def proceed(
    train: FitLoss, validation: FitLoss, settings: FitSettings, state: FitState
) -> Iterator[FitState]:
    """Yield the state after each further step or vector nearer to the reference, until the fit is finished.

    First the candidates race, divided over the processes. Then only the one with the lowest validation loss
    continues.
    """
    batch, every = batch_of(train), max(1, settings.steps // CHECKS)
    earlier = state.forward_tokens - train.spent - validation.spent
    race = settings.race if state.num_candidates > 1 else 0
    move = partial(step, train, batch=batch, settings=settings)
    while not state.finished:
        spent = train.spent
        if state.descended(settings):
            (name,), (share, *_) = state.candidates, state.nearer
            state = state.validated(name, validation, share)
        else:
            if all(descent.step >= race for descent in state.candidates.values()):
                state = state.decided()
            last = min(descent.step for descent in state.candidates.values())
            names = [name for name, descent in state.candidates.items() if descent.step == last]
            moved = train.processes.deal([state.candidates[name] for name in names], move, _digits)
            train.spent = spent + len(names) * train.cost(batch) * (1 + BACKWARD)
            for name, descent in zip(names, moved, strict=True):
                candidates = state.candidates | {name: descent}
                state = replace(state, candidates=candidates, steps=state.steps + 1)
                if descent.step % every == 0 or descent.step in (race, settings.steps):
                    state = state.validated(name, validation)
        tokens = earlier + train.spent + validation.spent
        over = state.descended(settings) and not state.nearer
        state = replace(state, forward_tokens=tokens, finished=over)
        yield state


def stopped(validation: FitLoss, state: FitState) -> FitState:
    """Validate the last vectors of a fit that stops early."""
    before = validation.spent
    known = {(row["start"], row["step"]) for row in state.history}
    for name, descent in state.candidates.items():
        if descent.step and (name, descent.step) not in known:
            state = state.validated(name, validation)
    return replace(state, forward_tokens=state.forward_tokens + validation.spent - before)


def step(train: FitLoss, state: Descent, *, batch: int, settings: FitSettings) -> Descent:
    """Return the state after one more step of gradient descent, on `batch` windows.

    Adam (arXiv:1412.6980) with a cosine schedule to `LEAST` of its rate. Seed and number of the step
    determine the windows, so that a descent resumes from any state. Steps of pairs that rotate r > 1 times
    within L are smaller by sqrt(r): the loss has more minima along them.
    """
    pairs = train.rope.num_pairs
    turns = rotations(train.rope.inv_freq(), train.rope.original_max_position_embeddings)
    scale = torch.full_like(state.vector, SKIPPING_SCALE if train.skips else QUERY_SCALE)
    scale[: pairs + 1] = torch.cat([turns.clamp(min=1).rsqrt().float(), torch.tensor([ATTENTION_SCALE])])
    values = (state.vector / scale).requires_grad_()
    decayed = 0.5 * (1 + math.cos(math.pi * state.step / settings.steps))
    rate = LEARNING_RATE * (min(1.0, (state.step + 1) / WARMUP) * max(LEAST, decayed))
    optimizer = torch.optim.Adam([values], lr=rate, betas=BETAS)
    optimizer.state[values] = {name: tensor.clone() for name, tensor in state.adam.items()}
    windows = draw_windows(len(train.ids), batch, state.step, settings.seed)
    loss, gradient = train.gradient(Vector.from_flat(values.detach() * scale, pairs), windows)
    if train.skips:  # fewer keys than at the target, so the attention factor would be too small
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
    """Draw the windows of a step, without repetition before all have been drawn."""
    indices = range(step * batch, (step + 1) * batch)
    orders = {}
    for epoch in {index // available for index in indices}:
        generator = torch.Generator().manual_seed(seed_of("windows", seed, epoch) % 2**63)
        orders[epoch] = torch.randperm(available, generator=generator).tolist()
    return [orders[index // available][index % available] for index in indices]


def _digits(descent: Descent) -> str:
    return str(descent.vector.tolist())
