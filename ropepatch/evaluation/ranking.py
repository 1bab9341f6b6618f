"""The scaling that reads a target best: paired differences from the baseline, and the advice that follows."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ropepatch.attention import MAPS
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import FLOOR, few
from ropepatch.evaluation.intervals import Mean, difference, significant
from ropepatch.evaluation.results import Result, Row, finite, joined
from ropepatch.evaluation.retrieval import THRESHOLD
from ropepatch.evaluation.table import enumeration

RULE = (
    "A scaling can be recommended if at the target it is significantly better than the baseline, by its loss "
    "or by the log-probability of the answers, and not significantly worse by the other. The differences are "
    "paired by document and by haystack; the error rate is 5 % over all scalings and both measures (t-tests, "
    "Holm). Of these, the one with the greatest log-probability comes first; those that are not "
    "significantly worse than it are ordered by their loss. Only kinds of questions count of which the "
    "baseline finds significantly more than by guessing within its trained context; without any, loss alone "
    "decides. With fewer than three documents nothing is recommended."
)


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One scaling at the target.

    Attributes:
        label: Its name in the results.
        loss: Over the whole target, nats per token, by document.
        loss_gain: By how much that is below the baseline's, document by document.
        short_context_loss: Within the trained context.
        short_context_cost: By how much that is above the baseline's, document by document.
        log_prob: Of the answers at the target, nats per token, by haystack, of the kinds of questions that
            count (see `RULE`), or of all where none counts; None if nothing was asked there.
        log_prob_gain: By how much that is above the baseline's, haystack by haystack.
        found: The share of these answers that are found.
        helps: Whether it is significantly better than the baseline in one and not significantly worse in the
            other.
    """

    label: str
    loss: Mean
    loss_gain: Mean
    short_context_loss: Mean
    short_context_cost: Mean
    log_prob: Mean | None
    log_prob_gain: Mean | None
    found: Mean | None
    helps: bool

    def columns(self) -> dict[str, Any]:
        """One number in every column; intervals have a lower and an upper end."""
        columns: dict[str, Any] = {"label": self.label}
        for field in fields(self)[1:-1]:  # the means
            mean: Mean | None = getattr(self, field.name)
            name = field.name.removesuffix("loss") + "nats_per_token" * field.name.endswith("loss")
            low, high = mean.interval() if mean is not None else (math.nan, math.nan)
            columns[name] = None if mean is None else finite(mean.value)
            columns |= {f"{name}_low": finite(low), f"{name}_high": finite(high)}
        loss, found = self.loss, self.found or Mean(())
        columns |= {"tokens": round(loss.weight), "answers": round(found.weight)}
        columns |= {"documents": len(loss.clusters), "haystacks": len(found.clusters)}
        return columns | {"helps": self.helps}


@dataclass(frozen=True)
class Ranking:
    """The scalings, best first, and the advice that follows.

    Attributes:
        rows: Best first.
        recommended: The label to take; None where none of the scalings helps.
        advice: Why, in sentences.
        warnings: What makes the order doubtful.
    """

    rows: tuple[Ranked, ...]
    recommended: str | None
    advice: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self) | {"rows": [row.columns() for row in self.rows]}


def rank(results: Sequence[Result], *, base: str) -> Ranking:
    """Rank the scalings of one model at one target by `RULE`, and say which to take.

    Loss does not tell what a model finds (OlmPool, arXiv:2608.10296, of the loss of short texts), so
    retrieval comes first where it can rank. A control, an attention map that forgets, is never recommended;
    nor is anything by fewer than three documents, which cannot tell a harm to the loss, or by the answers to
    fewer than three haystacks.

    Args:
        results: Of one-pass perplexity, and of retrieval if it was measured. Where several of one task have a
            label, the first of them ranks.
        base: The label of the baseline.
    """
    reading: dict[str, Result] = {}
    asking: dict[str, Result] = {}
    for result in results:
        if result.label == FLOOR:
            continue
        if result.row("loss", length=result.target) and result.of("loss", "begin", "end"):
            reading.setdefault(result.label, result)
        elif result.row("log_prob", length=result.target):
            asking.setdefault(result.label, result)
    if base not in reading or len(reading) < 2:
        raise RopepatchError("nothing to rank: need the baseline and at least one scaling")
    for group in (reading, asking):
        if len({result.parameters.get("digest") for result in group.values()}) > 1:
            raise RopepatchError("the results are of different texts", hint="compare them in one suite")
    if len({result.env.get("dtype") for result in [*reading.values(), *asking.values()]}) > 1:
        raise RopepatchError("the results are in different precisions", hint="measure them in one")
    return _judged(base, reading, asking if asking.keys() >= reading.keys() else {}).ranking


