"""Gradient descent on the log-divisors and the log attention factor.

Shapes: P rotary pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ropepatch.fitting.problem import Problem
from ropepatch.fitting.settings import FitSettings
from ropepatch.fitting.shapes import project
from ropepatch.fitting.vectors import Vector
from ropepatch.scaling.rope import rotations
from ropepatch.settings import seed_of

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
        second: Its second moments [P + 1].
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
        values, zeros = tuple(start.flat().tolist()), (0.0,) * len(start.flat())
        return cls(0, values, values, zeros, zeros)

    @property
    def averaged(self) -> Vector:
        """The running mean."""
        return Vector.from_flat(torch.tensor(self.mean))


def step(problem: Problem, state: Descent, *, batch: int, settings: FitSettings) -> Descent:
    """The state after one more step.

    Adam (arXiv:1412.6980) with a cosine to `LEAST` of its rate; every vector is projected onto the shape. The
    windows follow from the seed and the number of the step, so that a descent goes on from any state. Pairs
    that turn r > 1 times inside L move by steps smaller by sqrt(r): the loss has more valleys along them.

    Args:
        problem: What is minimised.
        state: Where it stands.
        batch: Windows of the step.
        settings: How many steps there are in all, shape and seed.
    """
    turns = rotations(problem.rope.inv_freq(), problem.rope.original_max_position_embeddings)
    scale = torch.cat([turns.clamp(min=1).rsqrt().float(), torch.tensor([ATTENTION_SCALE])])
    values = (torch.tensor(state.vector) / scale).requires_grad_()
    rate = LEARNING_RATE * _decay(state.step, settings.steps)
    optimizer = torch.optim.Adam([values], lr=rate, betas=BETAS)
    optimizer.state[values] = {
        "step": torch.tensor(float(state.step)),
        "exp_avg": torch.tensor(state.first),
        "exp_avg_sq": torch.tensor(state.second),
    }
    windows = drawn(problem.num_windows, batch, state.step, settings.seed)
    loss, gradient = problem.gradient(Vector.from_flat(values.detach() * scale), windows)
    sound = math.isfinite(loss) and bool(gradient.isfinite().all())
    values.grad = gradient * scale if sound else torch.zeros_like(gradient)
    optimizer.step()
    moments: dict[str, Tensor] = optimizer.state[values]
    moved = Vector.from_flat(values.detach() * scale)
    moved_to = project(moved, settings.shape, settings.keep).flat()
    mean = torch.tensor(state.mean).lerp(moved_to, 1 - AVERAGED)
    return Descent(
        step=state.step + 1,
        vector=_numbers(moved_to),
        mean=_numbers(mean),
        first=_numbers(moments["exp_avg"]),
        second=_numbers(moments["exp_avg_sq"]),
        loss=loss if sound else None,
    )


def _numbers(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())


def drawn(available: int, batch: int, step: int, seed: int) -> list[int]:
    """The windows of a step: all of them in one random order before any comes again, in another."""
    indices = range(step * batch, (step + 1) * batch)
    orders = {}
    for lap in {index // available for index in indices}:
        generator = torch.Generator().manual_seed(seed_of("windows", seed, lap) % 2**63)
        orders[lap] = torch.randperm(available, generator=generator).tolist()
    return [orders[index // available][index % available] for index in indices]


def _decay(step: int, steps: int) -> float:
    decayed = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / WARMUP) * max(LEAST, decayed)
