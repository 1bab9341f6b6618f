"""Ranks methods at a target length by paired differences from the baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ropepatch.attention import REMAPPINGS
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.intervals import Mean, difference, significant, summed
from ropepatch.evaluation.results import BASELINE, FLOOR, Result, few, not_counted

RULE = (
    "All differences are paired by document or by prompt. "
    "The measures are the loss, and the answer log-prob of each kind of question that counts, at the target "
    "length. "
    "A kind counts if the baseline answers more of it than by guessing within its original length (95 % "
    "interval). "
    "A method is better in a measure if it beats the baseline at an error rate of 5 % over all methods and "
    "measures (t-tests, Holm). "
    "It is worse if the baseline beats it at 5 % in that measure alone: further methods hide no harm. "
    "A method can be recommended if it is better in one measure and worse in none. "
    "Of these, the highest answer log-prob comes first, averaged over the kinds that count. "
    "Those not significantly below it (5 %, each alone) are ordered by loss. "
    "If no kind counts, loss decides. "
    "A loss within the original length that is significantly higher (5 %, alone) excludes no method, but the "
    "recommendation names it. "
    "Accuracy does not rank; its differences are tested by sign flips, exactly. "
    "With fewer than three documents no method is recommended."
)


LOSS = "loss"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers of one method to one kind of question, at the target length.

    Attributes:
        found: The retrieval accuracy, by prompt.
        log_prob: The answer log-prob in nats per token, by prompt.
        log_prob_gain: Its difference from the baseline's, paired by prompt.
    """

    found: Mean
    log_prob: Mean
    log_prob_gain: Mean


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One method at the target length.

    Attributes:
        label: Its name in the results.
        loss: The loss over the whole target length in nats per token, by document.
        loss_gain: The baseline's loss minus its loss, paired by document.
        short_context_loss: The loss within the original context length.
        short_context_cost: That loss minus the baseline's, paired by document.
        answers: The answers at the target length, by kind of question; empty without retrieval.
        better: The measures in which it is better than the baseline by `RULE`: loss, or a kind of question.
        worse: The measures in which it is worse.
        taught: The kinds of questions that its training asked.
    """

    label: str
    loss: Mean
    loss_gain: Mean
    short_context_loss: Mean
    short_context_cost: Mean
    answers: Mapping[str, Answers]
    better: tuple[str, ...] = ()
    worse: tuple[str, ...] = ()
    taught: tuple[str, ...]

    @property
    def helps(self) -> bool:
        """Whether it is better than the baseline in one measure and worse in none."""
        return bool(self.better) and not self.worse and not self.loss.missing

    def gain(self, measure: str) -> Mean:
        """Its gain over the baseline in a measure: the loss, or the log-prob of a kind of question."""
        return (
            self.loss_gain if measure == LOSS else self.answers[measure].log_prob_gain
        )

    def columns(self) -> dict[str, Any]:
        """A flat record: one number per column, each interval as two columns."""
        means = {
            "nats_per_token": self.loss,
            "loss_gain": self.loss_gain,
            "short_context_nats_per_token": self.short_context_loss,
            "short_context_cost": self.short_context_cost,
        }
        prompts = 0
        for kind, answers in self.answers.items():
            means[f"{kind}_found"] = answers.found
            means[f"{kind}_log_prob"] = answers.log_prob
            means[f"{kind}_log_prob_gain"] = answers.log_prob_gain
            prompts = len(answers.found.clusters)
        columns: dict[str, Any] = {"label": self.label}
        for name, mean in means.items():
            value, low, high, _ = mean.figures
            columns |= {name: value, f"{name}_low": low, f"{name}_high": high}
        return columns | {
            "tokens": round(self.loss.weight),
            "documents": len(self.loss.clusters),
            "prompts": prompts,
            "better": ", ".join(self.better),
            "worse": ", ".join(self.worse),
            "helps": self.helps,
        }


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The methods, best first.

    Attributes:
        original: The original context length in tokens.
        target: The target length in tokens.
        rows: Best first, with the baseline.
        remappings: The labels of position remappings, which only transformers runs.
        controls: The labels of those that ignore distant tokens, which are never recommended.
        not_counted: For each kind of question that does not count, the reason; see `RULE`.
        not_measured: For each kind of question that was left out, the reason.
        warnings: Reasons to doubt the order.
    """

    original: int
    target: int
    rows: tuple[Ranked, ...]
    remappings: tuple[str, ...]
    controls: tuple[str, ...]
    not_counted: Mapping[str, str]
    not_measured: Mapping[str, str]
    warnings: tuple[str, ...]

    @property
    def kinds(self) -> list[str]:
        """The kinds of questions that count; without any, the loss decides."""
        return [kind for kind in self.rows[0].answers if kind not in self.not_counted]

    @property
    def helping(self) -> list[Ranked]:
        """The methods that can be recommended."""
        return [
            row for row in self.rows if row.helps and row.label not in self.controls
        ]

    @property
    def best(self) -> Ranked | None:
        """The method to use; None if no method helps."""
        return _best(self.helping, self.kinds)

    @property
    def recommended(self) -> str | None:
        """The label of the method to use; None if no method helps."""
        return None if self.best is None else self.best.label

    @property
    def best_scaling(self) -> Ranked | None:
        """The best of the methods that other engines than transformers may support."""
        scalings = [row for row in self.helping if row.label not in self.remappings]
        return _best(scalings, self.kinds)

    def verdict(self, row: Ranked, kind: str) -> str:
        """Better, worse, not told apart or not counted in a kind of question; "" for the baseline."""
        if kind in self.not_counted:
            return "not counted"
        if row.label == BASELINE:
            return ""
        if kind in row.better:
            return "better"
        return "worse" if kind in row.worse else "not told apart"

    def more_accurate(self, row: Ranked, kind: str) -> dict[str, Mean]:
        """The methods with a higher accuracy than one, by how much."""
        own = row.answers[kind].found
        gaps = {
            other.label: difference(other.answers[kind].found, own)
            for other in self.rows
        }
        return {label: gap for label, gap in gaps.items() if gap.value > 0}

    def record(self) -> dict[str, Any]:
        """The ranking as JSON-ready data."""
        return {
            "recommended": self.recommended,
            "rows": [row.columns() for row in self.rows],
            "not_counted": dict(self.not_counted),
            "warnings": list(self.warnings),
        }


