"""What scalings find of the same questions, and whether one of them is seen to find more than another."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ropepatch.evaluation.grid import wilson
from ropepatch.evaluation.results import Result, Row
from ropepatch.evaluation.tasks import task_of

HALF = 0.5  # of a kind the share that the model as it is must find within its trained context


@dataclass(frozen=True)
class Answers:
    """What one scaling finds at the target.

    Attributes:
        kinds: By kind of question a row with ``share`` and ``n``, and of every prompt what is ``found`` of
            how much is ``wanted``, where that was kept.
    """

    kinds: Mapping[str, Row]

    @property
    def share(self) -> float:
        """The mean of the shares of the kinds."""
        return fmean(row["share"] for row in self.kinds.values())

    @property
    def n(self) -> int:
        """How many questions that were."""
        return sum(row["n"] for row in self.kinds.values())

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the share, as of questions that are answered wholly or not at all."""
        return wilson(self.share * self.n, self.n)

    def against(self, other: Answers) -> tuple[float, float]:
        """How many questions this one answers and the other does not, and the other way round.

        A part of an answer counts as a part of a question. Where it was not kept what each prompt gave, as
        many are taken to differ as can be.
        """
        pairs = [_differing(row, other.kinds[kind]) for kind, row in self.kinds.items()]
        more, less = (math.fsum(counts) for counts in zip(*pairs, strict=True))
        return more, less

    def finds_more_than(self, other: Answers) -> bool:
        """Whether it is seen to answer more of the same questions: McNemar's exact test, 5 %, two-sided.

        Of the questions that only one of the two answers, chance gives each as many to one as to the other.
        Below six such questions nothing is seen.
        """
        more, less = self.against(other)
        mine, others = math.floor(round(more, 6)), math.ceil(round(less, 6))
        outcomes = (math.comb(mine + others, count) for count in range(mine, mine + others + 1))
        return 40 * sum(outcomes) <= 1 << (mine + others)


def answers(
    results: Sequence[Result], *, base: str, labels: Sequence[str]
) -> tuple[dict[str, Answers], bool]:
    """What each scaling finds at the target, and whether that can rank them.

    A kind of question counts if the model as it is answers it within its trained context: at some length
    there it finds at least half, and more than guessing would (the 95 % interval lies above chance). A kind
    that not all were asked, with the same prompts, does not count.

    Args:
        results: Of several tasks of retrieval; of one task the first result of each label counts.
        base: The label of the model as it is.
        labels: What is ranked.

    Returns:
        By label the answers to the kinds that count. If none do, those to all that were asked at the target,
        and that these cannot rank.
    """
    asked: dict[str, dict[str, Row]] = {label: {} for label in labels}
    counted: set[str] = set()
    tasks: dict[str, dict[str, Result]] = {}
    for result in results:
        tasks.setdefault(result.task, {}).setdefault(result.label, result)
    for by_label in tasks.values():
        for label in asked.keys() & by_label.keys():
            result = by_label[label]
            rows = task_of(result.task).questions(result)
            asked[label] |= {row["kind"]: row for row in rows if row["length"] == result.target}
        alike = {
            json.dumps(result.parameters, sort_keys=True, default=str)
            for label, result in by_label.items()
            if label in asked
        }
        if asked.keys() <= by_label.keys() and len(alike) == 1:
            own = by_label[base]
            counted |= {
                row["kind"]
                for row in task_of(own.task).questions(own)
                if row["length"] <= own.model["trained"]
                and row["share"] >= HALF
                and row["interval"][0] > row["chance"]
            }
    counted = {kind for kind in counted if all(kind in kinds for kinds in asked.values())}
    return {
        label: Answers({kind: row for kind, row in kinds.items() if kind in counted or not counted})
        for label, kinds in asked.items()
        if kinds
    }, bool(counted)


def _differing(mine: Row, other: Row) -> tuple[float, float]:
    if "found" in mine and "found" in other:
        pairs = zip(mine["found"], other["found"], strict=True)
        parts = [(a - b) / mine["wanted"] for a, b in pairs]
        return math.fsum(part for part in parts if part > 0), -math.fsum(part for part in parts if part < 0)
    (a, n), (b, m) = ((row["share"] * row["n"], row["n"]) for row in (mine, other))
    return min(a, m - b), min(b, n - a)
