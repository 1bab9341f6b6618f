"""The scaling that reads a target best: paired differences from the baseline, and the advice that follows."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
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
    return _Evidence(base, reading, asking if asking.keys() >= reading.keys() else {}).ranking


@dataclass(frozen=True)
class _Evidence:
    """All that a ranking is made from.

    Attributes:
        base: The label of the baseline.
        reading: The results of perplexity by label.
        asking: The results of retrieval, of all of these labels or of none.
    """

    base: str
    reading: Mapping[str, Result]
    asking: Mapping[str, Result]

    @cached_property
    def rows(self) -> dict[str, Ranked]:
        """By label, with the judgement."""
        return {label: self._row(label) for label in self.reading}

    def _row(self, label: str) -> Ranked:
        cost = difference(self._loss(label, self.trained), self._loss(self.base, self.trained))
        asked = label in self.asking
        return Ranked(
            label=label,
            loss=self.losses[label],
            loss_gain=difference(self.losses[self.base], self.losses[label]),
            short_context_loss=self._loss(label, self.trained),
            short_context_cost=cost,
            log_prob=self.log_probs[label] if asked else None,
            log_prob_gain=difference(self.log_probs[label], self.log_probs[self.base]) if asked else None,
            found=self._answers(label, "found") if asked else None,
            helps=label != self.base and self.helps(label),
        )

    @property
    def target(self) -> int:
        return self.reading[self.base].target

    @property
    def trained(self) -> int:
        return int(self.reading[self.base].model["trained"])

    @property
    def scalings(self) -> list[str]:
        return [label for label in self.reading if label != self.base]

    @cached_property
    def counted(self) -> list[str]:
        """The kinds of questions of which the baseline finds more than by guessing, within its context."""
        if not self.asking:
            return []
        result = self.asking[self.base]
        keys = result.parameters["keys"]
        chance = 1 / keys if keys > 1 else 0.0
        within = [row for row in result.of("found", "kind", "length") if row.length <= self.trained]
        return list(dict.fromkeys(str(row.at["kind"]) for row in within if row.mean.interval()[0] > chance))

    def _loss(self, label: str, length: int) -> Mean:
        return _row(self.reading[label], "loss", length=length).mean

    def _answers(self, label: str, measure: str) -> Mean:
        """Over the kinds that count, or over all."""
        result = self.asking[label]
        kinds = self.counted or [str(row.at["kind"]) for row in result.of(measure, "kind", "length")]
        rows = [_row(result, measure, kind=kind, length=self.target) for kind in dict.fromkeys(kinds)]
        return joined(rows, {"length": self.target}).mean

    @cached_property
    def losses(self) -> dict[str, Mean]:
        """Over the target."""
        return {label: self._loss(label, self.target) for label in self.reading}

    @cached_property
    def log_probs(self) -> dict[str, Mean]:
        """Of the answers at the target, where retrieval was measured."""
        return {label: self._answers(label, "log_prob") for label in self.asking}

    @cached_property
    def gains(self) -> dict[tuple[str, str], Mean]:
        """By measure and label by how much a scaling is better than the baseline; what ranks alone."""
        loss, log_prob = self.losses, self.log_probs
        of_loss = {("loss", one): difference(loss[self.base], loss[one]) for one in self.scalings}
        if not self.counted:
            return of_loss
        answers = {("answers", one): difference(log_prob[one], log_prob[self.base]) for one in self.scalings}
        return of_loss | answers

    @cached_property
    def better(self) -> set[tuple[str, str]]:
        """The gains that are significantly above 0, over all of them."""
        return {name for name in significant(self.gains) if self.gains[name].value > 0}

    @cached_property
    def worse(self) -> set[tuple[str, str]]:
        """Those significantly below 0."""
        return significant(self.gains) - self.better

    def helps(self, label: str) -> bool:
        """Whether it is significantly better in one measure and not significantly worse in the other."""
        names = {("loss", label), ("answers", label)}
        return not self.losses[label].missing and bool(names & self.better) and not names & self.worse

    def ordered(self, labels: Collection[str]) -> list[str]:
        """The best first: those whose answers are not significantly less probable than the best's by loss."""
        by_loss = sorted(labels, key=lambda label: _number(self.losses[label].value))
        if not self.counted or not by_loss:
            return by_loss
        best, *others = sorted(by_loss, key=lambda label: -self.log_probs[label].value)
        behind = significant({x: difference(self.log_probs[best], self.log_probs[x]) for x in others})
        return sorted(by_loss, key=lambda x: -self.log_probs[x].value if x in behind else -math.inf)

    def helping(self, left_out: Collection[str]) -> list[str]:
        """The scalings that help, without some, the best first."""
        return self.ordered([label for label in self.scalings if self.helps(label) and label not in left_out])

    @property
    def ranking(self) -> Ranking:
        kinds = {label: MAPS.get((r.scaling or {}).get("method", "")) for label, r in self.reading.items()}
        maps = [label for label, kind in kinds.items() if kind is not None]
        controls = [label for label, kind in kinds.items() if kind is not None and kind.control]
        taken = next(iter(self.helping(controls)), None)
        if taken is None:
            advice = self._refusal()
        else:
            advice = self._recommendation(self.rows[taken])
            if taken in maps:
                advice.append(self._engines(taken, self.helping(maps)))
        if controls:
            advice.append(
                f"{enumeration(controls)} is a control, which forgets what is far: nothing to take."
            )
        return Ranking(
            tuple(self.rows[label] for label in self.ordered(self.reading)),
            taken,
            tuple(advice),
            tuple(w for group in (self.reading, self.asking) if group for w in few(group[self.base])),
        )

    def _recommendation(self, row: Ranked) -> list[str]:
        base, taken = self.rows[self.base], row.label
        reasons = []
        if ("loss", taken) in self.better:
            reasons.append(
                f"it gains {signed(row.loss_gain)} nats per token over the baseline at {self.target} tokens"
            )
        if ("answers", taken) in self.better and row.log_prob_gain and row.found and base.found:
            reasons.append(
                f"its answers at {self.target} tokens gain {signed(row.log_prob_gain)} nats per token in "
                f"log-probability; it finds {_share(row.found)}, the baseline {_share(base.found)}"
            )
        advice = [f"Take {taken}: {'; '.join(reasons)}."]
        others = {label: difference(self.losses[label], row.loss) for label in self.helping([taken])}
        apart = significant(others)
        if tied := [label for label in others if label not in apart]:
            advice.append(f"By loss it does not differ significantly from {enumeration(tied)}.")
        if row.short_context_cost.value > 0:
            cost = signed(row.short_context_cost)
            advice.append(f"Its short-context cost: {cost} nats within the first {self.trained} tokens.")
        if row.found is not None and self.counted and row.found.value < THRESHOLD:
            train = "train longer" if self._adapted else "train it"
            advice.append(
                f"It finds {row.found.value:.0%} of the answers at {self.target} tokens: {train}, or choose "
                "a nearer target."
            )
        return [*advice, *self._no_retrieval()]

    def _no_retrieval(self) -> list[str]:
        """Why answers that were measured decide nothing."""
        if not self.asking or self.counted:
            return []
        why = f"within {self.trained} tokens the baseline finds no more than by guessing"
        if self.log_probs[self.base].missing:
            (why,) = few(self.asking[self.base])
        return [f"Retrieval does not rank: {why}."]

    def _refusal(self) -> list[str]:
        if self.losses[self.base].missing:
            (missing,) = few(self.reading[self.base])
            return [f"No advice: {missing}. Give more text.", *self._no_retrieval()]
        first = min(self.scalings, key=lambda label: _number(self.losses[label].value))
        why = f"by loss {first} gains {signed(self.rows[first].loss_gain)} nats per token"
        names = {label: {("loss", label), ("answers", label)} for label in self.scalings}
        if mixed := [label for label, own in names.items() if own & self.better and own & self.worse]:
            why = f"{enumeration(mixed)} is significantly better in one measure and worse in the other"
        tested = " or its answers" if self.counted else ""
        trained = ", fine-tuned or not," if self._adapted else ""
        return [
            f"Do not extend: over {self.target} tokens none of these scalings{trained} improves the loss"
            f"{tested} significantly without harm ({why}).",
            *self._no_retrieval(),
        ]

    def _engines(self, taken: str, plain: Sequence[str]) -> str:
        only = f"Only transformers runs {taken}, by code that comes with the checkpoint"
        if plain:
            gap = self.losses[plain[0]].value - self.losses[taken].value
            only += f"; the best that other engines run, too, is {plain[0]}, {gap:+.3f} nats over the target"
        return f"{only}."

    @property
    def _adapted(self) -> bool:
        return any(result.adapted for result in self.reading.values())


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
