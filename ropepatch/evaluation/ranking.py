"""The scaling that reads a target best: paired differences from the baseline, and the advice that follows."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ropepatch.attention import REMAPPINGS
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import FLOOR, few, not_counted
from ropepatch.evaluation.intervals import Mean, difference, significant, summed
from ropepatch.evaluation.results import Result, Row, finite
from ropepatch.evaluation.retrieval import THRESHOLD
from ropepatch.evaluation.table import enumeration

RULE = (
    "A scaling can be recommended if at the target it is significantly better than the baseline, by its loss "
    "or by the log-probability of its answers to a kind of question, and not significantly worse by any of "
    "these. The differences are paired by document and by haystack; the error rate is 5 % over all scalings, "
    "the loss and all kinds (t-tests, Holm). Of these, the one with the greatest log-probability, averaged "
    "over the kinds, comes first; those that are not significantly worse than it are ordered by their loss. "
    "Only kinds of questions count of which the baseline finds significantly more than by guessing within "
    "its trained context; without any, loss alone decides. With fewer than three documents nothing is "
    "recommended."
)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers of one scaling to one kind of question, at the target.

    Attributes:
        found: The share that is found, by haystack.
        log_prob: Nats per token, by haystack.
        log_prob_gain: By how much that is above the baseline's, haystack by haystack.
        verdict: ``better`` or ``worse`` than the baseline where it is so significantly, over all scalings and
            measures; ``not told apart`` from it, or ``not counted``; empty of the baseline itself.
    """

    found: Mean
    log_prob: Mean
    log_prob_gain: Mean
    verdict: str = ""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One scaling at the target.

    Attributes:
        label: Its name in the results.
        loss: Over the whole target, nats per token, by document.
        loss_gain: By how much that is below the baseline's, document by document.
        short_context_loss: Within the trained context.
        short_context_cost: By how much that is above the baseline's, document by document.
        answers: At the target, by kind of question; empty if nothing was asked there.
        helps: Whether it is significantly better than the baseline in one measure and not significantly worse
            in another; see `RULE`.
    """

    label: str
    loss: Mean
    loss_gain: Mean
    short_context_loss: Mean
    short_context_cost: Mean
    answers: Mapping[str, Answers]
    helps: bool

    def columns(self) -> dict[str, Any]:
        """One number in every column; intervals have a lower and an upper end."""
        means: dict[str, Mean] = {field.name: getattr(self, field.name) for field in fields(self)[1:5]}
        for kind, answers in self.answers.items():
            of_kind = {"found": answers.found, "log_prob": answers.log_prob}
            of_kind["log_prob_gain"] = answers.log_prob_gain
            means |= {f"{kind}_{name}": mean for name, mean in of_kind.items()}
        columns: dict[str, Any] = {"label": self.label}
        for measure, mean in means.items():
            name = measure.removesuffix("loss") + "nats_per_token" * measure.endswith("loss")
            low, high = map(finite, mean.interval())
            columns |= {name: finite(mean.value), f"{name}_low": low, f"{name}_high": high}
        columns |= {f"{kind}_verdict": answers.verdict for kind, answers in self.answers.items()}
        found = next((answers.found for answers in self.answers.values()), Mean(()))
        columns |= {"tokens": round(self.loss.weight), "answers_of_a_kind": round(found.weight)}
        columns |= {"documents": len(self.loss.clusters), "haystacks": len(found.clusters)}
        return columns | {"helps": self.helps}


@dataclass(frozen=True)
class Ranking:
    """The scalings, best first, and the advice that follows.

    Attributes:
        rows: Best first.
        recommended: The label to take; None where none of the scalings helps.
        advice: Why, in sentences, one of them on each kind of question.
        warnings: What makes the order doubtful.
        not_counted: By kind of question why its answers decide nothing; see `RULE`.
    """

    rows: tuple[Ranked, ...]
    recommended: str | None
    advice: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    not_counted: Mapping[str, str] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self) | {"rows": [row.columns() for row in self.rows]}


def rank(results: Sequence[Result], *, base: str) -> Ranking:
    """Rank the scalings of one model at one target by `RULE`, and say which to take.

    Loss does not tell what a model finds (OlmPool, arXiv:2608.10296, of the loss of short texts), so
    retrieval comes first where it can rank. A control, a position remapping that forgets, is never
    recommended; nor is anything by fewer than three documents, which cannot tell a harm to the loss, or by
    the answers to fewer than three haystacks.

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
        elif any(row.length == result.target for row in result.of("log_prob", "kind", "length")):
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
    asked = asking[base].of("log_prob", "kind", "length") if asking else []
    kinds = list(dict.fromkeys(str(row.at["kind"]) for row in asked))
    uncounted = not_counted(asking[base]) if asking else {}

    def loss(label: str, length: int) -> Mean:
        return _row(reading[label], "loss", length=length).mean

    def answers(label: str, kind: str) -> Answers:
        found, log_prob, of_base = (
            _row(asking[of], measure, kind=kind, length=target).mean
            for of, measure in ((label, "found"), (label, "log_prob"), (base, "log_prob"))
        )
        return Answers(found=found, log_prob=log_prob, log_prob_gain=difference(log_prob, of_base))

    rows = {
        label: Ranked(
            label=label,
            loss=loss(label, target),
            loss_gain=difference(loss(base, target), loss(label, target)),
            short_context_loss=loss(label, trained),
            short_context_cost=difference(loss(label, trained), loss(base, trained)),
            answers={kind: answers(label, kind) for kind in kinds},
            helps=False,
        )
        for label in reading
    }
    gains = {("loss", label): row.loss_gain for label, row in rows.items() if label != base}
    gains |= {
        (kind, label): answers.log_prob_gain
        for label, row in rows.items()
        for kind, answers in row.answers.items()
        if label != base and kind not in uncounted
    }
    apart = significant(gains)
    better = {name for name in apart if gains[name].value > 0}

    def verdict(kind: str, label: str) -> str:
        if kind in uncounted or label == base:
            return "not counted" if kind in uncounted else ""
        at = (kind, label)
        return "better" if at in better else "worse" if at in apart else "not told apart"

    for label, row in rows.items():
        own = {name for name in apart if name[1] == label}
        judged = {
            kind: replace(answers, verdict=verdict(kind, label)) for kind, answers in row.answers.items()
        }
        helps = not row.loss.missing and bool(own & better) and own <= better
        rows[label] = replace(row, answers=judged, helps=helps)
    return _Judged(base, reading, asking, uncounted, rows, better, apart - better)