def rank(results: Sequence[Result]) -> Ranking:
    """Rank the methods of one model at one target length by `RULE`.

    Loss does not predict retrieval (OlmPool, arXiv:2608.10296, for the loss on short texts), so retrieval
    ranks first where possible. A control, a position remapping that ignores distant tokens, is never
    recommended. With fewer than three prompts the answers have no effect.

    Args:
        results: Results of one-pass perplexity, and of retrieval if it was measured. If several results of a
            task have the same label, the first of them ranks.

    Raises:
        RopepatchError: If there is no baseline or no method, or the results differ in texts or precision.
    """
    reading, asking = _comparable(results)
    first = reading[BASELINE]
    warnings = few(first)
    uncounted, left_out, asked = {}, {}, list[str]()
    if asking:
        base = asking[BASELINE]
        warnings += few(base)
        uncounted = not_counted(base)
        left_out = base.parameters.get("left_out", {})
        asked = [row.at["kind"] for row in base.of("found", "kind", "length")]
    kinds = [kind for kind in dict.fromkeys(asked) if kind not in uncounted]
    rows = [_ranked(label, reading, asking, asked) for label in reading]
    remappings = {}
    for label, result in reading.items():
        method = result.scaling["method"] if result.scaling else ""
        if method in REMAPPINGS:
            remappings[label] = REMAPPINGS[method]
    return Ranking(
        original=first.model["trained"],
        target=first.target,
        rows=tuple(ordered(_judged(rows, kinds), kinds)),
        remappings=tuple(remappings),
        controls=tuple(label for label, kind in remappings.items() if kind.control),
        not_counted=uncounted,
        not_measured=left_out,
        warnings=tuple(warnings),
    )


def _best(rows: Sequence[Ranked], kinds: Sequence[str]) -> Ranked | None:
    return next(iter(ordered(rows, kinds)), None)


def ordered(rows: Sequence[Ranked], kinds: Sequence[str]) -> list[Ranked]:
    """The best first; methods not significantly below the best answer log-prob are ordered by loss."""
    by_loss = sorted(rows, key=lambda row: row.loss.value)
    if not kinds or not rows:
        return by_loss
    log_probs = {
        row.label: summed([row.answers[kind].log_prob for kind in kinds])
        for row in by_loss
    }
    best = max(log_probs.values(), key=lambda log_prob: log_prob.value)

    def behind(row: Ranked) -> float:
        own = log_probs[row.label]
        return -own.value if difference(best, own).differs else -math.inf

    return sorted(by_loss, key=behind)


def _comparable(
    results: Sequence[Result],
) -> tuple[dict[str, Result], dict[str, Result]]:
    """The perplexity and the retrieval results by label; the latter empty unless every method has one."""
    reading: dict[str, Result] = {}
    asking: dict[str, Result] = {}
    for result in results:
        if result.label == FLOOR:
            continue
        answers = result.of("log_prob", "kind", "length")
        loss = result.row("loss", length=result.target)
        if loss is not None and result.of("loss", "begin", "end"):
            reading.setdefault(result.label, result)
        elif any(row.length == result.target for row in answers):
            asking.setdefault(result.label, result)
    if BASELINE not in reading or len(reading) < 2:
        raise RopepatchError(
            "nothing to rank, expected the baseline and at least one method"
        )
    return reading, asking if asking.keys() >= reading.keys() else {}


def _ranked(
    label: str,
    reading: Mapping[str, Result],
    asking: Mapping[str, Result],
    kinds: Sequence[str],
) -> Ranked:
    """One method with its differences from the baseline, before they are judged."""
    first, own = reading[BASELINE], reading[label]
    target, original = first.target, first.model["trained"]
    loss = own.mean("loss", length=target)
    short = own.mean("loss", length=original)
    answers = {}
    for kind in kinds:
        log_prob = asking[label].mean("log_prob", kind=kind, length=target)
        before = asking[BASELINE].mean("log_prob", kind=kind, length=target)
        answers[kind] = Answers(
            found=asking[label].mean("found", kind=kind, length=target),
            log_prob=log_prob,
            log_prob_gain=difference(log_prob, before),
        )
    return Ranked(
        label=label,
        loss=loss,
        loss_gain=difference(first.mean("loss", length=target), loss),
        short_context_loss=short,
        short_context_cost=difference(short, first.mean("loss", length=original)),
        answers=answers,
        taught=tuple(own.taught),
    )


def _judged(rows: Sequence[Ranked], kinds: Sequence[str]) -> list[Ranked]:
    """The methods with the measures in which they are better or worse than the baseline."""
    gains = {
        (row.label, measure): row.gain(measure)
        for row in rows
        for measure in (LOSS, *kinds)
        if row.label != BASELINE
    }
    apart = significant(gains)
    judged = []
    for row in rows:
        better, worse = [], []
        for measure in (LOSS, *kinds):
            gain = row.gain(measure)
            if gain.value > 0 and (row.label, measure) in apart:
                better.append(measure)
            if gain.value < 0 and gain.differs:
                worse.append(measure)
        judged.append(replace(row, better=tuple(better), worse=tuple(worse)))
    return judged
