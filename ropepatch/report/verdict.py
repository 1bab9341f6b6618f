"""Sentences about results: what was measured, the verdict, its warnings, and the provenance."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ropepatch.attention import REMAPPINGS
from ropepatch.evaluation.comparisons import Comparison, training_free
from ropepatch.evaluation.intervals import difference
from ropepatch.evaluation.ranking import Ranking, rank, signed
from ropepatch.evaluation.results import Result
from ropepatch.evaluation.table import enumeration
from ropepatch.evaluation.tasks import task_of

VERSIONS = ("ropepatch", "transformers", "torch")


@dataclass(frozen=True)
class Verdict:
    """Advice that follows from results, for terminal, notebook and report."""

    warnings: Sequence[str]  # reasons to doubt the advice, shown before it
    advice: Sequence[str] = ()

    @classmethod
    def of(cls, ranking: Ranking) -> Verdict:
        """The verdict of `ropepatch compare`."""
        return cls(ranking.warnings, ranking.advice)

    @classmethod
    def on(cls, groups: Sequence[Comparison]) -> Verdict:
        """The verdict on one model and target: its ranking, if any, and the gain from training."""
        first = list({group.task: group for group in reversed(groups)}.values())
        ranking = _ranking(first)
        warnings = dict.fromkeys(warning for group in groups for warning in group.warnings())
        advice = ranking.advice if ranking else ()
        return cls([*warnings], [*advice, *(line for group in first for line in _gains(group))])

    @property
    def lines(self) -> list[str]:
        """The warnings and the advice."""
        return [*(f"Warning: {warning}." for warning in self.warnings), *self.advice]


def _ranking(groups: Sequence[Comparison]) -> Ranking | None:
    """The ranking of `ropepatch compare`, if the results suffice."""
    results = [result for group in groups for result in group.results.values() if not result.served]
    loss = [result for result in results if result.of("loss", "begin", "end")]
    base = [result.label for result in loss if result.scaling is None]
    if len(base) != 1 or len(loss) < 2 or len({result.label for result in loss}) < len(loss):
        return None
    needed = [(result, length) for result in loss for length in (result.target, result.model["trained"])]
    if any((row := result.row("loss", length=n)) is None or not row.clusters for result, n in needed):
        return None
    return rank(results, base=base[0])


def _gains(group: Comparison) -> Iterator[str]:
    """The gain of every training over its start, paired by document."""
    for name, result in group.results.items():
        if not result.adapted or (before := training_free(group.results, result)) is None:
            continue
        rows = [group.results[label].row("loss", length=group.target) for label in (before, name)]
        means = [row.mean for row in rows if row is not None and row.clusters]
        if len(means) < 2 or (gain := difference(*means)).missing:
            continue
        low, high = gain.interval()
        doubt = "" if low > 0 else " (harmful)" if high < 0 else " (not significant)"
        yield f"Training gain of {name} over {before}: {signed(gain)} nats/token{doubt}."


def measured(groups: Sequence[Comparison]) -> str:
    """The model and the methods that were measured."""
    target = f"{groups[0].target:,}"
    results = {name: result for group in groups for name, result in group.results.items()}
    adapted = [name for name, result in results.items() if result.adapted]
    methods = {name: r.scaling["method"] for name, r in results.items() if r.scaling and not r.adapted}
    parts = []
    for kind, is_remapping in (("RoPE scaling", False), ("position remapping", True)):
        if names := [name for name, method in methods.items() if (method in REMAPPINGS) == is_remapping]:
            count = f"{len(names)} {kind}{'s' * (len(names) > 1)}"
            parts.append(
                f"{count} to {target} tokens{' without training' * bool(adapted)}: {enumeration(names)}"
            )
    if served := [name for name, result in results.items() if result.served]:
        parts.append(f"served: {enumeration(served)}")
    if adapted:
        parts.append(f"fine-tuned for {target} tokens: {enumeration(adapted)}")
    models = "; ".join(parts) or f"the baseline, to {target} tokens"
    return f"{groups[0].model} was {groups[0].history}. Measured here: {models}."


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
    lines = [
        ", ".join(f"{name} {version}" for name, version in result.env.items() if name in VERSIONS)
        + f"; {result.env.get('server') or result.env.get('device', 'unknown device')}, "
        + f"{result.env.get('dtype', '')}".rstrip(", ")
        for result in results
        if result.env  # the floor of a text is computed, not measured
    ]
    texts = [
        f"{result.parameters.get('text', 'text')}, {result.parameters['tokens']:,} tokens"
        for result in results
        if "tokens" in result.parameters
    ]
    return [*dict.fromkeys(lines), *dict.fromkeys(texts)]


def provenance(result: Result) -> list[tuple[str, str]]:
    """The provenance of a result, by name."""
    lines: dict[str, Any] = {"task": result.task, "target": result.target}
    lines |= {f"model {name}": value for name, value in result.model.items()}
    lines |= {f"scaling {name}": value for name, value in (result.scaling or {}).items()}
    lines |= result.parameters
    if rows := [row for row in result.rows if row.at.keys() == {"length"}]:
        lines |= {"n": rows[-1].n, "clusters": len(rows[-1].clusters)}
    lines |= result.env | {"seconds": result.seconds}
    return [(name, _value(value)) for name, value in lines.items() if value is not None]


def _value(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) > 12:
        return f"{len(value)} numbers, {value[0]} to {value[-1]}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