@dataclass(frozen=True)
class _Judged:
    """The scalings with their gains judged."""

    base: str  # the label of the baseline
    reading: Mapping[str, Result]  # of perplexity, by label
    asking: Mapping[str, Result]  # of retrieval, of all of these labels or of none
    uncounted: Mapping[str, str]  # by kind of question that does not count the reason
    rows: Mapping[str, Ranked]  # by label
    better: set[tuple[str, str]]  # measures and labels of gains significantly above 0, over all of them
    worse: set[tuple[str, str]]  # and below 0

    @property
    def counted(self) -> list[str]:
        """The kinds of questions that count; without any, loss alone decides."""
        return [kind for kind in self.rows[self.base].answers if kind not in self.uncounted]

    def log_prob(self, row: Ranked) -> Mean:
        """That of all answers that count, haystack by haystack."""
        return summed([row.answers[kind].log_prob for kind in self.counted])

    def ordered(self, rows: Collection[Ranked]) -> list[Ranked]:
        """The best first: those whose answers are not significantly less probable than the best's by loss."""
        by_loss = sorted(rows, key=lambda row: _number(row.loss.value))
        if not self.counted or not by_loss:
            return by_loss
        log_probs = {row.label: self.log_prob(row) for row in by_loss}
        best, *others = sorted(log_probs, key=lambda label: -log_probs[label].value)
        behind = significant({x: difference(log_probs[best], log_probs[x]) for x in others})
        return sorted(by_loss, key=lambda x: -log_probs[x.label].value if x.label in behind else -math.inf)

    def helping(self, left_out: Collection[str]) -> list[Ranked]:
        """The scalings that help, without some, the best first."""
        return self.ordered([row for row in self.rows.values() if row.helps and row.label not in left_out])

    @property
    def ranking(self) -> Ranking:
        kinds = {
            label: REMAPPINGS.get((r.scaling or {}).get("method", "")) for label, r in self.reading.items()
        }
        remappings = [label for label, kind in kinds.items() if kind is not None]
        controls = [label for label, kind in kinds.items() if kind is not None and kind.control]
        taken = next(iter(self.helping(controls)), None)
        if taken is None:
            advice = self._refusal()
        else:
            advice = self._recommendation(taken)
            if taken.label in remappings:
                advice.append(_engines(taken, self.helping(remappings)))
        if controls:
            advice.append(
                f"{enumeration(controls)} is a control, which forgets what is far: nothing to take."
            )
        return Ranking(
            tuple(self.ordered(self.rows.values())),
            None if taken is None else taken.label,
            tuple(advice),
            tuple(w for group in (self.reading, self.asking) if group for w in few(group[self.base])),
            self.uncounted,
        )

    def _recommendation(self, row: Ranked) -> list[str]:
        at = self.reading[self.base]
        reasons = []
        if ("loss", row.label) in self.better:
            reasons.append(
                f"it gains {signed(row.loss_gain)} nats per token over the baseline at {at.target} tokens"
            )
        gains = {k: row.answers[k].log_prob_gain for k in self.counted if (k, row.label) in self.better}
        if gains:
            told = enumeration([f"{signed(gain)} in {kind}" for kind, gain in gains.items()])
            reasons.append(f"its answers gain {told}, nats per token of their log-probability")
        advice = [f"Take {row.label}: {'; '.join(reasons)}."]
        others = {other.label: difference(other.loss, row.loss) for other in self.helping([row.label])}
        apart = significant(others)
        if tied := [label for label in others if label not in apart]:
            advice.append(f"By loss it does not differ significantly from {enumeration(tied)}.")
        if row.short_context_cost.value > 0:
            cost = signed(row.short_context_cost)
            advice.append(
                f"Its short-context cost: {cost} nats within the first {at.model['trained']} tokens."
            )
        shares = {kind: row.answers[kind].found.value for kind in self.counted}
        if few_found := [f"{share:.0%} of {kind}" for kind, share in shares.items() if share < THRESHOLD]:
            train = "train longer" if self._adapted else "train it"
            found = enumeration(few_found)
            advice.append(f"At {at.target} tokens it finds {found}: {train}, or choose a nearer target.")
        return [*advice, *self._by_kind()]

    def _by_kind(self) -> list[str]:
        """A verdict for every kind of question, and that none decides where none does."""
        lines = [f"{kind}: {self._of_kind(kind)}." for kind in self.rows[self.base].answers]
        left_out = self.asking[self.base].parameters.get("left_out", {}) if self.asking else {}
        lines += [f"{kind}: not asked: {reason}." for kind, reason in left_out.items()]
        return [
            *lines,
            *["Retrieval does not rank: no kind of question counts."] * bool(lines and not self.counted),
        ]

    def _of_kind(self, kind: str) -> str:
        if kind in self.uncounted:
            return f"not counted: {self.uncounted[kind]}"
        of = {label: row.answers[kind] for label, row in self.rows.items()}
        first = max(of, key=lambda label: _number(of[label].log_prob.value, -math.inf))
        others = {x: difference(of[first].log_prob, of[x].log_prob) for x in of if x != first}
        apart = significant(others)
        best = f"the likeliest answers are those of {first}, which finds {_share(of[first].found)}"
        if tied := [label for label in others if label not in apart]:
            best += f", not significantly above {enumeration(tied)}"
        groups = {v: [x for x, answers in of.items() if answers.verdict == v] for v in ("better", "worse")}
        told = [f"{verdict} than the baseline: {enumeration(x)}" for verdict, x in groups.items() if x]
        return "; ".join([best, *(told or ["none is told from the baseline"])])

    def _refusal(self) -> list[str]:
        base, scalings = (
            self.reading[self.base],
            [row for row in self.rows.values() if row.label != self.base],
        )
        if self.rows[self.base].loss.missing:
            (missing,) = few(base)
            return [f"No advice: {missing}. Give more text.", *self._by_kind()]
        first = min(scalings, key=lambda row: _number(row.loss.value))
        why = f"by loss {first.label} gains {signed(first.loss_gain)} nats per token"
        signs = [{label for _, label in names} for names in (self.better, self.worse)]
        if mixed := [row.label for row in scalings if all(row.label in labels for labels in signs)]:
            why = f"{enumeration(mixed)} is significantly better in one measure and worse in the other"
        tested = " or its answers" if self.counted else ""
        trained = ", fine-tuned or not," if self._adapted else ""
        return [
            f"Do not extend: over {base.target} tokens none of these scalings{trained} improves the loss"
            f"{tested} significantly without harm ({why}).",
            *self._by_kind(),
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


def _number(value: float, missing: float = math.inf) -> float:
    return missing if math.isnan(value) else value


def signed(mean: Mean) -> str:
    """A difference with its interval, both with a sign."""
    low, high = mean.interval()
    doubt = f" (95 % interval {low:+.3f} to {high:+.3f})" if not mean.missing else ""
    return f"{mean.value:+.3f}{doubt}"


def _share(mean: Mean) -> str:
    low, high = mean.interval()
    return f"{mean.value:.0%} of {mean.weight:.0f} (95 % interval {low:.0%} to {high:.0%})"
