"""The verdict on results in sentences, for terminal, notebook and report."""

from __future__ import annotations

from collections.abc import Sequence

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import Comparison
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.ranking import Ranked, Ranking, rank
from ropepatch.evaluation.retrieval import THRESHOLD


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
    """The warnings and the ranking, if any, of one model and target; of each task the first comparison."""
    first: dict[str, Comparison] = {}
    for group in groups:
        first.setdefault(group.task, group)
    ranking = _ranking([*first.values()])
    lines = [f"Warning: {warning}." for group in groups for warning in group.warnings()]
    if ranking is not None:
        lines += ranking_lines(ranking)
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


def signed(mean: Mean) -> str:
    """A difference with its 95 % interval, all with a sign."""
    low, high = mean.interval()
    interval = "" if mean.missing else f" ({low:+.3f} to {high:+.3f})"
    return f"{mean.value:+.3f}{interval}"


def percent(mean: Mean) -> str:
    """A difference of shares with its 95 % interval."""
    low, high = mean.interval()
    return f"{mean.value:.0%} (95 % interval {low:.0%} to {high:.0%})"
