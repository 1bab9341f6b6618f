"""Searches without gradients: what gradient descent is compared with at equal forward tokens.

Letters, as in the papers: P rotary pairs, s factor, L trained window, a attention factor; a divisor is
lambda_i = theta_i / theta'_i, fastest pair first.

A strategy proposes vectors and learns their scores; `run_search` scores all of them on the same windows, so
that no draw of windows decides between them, and stops before the budget is exceeded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import torch

from ropepatch.errors import RopepatchError
from ropepatch.fitting.problem import Problem
from ropepatch.fitting.vectors import LARGEST, Vector
from ropepatch.scaling.rope import Rope, rotations
from ropepatch.scaling.searched import longrope_attention_factor
from ropepatch.settings import seed_of

# Of both evolutions: microsoft/LongRoPE, evolution/algorithms and default_hyper_params
MUTATED = 0.3  # the chance of every pair to be redrawn in a mutation
EXCHANGED = 0.15  # of every pair to be exchanged in a crossover: 0.3 to be visited times 0.5 to be taken
ATTEMPTS = 20  # passes over the pairs until a crossover gives up and a mutation takes its place
PER_UNIT = 100  # values of a divisor from one whole number to the next: a step of 0.01
EXHAUSTED = 1000  # mutations in a row of which none is new

# Of the coordinate search, in logarithms
FIRST_STEP = 0.25  # of a divisor
FIRST_ATTENTION_STEP = 0.05
LAST_STEP = 0.001

Proposals = Generator[Vector, float, None]


class Improvement(NamedTuple):
    """A vector better than all before it."""

    vector: Vector
    score: float  # nats per token, on the windows of the search
    spent: int  # forward tokens of the problem until then


def run_search(
    name: str, problem: Problem, starts: Sequence[Vector], *, budget: int, seed: int, windows: Sequence[int]
) -> Iterator[Improvement]:
    """Score what a strategy proposes, until the budget is spent or nothing is left to propose.

    Args:
        name: A name of `SEARCHES`.
        problem: What scores a vector.
        starts: At least one.
        budget: What `problem.spent` may come to, in forward tokens.
        seed: Decides all that the strategy draws.
        windows: The windows on which every candidate is scored.

    Yields:
        Each vector that is better than all before it.

    Raises:
        RopepatchError: The budget does not pay one candidate.
    """
    price, left = problem.cost(len(windows)), budget - problem.spent
    if left < price:
        raise RopepatchError(
            f"a search scores its candidates on {len(windows)} windows, {price} forward tokens each, and has "
            f"{max(left, 0)} left",
            hint="give it a larger budget or fewer windows",
        )
    proposals, best = SEARCHES[name](problem, starts, seed, left // price), math.inf
    vector = next(proposals)
    while problem.spent + price <= budget:
        score = problem.score(vector, windows)
        if score < best:
            best = score
            yield Improvement(vector, score, problem.spent)
        try:
            vector = proposals.send(math.inf if math.isnan(score) else score)
        except StopIteration:
            return


def evolution(problem: Problem, starts: Sequence[Vector], seed: int, candidates: int) -> Proposals:
    """LongRoPE's search (Ding et al. 2024, arXiv:2402.13753, section 3.2).

    Divisors do not decrease from pair to pair and lie from 1 to 1.25 s, in steps of 0.01 (the released code
    goes to 1 + s). The first population are the starts, in the paper PI, NTK and YaRN, and mutations of them.
    Of a start only the divisors are taken, brought into that space: a = sqrt(1 + ln s / ln L) is LongRoPE's
    own and not searched. Nor is the number of first tokens that are left unscaled, which no engine reads.
    `Sizes` has the numbers. Generations go on until the budget is spent; the paper stops after 40.
    """
    breeding = _Breeding(Random(seed_of("evolution", seed)), low=1.0, high=1.25 * problem.factor)
    founders = [_Candidate(0, breeding.inside(start)) for start in starts]
    return _evolved(breeding, founders, problem, Sizes.within(candidates))


def longrope2(problem: Problem, starts: Sequence[Vector], seed: int, candidates: int) -> Proposals:
    """LongRoPE2's search (Shang et al. 2025, arXiv:2502.20082, algorithms 1 and 2).

    Every candidate has a critical pair, from the first that turns at most ten times inside L to the
    theoretical one. From it on divisors do not decrease and lie from s to 2 s; below it they follow the NTK
    curve lambda_i = lambda_c^(i / c) that meets them there (algorithm 2 and the released code; line 6 of
    algorithm 1 has another pair in its place). The first population has one constant for each critical pair,
    then mutations of these; the starts are not used. Sizes, steps and a are those of `evolution`.

    The authors judge by the answer tokens of needles alone: give a problem whose objective reads these.
    """
    s, rope = problem.factor, problem.rope
    breeding = _Breeding(Random(seed_of("longrope2", seed)), low=s, high=2 * s)
    slowest = rope.num_pairs - 1
    first, last = (min(max(critical_pair(rope, turns), 1), slowest) for turns in (10, 1))
    founders = [
        _Candidate(pair, (breeding.drawn(s, 2 * s),) * (rope.num_pairs - pair))
        for pair in range(first, last + 1)
    ]
    return _evolved(breeding, founders, problem, Sizes.within(candidates))


def coordinates(problem: Problem, starts: Sequence[Vector], seed: int, candidates: int) -> Proposals:
    """Pattern search: one log-divisor, or the log attention factor, at a time, from the best of the starts.

    A step that helps is doubled, one that helps in neither direction halved, until none is above 0.001. Every
    sweep takes the coordinates in another order.
    """
    random = Random(seed_of("coordinates", seed))
    best, here = math.inf, starts[0].flat()
    for start in starts:
        score = yield start
        if score < best:
            best, here = score, start.flat()
    steps = [FIRST_STEP] * (len(here) - 1) + [FIRST_ATTENTION_STEP]
    while max(map(abs, steps)) > LAST_STEP:
        moving = [i for i, step in enumerate(steps) if abs(step) > LAST_STEP]
        for i in random.sample(moving, len(moving)):
            for step in (steps[i], -steps[i]):
                there = here.clone()
                there[i] = (there[i] + step).clamp(-LARGEST, LARGEST)
                score = yield Vector.from_flat(there)
                if score < best:
                    best, here, steps[i] = score, there, 2 * step
                    break
            else:
                steps[i] /= 2


SEARCHES: dict[str, Callable[[Problem, Sequence[Vector], int, int], Proposals]] = {
    "evolution": evolution,
    "longrope2": longrope2,
    "coordinates": coordinates,
}


class Sizes(NamedTuple):
    """How many candidates an evolution has; the defaults are the authors'.

    Args:
        population: The first generation.
        parents: The best so far, from which every later generation comes.
        mutations: New candidates by mutation, per generation.
        crossovers: New candidates by crossover, per generation.
    """

    population: int = 64
    parents: int = 32
    mutations: int = 16
    crossovers: int = 16

    @classmethod
    def within(cls, candidates: int) -> Sizes:
        """The authors' sizes; smaller in proportion where so many candidates are no two more generations."""
        full = cls()
        share = min(1.0, candidates / (full.population + 2 * (full.mutations + full.crossovers)))
        return cls(*(max(least, int(size * share)) for size, least in zip(full, (2, 2, 1, 1), strict=True)))


