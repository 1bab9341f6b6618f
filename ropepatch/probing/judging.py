"""Which hypothesis explains the next-token probabilities of an engine, by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from ropepatch.probing.reading import (
    DOUBLED,
    FACTORLESS,
    MISREAD,
    RIGHT,
    TWICE,
    UNSCALED,
    Reading,
    Top,
)

OTHER_MODEL, CUT_OFF, UNDECIDED = "another model", "cut off", "undecided"
WORDS = {
    RIGHT: "applies the RoPE scaling",
    UNSCALED: "ignores the RoPE scaling",
    TWICE: "applies the RoPE scaling twice",
    FACTORLESS: "omits the attention factor",
    DOUBLED: "doubles the scaling factor",
    MISREAD: "uses a wrong original context length",
    OTHER_MODEL: "has other weights than the checkpoint",
    CUT_OFF: "truncates prompts",
    UNDECIDED: "undecided",
}
ADVICE = "compare the engine's RoPE parameters with config.json, or serve weights of at least 8 bits"
TINY = 1e-6  # least probability of several tokens together
FLOOR = 2e-3  # nats: smaller divergences count as none
FOREIGN = 0.1  # nats within the original length: more than any precision explains
NOISY = 0.02  # nats within the original length: more than 8 bits per weight explain
WORSE = 8  # times the noise within the original length that a known error may differ beyond it
# Times the divergence of the right RoPE in 16 bits that a right server may have
ROUNDED = 3
CLOSER = 10  # times nearer than any other hypothesis: a known error whatever the noise
EQUAL = 1e-4  # nats: two hypotheses explain an answer equally well
FEW = 4  # answers needed within and beyond the original length
CHANCE = 0.01  # significance level at which one hypothesis beats another

Divergences = tuple[float | None, ...]  # at each position; None for no answer


@dataclass(frozen=True)
class Judgement:
    """Whether an engine applies a checkpoint's RoPE scaling.

    Args:
        verdict: A hypothesis, `another model`, `cut off` or `undecided`.
        why: The reason, in a few words.
        noise: The typical KL divergence from that hypothesis within the original context length, in nats.
        beyond: The typical KL divergence beyond the original context length, in nats.
        divergences: The KL divergence from every hypothesis at every position; None for no answer.
        limit: The longest prompt that the engine reads, in tokens; None if it reads all.
        refuses: Whether it refuses longer prompts, instead of truncating them.
        engine: How the verdict names the engine.
    """

    verdict: str
    why: str
    noise: float
    beyond: float
    divergences: dict[str, Divergences]
    limit: int | None = None
    refuses: bool = False
    engine: str = "the server"

    @property
    def is_right(self) -> bool:
        """Whether the engine applies the RoPE scaling."""
        return self.verdict == RIGHT

    def __str__(self) -> str:
        if self.verdict == UNDECIDED:
            return f"UNDECIDED: {self.why}"
        if self.is_right and self.refuses:
            return f"OK up to {self.limit:,} tokens; {self.engine} refuses the next prompt ({self.why})"
        return f"{'OK' if self.is_right else 'WRONG'}: {self.engine} {WORDS[self.verdict]} ({self.why})"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "verdict": self.verdict,
            "why": self.why,
            "noise": self.noise if math.isfinite(self.noise) else None,
            "beyond": self.beyond if math.isfinite(self.beyond) else None,
            "limit": self.limit,
            "divergences": self.divergences,
        }


def divergence(expected: Top, got: Top) -> float:
    """Return a lower bound of the KL divergence (nats) of an answer from the expected distribution.

    A token missing from one list is at most as probable as the least probable token in it. Tokens of which
    this says nothing count as one.
    """
    common = expected.keys() & got.keys()
    total = sum(
        math.exp(expected[token]) * (expected[token] - got[token]) for token in common
    )
    p_rest = max(TINY, 1.0 - sum(math.exp(expected[token]) for token in common))
    q_rest = max(TINY, 1.0 - sum(math.exp(got[token]) for token in common))
    p, q_most = _only_in(expected, got)
    q, p_most = _only_in(got, expected)
    of_expected = _of_parts(p, min(q_most, q_rest * p / p_rest), p_rest, q_rest)
    of_got = _of_parts(min(p_most, p_rest * q / q_rest), q, p_rest, q_rest)
    return max(0.0, total + max(of_expected, of_got))


def _only_in(one: Top, other: Top) -> tuple[float, float]:
    """Return the probability of tokens that are less probable in another list, and the most it is there."""
    least = min(other.values())
    tokens = [token for token in one.keys() - other.keys() if one[token] > least]
    return sum(math.exp(one[token]) for token in tokens), len(tokens) * math.exp(least)


def _of_parts(p: float, q: float, p_rest: float, q_rest: float) -> float:
    """Return the share in the KL divergence of a part of the rest, and of what is left of it."""
    share = p * math.log(p / max(q, TINY)) if p > 0 else 0.0
    p_left, q_left = max(p_rest - p, TINY), max(q_rest - q, TINY)
    return share + p_left * math.log(p_left / q_left)


def divergences(expected: Sequence[Top], got: Sequence[Top | None]) -> Divergences:
    """Return the `divergence` at each position; None for no answer."""
    return tuple(
        None if answer is None else divergence(top, answer)
        for top, answer in zip(expected, got, strict=True)
    )


def typical(values: Sequence[float]) -> float:
    """Average divergences by their square roots, so that no single position dominates."""
    return (sum(map(math.sqrt, values)) / len(values)) ** 2 if values else math.inf


def judge(
    reading: Reading,
    answers: Sequence[Top | None],
    limit: int | None = None,
    *,
    refuses: bool = False,
) -> Judgement:
    """Decide which hypothesis explains the answers of an engine.

    Args:
        reading: The expected distributions, of the right RoPE and of each common error.
        answers: The most probable next tokens at each position of the fingerprint; None for no answer.
        limit: The longest prompt that the engine reads, in tokens; None if it reads all.
        refuses: Whether it refuses longer prompts, instead of truncating them.
    """
    tables = {name: divergences(tops, answers) for name, tops in reading.tops.items()}
    is_within = [not is_beyond for is_beyond in reading.beyond]
    within = {name: _at(table, is_within) for name, table in tables.items()}
    beyond = {name: _at(table, reading.beyond) for name, table in tables.items()}
    middle = {name: typical(values) for name, values in beyond.items()}
    best = min(tables, key=lambda name: typical(within[name] + beyond[name]))
    noise = typical(within[best])

    def verdict(name: str, why: str) -> Judgement:
        if refuses and name != RIGHT:
            why += f"; the server refuses more than {limit:,} tokens"
        return Judgement(name, why, noise, middle[best], tables, limit, refuses)

    def too_few(count: int, where: str) -> Judgement:
        return verdict(UNDECIDED, f"{count} answers {where}, expected at least {FEW}")

    if len(within[best]) < FEW:
        return too_few(len(within[best]), "within the original context length")
    nearest = min(map(typical, within.values()))
    if nearest > FOREIGN:
        noise = nearest
        return verdict(
            OTHER_MODEL,
            f"typical KL divergence {noise:.2g} nats up to {reading.window} tokens",
        )
    if limit is not None and limit < reading.target and not refuses:
        short = f"to at most {limit} tokens, the checkpoint supports {reading.target}"
        return verdict(CUT_OFF, short)
    if len(beyond[best]) < FEW:
        where = f"beyond the original {reading.window:,} tokens"
        return too_few(len(beyond[best]), where)
    others = [middle[name] for name in tables if name != best]
    precision = typical(_at(reading.rounded, reading.beyond))  # what 16 bits explain
    allowed = max(FLOOR, ROUNDED * precision)
    if best != RIGHT:
        allowed = max(allowed, WORSE * noise, min(others) / CLOSER)
    if middle[best] > allowed:
        near = f"no known error fits, the nearest hypothesis is {named(best)}"
        far = f"typical KL divergence {middle[best]:.2g} nats beyond {reading.window} tokens"
        explained = f"{noise:.2g} within, precision explains {allowed:.2g}"
        return verdict(UNDECIDED, f"{near} ({far}, {explained}); {ADVICE}")
    for rival in tables:
        if rival != best and not _beats(tables[best], tables[rival]):
            same = f"{named(best)} and {named(rival)} fit equally well"
            return verdict(UNDECIDED, f"{same}; {ADVICE}")
    if best == RIGHT and UNSCALED in reading.alike:
        same = "with or without RoPE scaling this model predicts the same here"
        return verdict(UNDECIDED, same)
    why = f"KL divergence up to {max(beyond[RIGHT]):.3g} nats beyond {reading.window} tokens"
    if best != RIGHT:
        why += f", up to {max(beyond[best]):.3g} from a server with this error"
    elif reading.alike:
        why += f"; not distinguishable here: {', '.join(reading.alike)}"
    if noise > NOISY:
        why += f"; {noise:.2g} within: below 8 bits per weight, or other weights"
    return verdict(best, why)


def _at(table: Sequence[float | None], chosen: Sequence[bool]) -> list[float]:
    """Return the divergences at the chosen positions, where there is an answer."""
    return [value for value in compress(table, chosen) if value is not None]


def _beats(best: Divergences, rival: Divergences) -> bool:
    """Return whether one hypothesis is significantly better than another (Wilcoxon signed-rank test)."""
    differing = [
        math.sqrt(two) - math.sqrt(one)
        for one, two in zip(best, rival, strict=True)
        if one is not None and two is not None and abs(one - two) > EQUAL
    ]
    if len(differing) < FEW:
        return False
    # half a second to import, which extend does not need
    from scipy.stats import wilcoxon

    return bool(wilcoxon(differing, alternative="greater").pvalue < CHANCE)


def named(name: str) -> str:
    """Return how a hypothesis is called in a sentence."""
    return "the checkpoint" if name == RIGHT else name
