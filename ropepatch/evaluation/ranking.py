"""Ranks methods at a target length by paired differences from the baseline, and advises which to use."""

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


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers of one method to one kind of question, at the target length.

    Attributes:
        found: The retrieval accuracy, by prompt.
        log_prob: The answer log-prob in nats per token, by prompt.
        log_prob_gain: Its difference from the baseline's, paired by prompt.
        verdict: ``better`` or ``worse`` than the baseline by `RULE`; else ``not told apart``, or ``not
            counted``; empty for the baseline itself.
    """

    found: Mean
    log_prob: Mean
    log_prob_gain: Mean
    verdict: str = ""


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
        helps: Whether it is better than the baseline in one measure and worse in none; see `RULE`.
    """

    label: str
    loss: Mean
    loss_gain: Mean
    short_context_loss: Mean
    short_context_cost: Mean
    answers: Mapping[str, Answers]
    helps: bool

    def columns(self) -> dict[str, Any]:
        """A flat record: one number per column, each interval as two columns."""
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
    """The methods, best first, and the advice that follows.

    Attributes:
        rows: Best first.
        recommended: The label of the method to use; None if no method helps.
        advice: The reasons in sentences, one of them for each kind of question.
        warnings: Reasons to doubt the order.
        not_counted: For each kind of question that does not count, the reason; see `RULE`.
    """

    rows: tuple[Ranked, ...]
    recommended: str | None
    advice: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    not_counted: Mapping[str, str] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The ranking as JSON-ready data."""
        return asdict(self) | {"rows": [row.columns() for row in self.rows]}


def rank(results: Sequence[Result], *, base: str) -> Ranking:
    """Rank the methods of one model at one target length by `RULE`, and recommend one.

    Loss does not predict retrieval (OlmPool, arXiv:2608.10296, for the loss on short texts), so retrieval
    ranks first where possible. A control, a position remapping that ignores distant tokens, is never
    recommended. Fewer than three documents cannot show a harm to the loss, so nothing is recommended. With
    fewer than three prompts the answers have no effect.

    Args:
        results: Results of one-pass perplexity, and of retrieval if it was measured. If several results of a
            task have the same label, the first of them ranks.
        base: The label of the baseline.

    Raises:
        RopepatchError: If there is no baseline or no method, or the results differ in texts or precision.
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
        raise RopepatchError("nothing to rank, expected the baseline and at least one method")
    for group in (reading, asking):
        if len({result.parameters.get("digest") for result in group.values()}) > 1:
            raise RopepatchError(
                "the results were measured on different texts", hint="measure them in one suite"
            )
    if len({result.env.get("dtype") for result in [*reading.values(), *asking.values()]}) > 1:
        raise RopepatchError(
            "the results were measured in different precisions", hint="measure them with one dtype"
        )
    return _judged(base, reading, asking if asking.keys() >= reading.keys() else {}).ranking


def _judged(base: str, reading: Mapping[str, Result], asking: Mapping[str, Result]) -> _Judged:
    """The methods and the baseline, with their gains and harms; see `RULE`."""
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
    better = {name for name in significant(gains) if gains[name].value > 0}
    worse = {name for name, gain in gains.items() if gain.value < 0 and gain.differs}

    def verdict(kind: str, label: str) -> str:
        if kind in uncounted or label == base:
            return "not counted" if kind in uncounted else ""
        at = (kind, label)
        return "better" if at in better else "worse" if at in worse else "not told apart"

    for label, row in rows.items():
        helped, harmed = ([name for name in names if name[1] == label] for names in (better, worse))
        judged = {
            kind: replace(answers, verdict=verdict(kind, label)) for kind, answers in row.answers.items()
        }
        helps = not row.loss.missing and bool(helped) and not harmed
        rows[label] = replace(row, answers=judged, helps=helps)
    return _Judged(base, reading, asking, uncounted, rows, better, worse)


