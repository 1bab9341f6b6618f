"""Sentences about results: what was measured, the verdict, its warnings, and the provenance."""

from __future__ import annotations

from collections.abc import Sequence

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import Comparison, training_free
from ropepatch.evaluation.intervals import Mean, difference
from ropepatch.evaluation.ranking import Ranked, Ranking, rank
from ropepatch.evaluation.results import Result
from ropepatch.evaluation.retrieval import THRESHOLD
from ropepatch.evaluation.tasks import task_of

VERSIONS = ("ropepatch", "transformers", "torch")


def ranking_lines(ranking: Ranking) -> list[str]:
    """The warnings and the advice that follow from a ranking, for terminal, notebook and report."""
    lines = [f"Warning: {warning}." for warning in ranking.warnings]
    best = ranking.best
    if best is not None:
        lines += _recommendation(ranking, best)
    elif ranking.rows[0].loss.missing:
        lines.append(
            "No method is recommended: fewer than three documents. Give more text."
        )
    else:
        lines.append(
            f"Do not extend: at {ranking.target:,} tokens no method is better than the baseline in one "
            "measure and worse in none."
        )
    for control in ranking.controls:
        lines.append(f"Do not use {control}, a control that ignores distant tokens.")
    for kind, reason in ranking.not_counted.items():
        lines.append(f"{kind} does not count: {reason}.")
    for kind, reason in ranking.not_measured.items():
        lines.append(f"{kind} was not measured: {reason}.")
    if ranking.rows[0].answers and not ranking.kinds:
        lines.append("Retrieval does not rank: no kind of question counts.")
    return lines


def _recommendation(ranking: Ranking, best: Ranked) -> list[str]:
    """The method to use, with its gains, its costs, and what speaks for others."""
    gains = ", ".join(
        f"{measure} {signed(best.gain(measure))}" for measure in best.better
    )
    lines = [
        f"Use {best.label}. Gain at {ranking.target:,} tokens, in nats/token (95 %): {gains}."
    ]
    cost = best.short_context_cost
    if cost.value > 0 and cost.differs:
        lines.append(
            f"It is significantly worse within the original length of {ranking.original:,} tokens: loss "
            f"{signed(cost)} nats/token."
        )
    if best.label in ranking.remappings:
        lines.append(
            f"Only transformers runs {best.label}, with code from the checkpoint."
        )
        if ranking.best_scaling is not None:
            lines.append(
                f"The best method for other engines is {ranking.best_scaling.label}."
            )
    for kind in ranking.kinds:
        found = best.answers[kind].found
        for label, more in ranking.more_accurate(best, kind).items():
            outcome = "significant" if more.differs else "not significant"
            lines.append(
                f"{label} has a higher {kind} accuracy, by {percent(more)}: {outcome}."
            )
        if found.value < THRESHOLD:
            lines.append(
                f"Its {kind} accuracy is {found.value:.0%}. Train it, or use a shorter target."
            )
    return lines


def verdict_lines(groups: Sequence[Comparison]) -> list[str]:
    """The verdict on one model and target: its ranking, if any, and the gain from training."""
    first: dict[str, Comparison] = {}
    for group in groups:
        first.setdefault(group.task, group)
    ranking = _ranking([*first.values()])
    lines = [f"Warning: {warning}." for group in groups for warning in group.warnings()]
    if ranking is not None:
        lines += ranking_lines(ranking)
    for group in first.values():
        lines += _gains(group)
    return list(dict.fromkeys(lines))


def _ranking(groups: Sequence[Comparison]) -> Ranking | None:
    """The ranking of `ropepatch compare`, if the results suffice."""
    results = [result for group in groups for result in group.results.values()]
    loss = [result for result in results if result.of("loss", "begin", "end")]
    base = [result.label for result in loss if result.scaling is None]
    if len(base) != 1 or len({result.label for result in loss}) < len(loss):
        return None
    try:
        return rank(results, base=base[0])
    except RopepatchError:  # too few, or not comparable
        return None


def _gains(group: Comparison) -> list[str]:
    """The gain of every training over its start, paired by document."""
    lines = []
    for name, result in group.results.items():
        before = training_free(group.results, result) if result.fine_tuned else None
        if before is None:
            continue
        at = {"length": group.target}
        try:
            start = group.results[before].mean("loss", **at)
            gain = difference(start, result.mean("loss", **at))
        except RopepatchError:  # a result without its documents
            continue
        if not gain.missing:
            outcome = "significant" if gain.differs else "not significant"
            lines.append(
                f"Training gain of {name} over {before}: {signed(gain)} nats/token, {outcome}."
            )
    return lines


def signed(mean: Mean) -> str:
    """A difference with its 95 % interval, all with a sign."""
    low, high = mean.interval()
    return (
        f"{mean.value:+.3f}"
        if mean.missing
        else f"{mean.value:+.3f} ({low:+.3f} to {high:+.3f})"
    )


def percent(mean: Mean) -> str:
    """A difference of shares with its 95 % interval."""
    low, high = mean.interval()
    return f"{mean.value:.0%} (95 % interval {low:.0%} to {high:.0%})"


def measured(groups: Sequence[Comparison]) -> str:
    """The model and the methods that were measured."""
    results = {
        name: result for group in groups for name, result in group.results.items()
    }
    names = [
        f"{name} (fine-tuned)" if result.fine_tuned else name
        for name, result in results.items()
    ]
    target = f"{groups[0].target:,}"
    return f"{groups[0].model} was {groups[0].history}. Measured to {target} tokens: {', '.join(names)}."


def variant(group: Comparison, groups: Sequence[Comparison]) -> str:
    """The settings that differ from those of the other comparisons of its task; empty if none do."""
    others = [other.parameters for other in groups if other.task == group.task]
    settings = task_of(group.task).model_fields.keys() - {"lengths", "metadata"}
    return ", ".join(
        str(value) if name == "text" else f"{name} {value}"
        for name, value in group.parameters.items()
        if name in settings and any(other.get(name) != value for other in others)
    )


def origin(results: Sequence[Result]) -> list[str]:
    """The origin of the results: versions, device, dtype, and the amount of text."""
    lines = []
    for result in results:
        if result.env:  # the floor of a text is computed, not measured
            env = result.env
            parts = [f"{name} {env[name]}" for name in VERSIONS if name in env]
            parts += [env.get(key, f"unknown {key}") for key in ("device", "dtype")]
            lines.append(", ".join(parts))
    for result in results:
        if "tokens" in result.parameters:
            text = result.parameters.get("text", "text")
            lines.append(f"{text}, {result.parameters['tokens']:,} tokens")
    return list(dict.fromkeys(lines))
