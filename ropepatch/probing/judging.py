"""Which hypothesis explains the next-token probabilities of an engine, by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ropepatch.model.mistakes import DOUBLED, FACTORLESS, MISREAD, TWICE, UNSCALED
from ropepatch.model.reading_file import RIGHT, Reading

Top = dict[int, float]  # log-probabilities in nats of the most probable tokens

OTHER_MODEL, CUT_OFF, UNDECIDED = "another model", "cut off", "undecided"
WORDS = {
    RIGHT: "computes it",
    UNSCALED: "leaves the model unscaled",
    TWICE: "applies the scaling twice",
    FACTORLESS: "leaves the attention factor out",
    DOUBLED: "doubles the factor",
    MISREAD: "misreads the original length",
    OTHER_MODEL: "another model: it differs within the old window, too",
    UNDECIDED: "undecided",
}
TINY = 1e-6  # the least probability of all other tokens together
FLOOR = 2e-3  # nats: below it no difference counts as one
FOREIGN = 0.1  # nats within the old window: no precision explains more
NOISY = 0.02  # nats within the old window: more than 8 bits a weight explain
WORSE = 8  # times the noise within the old window, which what is beyond may have
CLOSER = 10  # times nearer than any other hypothesis: whatever the noise
EQUAL = 1e-4  # nats: two hypotheses explain an answer alike
FEW = 4  # answers on each side of the window at least
CHANCE = 0.01  # that two hypotheses which explain the answers alike differ as much


@dataclass(frozen=True)
class Judgement:
    """What an engine makes of a checkpoint.

    Args:
        verdict: A hypothesis, `another model`, `cut off` or `undecided`.
        why: In a sentence.
        noise: The typical divergence from that hypothesis within the old window, in nats.
        beyond: The same beyond it.
        divergences: From every hypothesis, at every position; None where there is no answer.
        limit: Of an engine that is cut off, the most tokens it reads.
    """

    verdict: str
    why: str
    noise: float
    beyond: float
    divergences: dict[str, tuple[float | None, ...]]
    limit: int | None = None

    @property
    def is_right(self) -> bool:
        """Whether the engine computes the checkpoint."""
        return self.verdict == RIGHT

    def __str__(self) -> str:
        words = f"cut off at {self.limit} tokens" if self.verdict == CUT_OFF else WORDS[self.verdict]
        return f"{words}: {self.why}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        numbers = {"noise": _finite(self.noise), "beyond": _finite(self.beyond), "limit": self.limit}
        return {"verdict": self.verdict, "why": self.why} | numbers | {"divergences": self.divergences}


def divergence(expected: Top, got: Top) -> float:
    """The Kullback-Leibler divergence in nats from what is expected to what came, at least.

    Tokens that neither lists count as one. One that a single list holds is at most as probable in the other
    as the least probable token there.
    """
    total, rests = 0.0, [1.0, 1.0]
    least, floor = min(expected.values()), min(got.values())
    for token in expected.keys() | got.keys():
        p = expected.get(token, min(least, got.get(token, 0.0)))
        q = got.get(token, min(floor, expected.get(token, 0.0)))
        total += math.exp(p) * (p - q)
        rests = [rests[0] - math.exp(p), rests[1] - math.exp(q)]
    p, q = (max(rest, TINY) for rest in rests)
    return max(0.0, total + p * math.log(p / q))


def judge(reading: Reading, answers: Sequence[Top | None], limit: int | None = None) -> Judgement:
    """Decide which hypothesis explains the answers of an engine.

    The noise is that within the old window, in the same engine: whatever its precision is.

    Args:
        reading: What the checkpoint should say, and what by mistake.
        answers: The most probable next tokens at each position of the reading; None for no answer.
        limit: The most tokens that the engine reads, if it is cut off.
    """
    tables = {
        name: tuple(None if got is None else divergence(tops.at(row), got) for row, got in enumerate(answers))
        for name, tops in reading.tops.items()
    }
    within = {name: _of(table, reading.beyond, False) for name, table in tables.items()}
    beyond = {name: _of(table, reading.beyond, True) for name, table in tables.items()}
    middle = {name: typical(values) for name, values in beyond.items()}
    best = min(tables, key=lambda name: typical(within[name] + beyond[name]))
    noise = typical(within[best])

    def verdict(name: str, why: str, limit: int | None = None) -> Judgement:
        return Judgement(name, why, noise, middle[best], tables, limit)

    if len(within[best]) < FEW:
        return verdict(UNDECIDED, f"{len(within[best])} answers within the old window, expected {FEW}")
    nearest = min(map(typical, within.values()))
    if nearest > FOREIGN:
        noise = nearest
        return verdict(OTHER_MODEL, f"by {noise:.2g} nats at {reading.window} tokens and before")
    if limit is not None and limit < reading.target:
        return verdict(CUT_OFF, f"the checkpoint reads {reading.target}", limit)
    if len(beyond[best]) < FEW:
        return verdict(UNDECIDED, f"{len(beyond[best])} answers beyond the old window, expected {FEW}")
    others = [middle[name] for name in tables if name != best]
    allowed = max(FLOOR, WORSE * noise, min(others, default=0.0) / CLOSER)
    if middle[best] > allowed:
        near = f"beyond the old window it differs by {middle[best]:.2g} nats from {_named(best)}"
        return verdict(UNDECIDED, f"{near}, the nearest, within it by {noise:.2g}: no mistake that is known")
    for rival in tables:
        if rival != best and not _beats(tables[best], tables[rival]):
            return verdict(UNDECIDED, f"{_named(best)} explains it no better than {_named(rival)} does")
    if best == RIGHT and UNSCALED in reading.alike:
        return verdict(UNDECIDED, "unscaled it would answer the same: the rope does not show in this text")
    largest = f"typically {middle[best]:.1g}, largest {max(beyond[best]):.1g} nats beyond the old window"
    why = f"{largest}, {noise:.1g} and {max(within[best]):.1g} within it"
    if best == RIGHT and reading.alike:
        why += f"; the same answers would come from: {', '.join(reading.alike)}"
    if noise > NOISY:
        why += "; that is more than 8 bits a weight explain: fewer bits, or other weights"
    return verdict(best, why)


def _of(table: tuple[float | None, ...], beyond: list[bool], side: bool) -> list[float]:
    pairs = zip(table, beyond, strict=True)
    return [value for value, is_beyond in pairs if value is not None and is_beyond == side]


def typical(values: Sequence[float]) -> float:
    """Average divergences by their roots: no single position decides, and certain ones do not hide others."""
    return (sum(map(math.sqrt, values)) / len(values)) ** 2 if values else math.inf


def _beats(best: tuple[float | None, ...], rival: tuple[float | None, ...]) -> bool:
    """Whether the better of two hypotheses is better than chance explains: Wilcoxon's signed ranks."""
    pairs = [(one, two) for one, two in zip(best, rival, strict=True) if one is not None and two is not None]
    differing = [math.sqrt(two) - math.sqrt(one) for one, two in pairs if abs(one - two) > EQUAL]
    if len(differing) < FEW:
        return False
    from scipy.stats import wilcoxon  # half a second, which extend does not need

    return bool(wilcoxon(differing, alternative="greater").pvalue < CHANCE)


def _named(name: str) -> str:
    return "the checkpoint" if name == RIGHT else name


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
