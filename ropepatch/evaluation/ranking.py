"""Which scaling reads a target best: from the results of a comparison, with the doubt that they leave."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ropepatch.attention import MAPS, AttentionMap
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.advice import advise
from ropepatch.evaluation.answers import Answers, answers
from ropepatch.evaluation.curves import Perplexity, difference
from ropepatch.evaluation.results import Result, document_sums, finite, mean_nats
from ropepatch.evaluation.table import enumeration
from ropepatch.evaluation.tasks import task_of

Interval = tuple[float, float]

RULE = (
    "Retrieval first, then loss. A scaling can be recommended if it is seen to beat the model as it is in "
    "what it finds at the target or in its loss over the target, and is not seen to be worse in the other. "
    "Of these, those come first that are not seen to find less than the one that finds the most (the same "
    "questions to all, McNemar's exact test, 5 %). Of these, those come first whose loss this text does not "
    "tell from the least among them (95 % interval of the difference, text by text); of these, the one that "
    "finds the most, then the one with the least loss within the trained context. Only kinds of question "
    "count of which the model as it is finds at least half, and more than by guessing, within its trained "
    "context; where there are none, loss alone decides."
)


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One scaling at the target.

    Attributes:
        label: Its name in the results.
        nats: Mean loss over the whole target, nats per token.
        interval: The 95 % interval of that mean.
        behind: By how much it is behind the first of the ranking, in nats, and the 95 % interval of that,
            text by text.
        inside: Mean loss within the trained context.
        price: By how much that is above the loss of the model as it is, in nats, and the 95 % interval of
            that, text by text; infinite for results without the sums of each text within that context.
        found: The share of what is asked for that it finds at the target, the mean of the kinds of question
            that count (see `answers`), and its 95 % interval; None if nothing was asked there.
        asked: How many questions that were.
        front: Whether no other is at least as good in all of nats, found and inside and better in one; what
            is found counts where it can rank.
    """

    label: str
    nats: float
    interval: Interval
    behind: float
    behind_interval: Interval
    inside: float
    price: float
    price_interval: Interval
    found: float | None
    found_interval: Interval | None
    asked: int
    front: bool

    @property
    def tied(self) -> bool:
        """Whether the texts do not tell its loss from that of the first."""
        low, high = self.behind_interval
        return low <= 0 <= high


@dataclass(frozen=True)
class Ranking:
    """The scalings, best first, and the advice that follows.

    Attributes:
        rows: Best first.
        recommended: The label to take; None where none of the scalings helps.
        advice: Why, in sentences.
    """

    rows: tuple[Ranked, ...]
    recommended: str | None
    advice: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """The same for JSON, which has no infinity: None stands for it."""
        record: dict[str, Any] = _finite(asdict(self))
        return record


@dataclass(frozen=True)
class Standing:
    """What a ranking knows of each label.

    Attributes:
        base: The label of the model as it is.
        reading: The results of perplexity.
        sums: The loss of every text over the target.
        found: What is found at the target, of those that were asked.
        finding: Whether that ranks.
    """

    base: str
    reading: Mapping[str, Result]
    sums: Mapping[str, Perplexity]
    found: Mapping[str, Answers]
    finding: bool

    def nats(self, label: str) -> float:
        """The loss over the target; infinite where it is no number."""
        mean = self.sums[label].mean
        return math.inf if math.isnan(mean) else mean

    def gain(self, label: str, over: str) -> tuple[float, Interval]:
        """By how much less it loses over the target than another, in nats per token, text by text."""
        return difference(self.sums[over], self.sums[label])

    def finds_more(self, label: str, than: str) -> bool:
        """Whether it is seen to find more than another, where that ranks."""
        return self.finding and self.found[label].finds_more_than(self.found[than])

    def beats(self, label: str) -> bool:
        """Whether it is seen to beat the model as it is in one of the two measures."""
        return self.gain(label, self.base)[1][0] > 0 or self.finds_more(label, self.base)

    def helps(self, label: str) -> bool:
        """Whether it beats the model as it is, and is not seen to be worse in the other measure."""
        worse = not self.gain(label, self.base)[1][1] >= 0  # nor if it is no number
        return self.beats(label) and not worse and not self.finds_more(self.base, label)

    def levels(self, labels: Collection[str]) -> list[list[str]]:
        """Those not seen to find less than the one that finds the most, by their loss; then of the rest."""
        left, levels = sorted(labels, key=self.nats), []
        while left:
            most = max(left, key=lambda label: self.found[label].share if self.finding else 0.0)
            levels.append([label for label in left if not self.finds_more(most, label)])
            left = [label for label in left if label not in levels[-1]]
        return levels

    def rows(self) -> list[Ranked]:
        """Every label, the best first."""
        order = [label for level in self.levels(self.sums) for label in level]
        inside = {label: _inside(result) for label, result in self.reading.items()}
        shares = {label: -self.found[label].share if self.finding else 0.0 for label in order}
        front = _front({label: (self.nats(label), inside[label], shares[label]) for label in order})
        rows = []
        for label in order:
            behind, interval = difference(self.sums[label], self.sums[order[0]])
            price, price_interval = _price(self.reading[label], self.reading[self.base])
            found = self.found.get(label)
            rows.append(
                Ranked(
                    label=label,
                    nats=self.nats(label),
                    interval=self.sums[label].interval,
                    behind=behind,
                    behind_interval=interval,
                    inside=inside[label],
                    price=price,
                    price_interval=price_interval,
                    found=found.share if found else None,
                    found_interval=found.interval if found else None,
                    asked=found.n if found else 0,
                    front=label in front,
                )
            )
        return rows