@dataclass(frozen=True)
class _Judged:
    """The methods with their significant gains and losses."""

    base: str  # the label of the baseline
    reading: Mapping[str, Result]  # of perplexity, by label
    asking: Mapping[str, Result]  # of retrieval, by label: all of the above, or none
    uncounted: Mapping[str, str]  # kinds of questions that do not count, with the reason
    rows: Mapping[str, Ranked]  # by label
    better: set[tuple[str, str]]  # measure and label of each gain; see `RULE`
    worse: set[tuple[str, str]]  # and of each harm

    @property
    def counted(self) -> list[str]:
        """The kinds of questions that count; without any, the loss decides."""
        return [kind for kind in self.rows[self.base].answers if kind not in self.uncounted]

    def log_prob(self, row: Ranked) -> Mean:
        """The log-prob of all answers that count, by prompt."""
        return summed([row.answers[kind].log_prob for kind in self.counted])

    def ordered(self, rows: Collection[Ranked]) -> list[Ranked]:
        """The best first; methods not significantly below the best answer log-prob are ordered by loss."""
        by_loss = sorted(rows, key=lambda row: _number(row.loss.value))
        if not self.counted or not by_loss:
            return by_loss
        log_probs = {row.label: self.log_prob(row) for row in by_loss}
        best, *others = sorted(log_probs, key=lambda label: -log_probs[label].value)
        behind = {label for label in others if difference(log_probs[best], log_probs[label]).differs}
        return sorted(by_loss, key=lambda x: -log_probs[x.label].value if x.label in behind else -math.inf)

    def helping(self, left_out: Collection[str]) -> list[Ranked]:
        """The methods that help, except those left out, the best first."""
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
            advice.append(f"{enumeration(controls)} is a control that ignores distant tokens: do not use it.")
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
            reasons.append(f"loss gain {signed(row.loss_gain)} nats/token")
        gains = {k: row.answers[k].log_prob_gain for k in self.counted if (k, row.label) in self.better}
        reasons += [f"{kind} answer log-prob gain {signed(gain)} nats/token" for kind, gain in gains.items()]
        advice = [f"Use {row.label}. At {at.target:,} tokens over the baseline: {'; '.join(reasons)}."]
        others = {other.label: difference(other.loss, row.loss) for other in self.helping([row.label])}
        if tied := [label for label, gap in others.items() if not gap.differs]:
            advice.append(f"Its loss does not differ significantly from that of {enumeration(tied)}.")
        if row.short_context_cost.value > 0:
            cost = (
                f"{signed(row.short_context_cost)} nats/token over the first {at.model['trained']:,} tokens"
            )
            worse = (
                "It is significantly worse" if row.short_context_cost.differs else "Not significantly worse"
            )
            advice.append(f"{worse} within the original length: loss {cost}.")
        advice += [line for kind in self.counted if (line := self._less_accurate(row, kind))]
        shares = {kind: row.answers[kind].found.value for kind in self.counted}
        if low := [f"{share:.0%} for {kind}" for kind, share in shares.items() if share < THRESHOLD]:
            train = "Fine-tune it for longer" if self._adapted else "Fine-tune it"
            advice.append(
                f"Retrieval accuracy at {at.target:,} tokens: {enumeration(low)}. {train}, or use a shorter "
                "target length."
            )
        return [*advice, *self._by_kind()]

    def _less_accurate(self, row: Ranked, kind: str) -> str:
        """The reason to recommend a method although others have a higher accuracy; empty if none has."""
        found = {label: other.answers[kind].found for label, other in self.rows.items()}
        own = found[row.label]
        gains = {x: difference(share, own) for x, share in found.items() if share.value > own.value}
        reasons = []
        for label, gain in gains.items():
            doubt = (
                "significantly higher, but log-prob ranks first"
                if gain.differs
                else "not significantly higher"
            )
            reasons.append(f"{label}'s {found[label].value:.0%} is {doubt}")
        return f"Its {kind} accuracy is {own.value:.0%}; {enumeration(reasons)}." if reasons else ""

    def _by_kind(self) -> list[str]:
        """A verdict for every kind of question, and a line if no kind counts."""
        lines = [f"{kind}: {self._of_kind(kind)}." for kind in self.rows[self.base].answers]
        left_out = self.asking[self.base].parameters.get("left_out", {}) if self.asking else {}
        lines += [f"{kind}: not measured: {reason}." for kind, reason in left_out.items()]
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
        best = f"{first} has the highest answer log-prob, with an accuracy of {_share(of[first].found)}"
        if tied := [label for label, gap in others.items() if not gap.differs]:
            best += f", not significantly above {enumeration(tied)}"
        groups = {v: [x for x, answers in of.items() if answers.verdict == v] for v in ("better", "worse")}
        verdicts = [f"{verdict} than the baseline: {enumeration(x)}" for verdict, x in groups.items() if x]
        return "; ".join([best, *(verdicts or ["none differs significantly from the baseline"])])

    def _refusal(self) -> list[str]:
        base, scalings = (
            self.reading[self.base],
            [row for row in self.rows.values() if row.label != self.base],
        )
        if self.rows[self.base].loss.missing:
            (missing,) = few(base)
            return [f"No advice: {missing}. Give more text.", *self._by_kind()]
        first = min(scalings, key=lambda row: _number(row.loss.value))
        why = f"the lowest loss is that of {first.label}, a gain of {signed(first.loss_gain)} nats/token"
        signs = [{label for _, label in names} for names in (self.better, self.worse)]
        if mixed := [row.label for row in scalings if all(row.label in labels for labels in signs)]:
            why = f"{enumeration(mixed)} is significantly better in one measure and worse in another"
        tested = " or its answers" if self.counted else ""
        trained = ", fine-tuned or not," if self._adapted else ""
        return [
            f"Do not extend: at {base.target:,} tokens none of these methods{trained} improves the loss"
            f"{tested} significantly without harm ({why}).",
            *self._by_kind(),
        ]

    @property
    def _adapted(self) -> bool:
        return any(result.adapted for result in self.reading.values())


def _engines(taken: Ranked, plain: Sequence[Ranked]) -> str:
    only = f"Only transformers runs {taken.label}, with code from the checkpoint"
    if plain:
        gap = plain[0].loss.value - taken.loss.value
        only += f"; the best method for other engines is {plain[0].label}, its loss {gap:+.3f} nats/token"
    return f"{only}."


def _row(result: Result, measure: str, **at: int | str) -> Row:
    row = result.row(measure, **at)
    if row is None:
        raise RopepatchError(
            f"{result.label} has no {measure} at {at}",
            hint="measure again with `ropepatch compare`",
        )
    return row


def _number(value: float, missing: float = math.inf) -> float:
    return missing if math.isnan(value) else value


def signed(mean: Mean) -> str:
    """A difference with its 95 % interval, both with a sign."""
    low, high = mean.interval()
    doubt = f" (95 % interval {low:+.3f} to {high:+.3f})" if not mean.missing else ""
    return f"{mean.value:+.3f}{doubt}"


def _share(mean: Mean) -> str:
    low, high = mean.interval()
    return f"{mean.value:.0%} of {mean.weight:.0f} (95 % interval {low:.0%} to {high:.0%})"