def _judged(base: str, reading: Mapping[str, Result], asking: Mapping[str, Result]) -> _Judged:
    """The scalings beside the baseline, all their gains tested together."""
    target, trained = reading[base].target, int(reading[base].model["trained"])
    counted = _counted(asking[base], trained) if asking else []

    def loss(label: str, length: int) -> Mean:
        return _row(reading[label], "loss", length=length).mean

    def answers(label: str, measure: str) -> Mean | None:
        if not asking:
            return None
        kinds = counted or [str(row.at["kind"]) for row in asking[label].of(measure, "kind", "length")]
        rows = [_row(asking[label], measure, kind=kind, length=target) for kind in dict.fromkeys(kinds)]
        return joined(rows, {"length": target}).mean

    base_log_prob = answers(base, "log_prob")
    rows = {}
    for label in reading:
        log_prob = answers(label, "log_prob")
        rows[label] = Ranked(
            label=label,
            loss=loss(label, target),
            loss_gain=difference(loss(base, target), loss(label, target)),
            short_context_loss=loss(label, trained),
            short_context_cost=difference(loss(label, trained), loss(base, trained)),
            log_prob=log_prob,
            log_prob_gain=log_prob and base_log_prob and difference(log_prob, base_log_prob),
            found=answers(label, "found"),
            helps=False,
        )
    gains = {("loss", label): row.loss_gain for label, row in rows.items() if label != base}
    if counted:
        pairs = ((label, row.log_prob_gain) for label, row in rows.items() if label != base)
        gains |= {("answers", label): gain for label, gain in pairs if gain}
    apart = significant(gains)
    better = {name for name in apart if gains[name].value > 0}
    for label, row in rows.items():
        names = {("loss", label), ("answers", label)}
        helps = not row.loss.missing and bool(names & better) and not names & (apart - better)
        rows[label] = replace(row, helps=helps)
    return _Judged(base, reading, asking, counted, rows, better, apart - better)


def _counted(result: Result, trained: int) -> list[str]:
    """The kinds of questions of which the baseline finds more than by guessing, within its context."""
    keys = result.parameters["keys"]
    chance = 1 / keys if keys > 1 else 0.0
    within = [row for row in result.of("found", "kind", "length") if row.length <= trained]
    return list(dict.fromkeys(str(row.at["kind"]) for row in within if row.mean.interval()[0] > chance))