def critical_pair(rope: Rope, turns: float = 1.0) -> int:
    """The first pair, counted from 0, that turns at most so many times inside L.

    At one turn half the theoretical critical dimension, 2 ceil((d/2) log_b(L / 2 pi)) (arXiv:2502.20082,
    equation 7), which is this count on an unscaled rope.
    """
    return int((rotations(rope.inv_freq(), rope.original_max_position_embeddings) > turns).sum())


@dataclass(frozen=True)
class _Candidate:
    """Divisors that are free from the critical pair on, and follow an NTK curve up to it."""

    critical: int
    free: tuple[float, ...]

    @property
    def divisors(self) -> tuple[float, ...]:
        """Of all pairs."""
        curve = (self.free[0] ** (pair / self.critical) for pair in range(self.critical))
        return (*curve, *self.free)

    def vector(self, attention_factor: float) -> Vector:
        log_divisors = torch.tensor(self.divisors, dtype=torch.float64).log().float()
        return Vector(log_divisors, torch.tensor(math.log(attention_factor), dtype=torch.float32))


@dataclass
class _Breeding:
    """How candidates come from others. Their free divisors never decrease, and none comes twice."""

    random: Random
    low: float
    high: float
    seen: set[_Candidate] = field(default_factory=set)

    def inside(self, start: Vector) -> tuple[float, ...]:
        """The divisors of a start, brought into the bounds, each raised to the one before it."""
        divisors = start.log_divisors.double().exp().clamp(self.low, self.high)
        return tuple(divisors.cummax(0).values.tolist())

    def drawn(self, low: float, high: float) -> float:
        """A value from low to high in steps of 0.01; low where none lies between."""
        first, last = math.ceil(low * PER_UNIT), math.floor(high * PER_UNIT)
        return min(max(self.random.randint(first, last) / PER_UNIT, low), high) if first <= last else low

    def children(
        self, parents: Sequence[_Candidate], mutations: int, crossovers: int = 0
    ) -> list[_Candidate]:
        """New candidates from parents, the best of which come first; fewer where none is new."""
        children = []
        for crossed in [False] * mutations + [True] * crossovers:
            child = self.crossover(parents) if crossed else self.mutation(self.random.choice(parents))
            if child is None:
                break
            self.seen.add(child)
            children.append(child)
        return children

    def mutation(self, parent: _Candidate) -> _Candidate | None:
        """A parent with some divisors redrawn between their neighbours."""
        chain = [self.low, *parent.free, self.high]
        for _ in range(EXHAUSTED):
            for i in range(1, len(chain) - 1):
                if self.random.random() < MUTATED:
                    chain[i] = self.drawn(chain[i - 1], chain[i + 1])
            child = _Candidate(parent.critical, tuple(chain[1:-1]))
            if child not in self.seen:
                return child
        return None

    def crossover(self, parents: Sequence[_Candidate]) -> _Candidate | None:
        """The better of two parents with some divisors of the other, as soon as that is new and in order."""
        first, second = (parents[i] for i in sorted(self.random.sample(range(len(parents)), 2)))
        free, divisors = list(first.free), second.divisors
        for _ in range(ATTEMPTS):
            for pair in range(max(first.critical, second.critical), len(divisors)):
                if self.random.random() < EXCHANGED:
                    free[pair - first.critical] = divisors[pair]
                    child = _Candidate(first.critical, tuple(free))
                    if child not in self.seen and free == sorted(free):
                        return child
        return self.mutation(first)


def _evolved(
    breeding: _Breeding, founders: Sequence[_Candidate], problem: Problem, sizes: Sizes
) -> Proposals:
    """The founders, mutations of them up to a population, then generation after generation."""
    a = longrope_attention_factor(problem.factor, problem.rope.original_max_position_embeddings)
    generation = list(dict.fromkeys(founders))
    breeding.seen.update(generation)
    generation += breeding.children(generation, sizes.population - len(generation))
    scored: list[tuple[float, _Candidate]] = []
    while generation:
        for candidate in generation:
            score = yield candidate.vector(a)
            scored.append((score, candidate))
        scored = sorted(scored, key=lambda entry: entry[0])[: sizes.parents]
        parents = [candidate for _, candidate in scored]
        generation = breeding.children(parents, sizes.mutations, sizes.crossovers)