def rank(results: Sequence[Result], *, base: str, ignored: Sequence[str] = ()) -> Ranking:
    """Rank the scalings of one model at one target: by what they find there, then by their loss over it.

    Loss does not tell what a model finds (OlmPool, arXiv:2608.10296, of the loss of short texts). So what is
    found decides where it can: where the model as it is finds such things within its trained context, and
    where the questions are enough to tell two scalings apart. Five never are; twenty tell 20 found from 14.
    Where it cannot, loss decides, of which every token tells. A scaling that gains in one and is seen to lose
    in the other, against the model as it is, is ranked and not recommended (`RULE`). Neither is a control, an
    attention map that forgets.

    The rows: those not seen to find less than the one that finds the most, by their loss; then the same of
    the rest, and so on.

    Args:
        results: Of one-pass perplexity, and of passkeys and retrieval if these were asked for. Where several
            of one task have a label, as of two passkey tasks, the first of them ranks.
        base: The label of the model as it is.
        ignored: Labels that are no scalings.

    Raises:
        RopepatchError: No scaling, no base, or results that are not of the same texts.
    """
    reading: dict[str, Result] = {}
    asking: list[Result] = []
    for result in results:
        if result.label not in ignored:
            role = task_of(result.task).ranks
            if role == "loss":
                reading.setdefault(result.label, result)
            elif role == "retrieval":
                asking.append(result)
    if base not in reading or len(reading) < 2:
        raise RopepatchError("nothing to rank: need the model as it is and at least one scaling")
    if len({r.parameters["digest"] for r in reading.values()}) > 1:
        raise RopepatchError("the results are of different texts", hint="compare them in one suite")
    sums = {label: document_sums(result) for label, result in reading.items()}
    standing = Standing(base, reading, sums, *answers(asking, base=base, labels=list(reading)))
    rows = standing.rows()
    maps = {label for label, result in reading.items() if _map_of(result)}
    controls = [row.label for row in rows if (kind := _map_of(reading[row.label])) and kind.control]

    def without(labels: Collection[str]) -> Ranking:
        if reading.keys() <= {base, *labels}:
            return Ranking((), None, ())
        return rank(results, base=base, ignored=[*ignored, *labels])

    if controls:
        others = without(controls)
        aside = f"{enumeration(controls)} is a control, which forgets what is far: nothing to take."
        return Ranking(tuple(rows), others.recommended, (*others.advice, aside))
    taken, advice = advise(standing, rows)
    if taken in maps:
        plain = without(maps).recommended
        only = f"Only transformers runs {taken}, by code that comes with the checkpoint"
        if plain:
            only += f"; the best that other engines run, too, is {plain}, "
            only += f"{standing.nats(plain) - standing.nats(taken):+.3f} nats over the target"
        advice += (f"{only}.",)
    return Ranking(tuple(rows), taken, advice)


def _map_of(result: Result) -> type[AttentionMap] | None:
    return MAPS.get((result.scaling or {}).get("method", ""))


def _front(figures: Mapping[str, tuple[float, ...]]) -> set[str]:
    """The labels that no other is at least equal to in every figure, less being better, and unlike in one."""

    def beaten(mine: tuple[float, ...]) -> bool:
        return any(
            other != mine and all(a <= b for a, b in zip(other, mine, strict=True))
            for other in figures.values()
        )

    return {label for label, mine in figures.items() if not beaten(mine)}


def _inside(result: Result) -> float:
    rows = [row for row in result.tables["by_position"] if row["end"] <= result.model["trained"]]
    return mean_nats(rows)


def _price(result: Result, base: Result) -> tuple[float, Interval]:
    """The loss within the trained context above that of the model as it is; see `Ranked.price`."""
    if all("by_document_inside" in measured.tables for measured in (result, base)):
        return difference(*(document_sums(measured, "by_document_inside") for measured in (result, base)))
    return _inside(result) - _inside(base), (-math.inf, math.inf)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return finite(value) if isinstance(value, float) else value