@dataclass(frozen=True)
class _Judged:
    """The scalings with their gains judged."""

    base: str  # the label of the baseline
    reading: Mapping[str, Result]  # of perplexity, by label
    asking: Mapping[str, Result]  # of retrieval, of all of these labels or of none
    counted: Sequence[str]  # the kinds of questions that count; without any, loss alone decides
    rows: Mapping[str, Ranked]  # by label
    better: set[tuple[str, str]]  # measures and labels of gains significantly above 0, over all of them
    worse: set[tuple[str, str]]  # and below 0

    def ordered(self, rows: Collection[Ranked]) -> list[Ranked]:
        """The best first: those whose answers are not significantly less probable than the best's by loss."""
        by_loss = sorted(rows, key=lambda row: _number(row.loss.value))
        log_probs = {row.label: row.log_prob for row in by_loss if row.log_prob}
        if not self.counted or not by_loss:
            return by_loss
        best, *others = sorted(log_probs, key=lambda label: -log_probs[label].value)
        behind = significant({x: difference(log_probs[best], log_probs[x]) for x in others})
        return sorted(by_loss, key=lambda x: -log_probs[x.label].value if x.label in behind else -math.inf)

    def helping(self, left_out: Collection[str]) -> list[Ranked]:
        """The scalings that help, without some, the best first."""
        return self.ordered([row for row in self.rows.values() if row.helps and row.label not in left_out])

    @property
    def ranking(self) -> Ranking:
        kinds = {label: MAPS.get((r.scaling or {}).get("method", "")) for label, r in self.reading.items()}
        maps = [label for label, kind in kinds.items() if kind is not None]
        controls = [label for label, kind in kinds.items() if kind is not None and kind.control]
        taken = next(iter(self.helping(controls)), None)
        if taken is None:
            advice = self._refusal()
        else:
            advice = self._recommendation(taken)
            if taken.label in maps:
                advice.append(_engines(taken, self.helping(maps)))
        if controls:
            advice.append(
                f"{enumeration(controls)} is a control, which forgets what is far: nothing to take."
            )
        return Ranking(
            tuple(self.ordered(self.rows.values())),
            None if taken is None else taken.label,
            tuple(advice),
            tuple(w for group in (self.reading, self.asking) if group for w in few(group[self.base])),
        )

    def _recommendation(self, row: Ranked) -> list[str]:
        base, at = self.rows[self.base], self.reading[self.base]
        reasons = []
        if ("loss", row.label) in self.better:
            reasons.append(
                f"it gains {signed(row.loss_gain)} nats per token over the baseline at {at.target} tokens"
            )
        if ("answers", row.label) in self.better and row.log_prob_gain and row.found and base.found:
            reasons.append(
                f"its answers at {at.target} tokens gain {signed(row.log_prob_gain)} nats per token in "
                f"log-probability; it finds {_share(row.found)}, the baseline {_share(base.found)}"
            )
        advice = [f"Take {row.label}: {'; '.join(reasons)}."]
        others = {other.label: difference(other.loss, row.loss) for other in self.helping([row.label])}
        apart = significant(others)
        if tied := [label for label in others if label not in apart]:
            advice.append(f"By loss it does not differ significantly from {enumeration(tied)}.")
        share = 1.0 if row.found is None else row.found.value
        more = [
            f"{other.label} ({other.found.value:.0%})"
            for other in self.helping([row.label])
            if other.found is not None and other.found.value > share
        ]
        if more:
            advice.append(
                f"More is found by {enumeration(more)}, whose answers are not significantly likelier."
            )
        if row.short_context_cost.value > 0:
            cost = signed(row.short_context_cost)
            advice.append(
                f"Its short-context cost: {cost} nats within the first {at.model['trained']} tokens."
            )
        if row.found is not None and self.counted and row.found.value < THRESHOLD:
            train = "train longer" if self._adapted else "train it"
            advice.append(
                f"It finds {row.found.value:.0%} of the answers at {at.target} tokens: {train}, or choose "
                "a nearer target."
            )
        return [*advice, *self._no_retrieval()]

    def _no_retrieval(self) -> list[str]:
        """Why answers that were measured decide nothing."""
        if not self.asking or self.counted:
            return []
        base = self.asking[self.base]
        why = f"within {base.model['trained']} tokens the baseline finds no more than by guessing"
        if (log_prob := self.rows[self.base].log_prob) and log_prob.missing:
            (why,) = few(base)
        return [f"Retrieval does not rank: {why}."]

    def _refusal(self) -> list[str]:
        base, scalings = (
            self.reading[self.base],
            [row for row in self.rows.values() if row.label != self.base],
        )
        if self.rows[self.base].loss.missing:
            (missing,) = few(base)
            return [f"No advice: {missing}. Give more text.", *self._no_retrieval()]
        first = min(scalings, key=lambda row: _number(row.loss.value))
        why = f"by loss {first.label} gains {signed(first.loss_gain)} nats per token"
        names = {row.label: {("loss", row.label), ("answers", row.label)} for row in scalings}
        if mixed := [label for label, own in names.items() if own & self.better and own & self.worse]:
            why = f"{enumeration(mixed)} is significantly better in one measure and worse in the other"
        tested = " or its answers" if self.counted else ""
        trained = ", fine-tuned or not," if self._adapted else ""
        return [
            f"Do not extend: over {base.target} tokens none of these scalings{trained} improves the loss"
            f"{tested} significantly without harm ({why}).",
            *self._no_retrieval(),
        ]

    @property
    def _adapted(self) -> bool:
        return any(result.adapted for result in self.reading.values())


def _engines(taken: Ranked, plain: Sequence[Ranked]) -> str:
    only = f"Only transformers runs {taken.label}, by code that comes with the checkpoint"
    if plain:
        gap = plain[0].loss.value - taken.loss.value
        only += (
            f"; the best that other engines run, too, is {plain[0].label}, {gap:+.3f} nats over the target"
        )
    return f"{only}."


def _row(result: Result, measure: str, **at: int | str) -> Row:
    row = result.row(measure, **at)
    if row is None:
        raise RopepatchError(
            f"{result.label}: no {measure} at {at}",
            hint="measure again: `ropepatch compare` measures all it needs",
        )
    return row


def _number(value: float) -> float:
    return math.inf if math.isnan(value) else value


def signed(mean: Mean) -> str:
    """A difference with its interval, both with a sign."""
    low, high = mean.interval()
    doubt = f" (95 % interval {low:+.3f} to {high:+.3f})" if not mean.missing else ""
    return f"{mean.value:+.3f}{doubt}"


def _share(mean: Mean) -> str:
    low, high = mean.interval()
    return f"{mean.value:.0%} of {mean.weight:.0f} (95 % interval {low:.0%} to {high:.0%})"
