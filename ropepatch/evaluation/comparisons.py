"""Comparisons: results of one task with the same settings, on one model and for one target length."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ropepatch.evaluation.intervals import FEWEST, Mean
from ropepatch.evaluation.results import (
    Result,
    Row,
    Series,
    identity,
    measure_of,
)
from ropepatch.evaluation.retrieval import why_not_counted

FLOOR = "floor"  # the label of the least possible loss
BASELINE = "baseline"  # the label of a model without scaling
FEW = 5  # documents or prompts; fewer give a warning
UNITS = {"perplexity": "documents", "retrieval": "prompts"}


@dataclass(frozen=True)
class Comparison:
    """Results that were measured with the same settings."""

    model: str  # its name
    trained: int  # its context length in tokens, original or extended
    target: int  # the target length in tokens
    task: str  # its name
    parameters: Mapping[str, Any]
    results: Mapping[str, Result]  # by a unique name; without the floor
    floor: Result | None  # the least possible loss, if it is known
    # The original length, if extended without training
    extended_from: int | None = None

    @property
    def history(self) -> str:
        """The original length, and the length extended to without training, in words."""
        if self.extended_from is None:
            return f"trained on {self.trained:,} tokens"
        return f"trained on {self.extended_from:,}, extended to {self.trained:,} tokens"

    def rows(self, measure: str, *keys: str) -> dict[str, list[Row]]:
        """The rows of a measure at these keys, by name of the result, those of the floor last."""
        named = self.named if self.results else {}
        found = {name: result.of(measure, *keys) for name, result in named.items()}
        return {name: rows for name, rows in found.items() if rows}

    @property
    def named(self) -> dict[str, Result]:
        """Every result by its name, the floor last."""
        floor = {} if self.floor is None else {FLOOR: self.floor}
        return {**self.results, **floor}

    @property
    def kinds(self) -> list[str]:
        """The kinds of questions."""
        return list(self.parameters.get("kinds") or ())

    @property
    def series(self) -> list[Series]:
        """The measures by length, in order; never pooled over several kinds."""
        found: dict[Series, None] = {}
        for result in self.results.values():
            for row in result.rows:
                if by_length(row) and ("kind" in row.at) == (len(self.kinds) > 1):
                    found[Series(row.measure, row.at.get("kind"))] = None
        return [*found]

    @property
    def main(self) -> list[Series]:
        """The first measure by length, for every kind of question."""
        return [one for one in self.series if one.measure == self.series[0].measure]

    @property
    def not_counted(self) -> dict[str, str]:
        """The reason for each kind of question that does not count; see `not_counted`."""
        for result in self.results.values():
            if result.scaling is None and not result.fine_tuned:
                return not_counted(result)
        return {}

    def reservation(self, series: Series) -> str:
        """A note after the title of a series whose kind of question does not count, or was taught."""
        reasons, kind = self.not_counted, self._kind(series)
        notes = [f"not counted: {reasons[kind]}"] if kind in reasons else []
        taught = [
            name for name, result in self.results.items() if kind in result.taught
        ]
        if taught:
            notes.append(f"this kind was taught to {', '.join(taught)}")
        return f" ({'; '.join(notes)})" if notes else ""

    def counts(self, series: Series) -> bool:
        """Whether the kind of question of a series counts."""
        return self._kind(series) not in self.not_counted

    def _kind(self, series: Series) -> str:
        return series.kind or next(iter(self.kinds), "")

    def last(self, name: str, series: Series) -> Row | None:
        """The row of a result at the greatest length up to the target length."""
        rows = [
            row for row in series.of(self.results[name]) if row.length <= self.target
        ]
        return max(rows, key=lambda row: row.length, default=None)

    def warnings(self) -> list[str]:
        """Reasons to doubt its intervals: too few documents or prompts."""
        return few(next(iter(self.results.values()))) if self.results else []


def by_length(row: Row) -> bool:
    """Whether a row is at a length, of a text or of a kind of question."""
    return row.at.keys() - {"kind"} == {"length"}


def not_counted(base: Result) -> dict[str, str]:
    """The reason for each kind of question that does not count; see `why_not_counted`."""
    found: dict[str, dict[int, Mean]] = {}
    for row in base.of("found", "kind", "length"):
        found.setdefault(row.at["kind"], {})[row.length] = row.mean
    keys, trained = base.parameters.get("keys", 1), base.model["trained"]
    reasons = {}
    for kind, shares in found.items():
        reason = why_not_counted(shares, kind=kind, keys=keys, trained=trained)
        if reason is not None:
            reasons[kind] = reason
    return reasons


def few(result: Result) -> list[str]:
    """A warning if a result has too few documents or prompts."""
    rows = [row for row in result.rows if row.clusters and by_length(row)]
    clusters = min((len(row.clusters) for row in rows), default=FEW)
    if clusters >= FEW:
        return []
    effect = f"with fewer than {FEW} only large differences are significant"
    if clusters < FEWEST:
        effect = f"without {FEWEST} there is no interval, and no difference is tested"
    return [f"{UNITS.get(result.task, 'clusters')}: {clusters}; {effect}"]


def comparisons(results: Sequence[Result]) -> list[Comparison]:
    """Group comparable results, in order; spellings of model and text do not matter."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    names: dict[str, str] = {}  # of models, in the first spelling
    for result in results:
        model: dict[str, Any] = dict(result.model)
        model.pop("taught", None)
        if base := model.pop("fine_tuned_from", None):
            model["weights"] = base
        key = json.dumps(identity(model), sort_keys=True)
        settings = json.dumps(identity(result.parameters), sort_keys=True)
        place = key, result.task, result.target, settings
        groups.setdefault(place, []).append(result)
        names.setdefault(key, result.model["name"])
    return [_comparison(names[key], group) for (key, *_), group in groups.items()]


def by_place(groups: Sequence[Comparison]) -> dict[tuple[str, int], list[Comparison]]:
    """Comparisons by the name of their model and their target, in order of appearance."""
    places: dict[tuple[str, int], list[Comparison]] = {}
    for group in groups:
        places.setdefault((group.model, group.target), []).append(group)
    return places


def _comparison(model: str, group: Sequence[Result]) -> Comparison:
    named: dict[str, Result] = {}
    for result in group:
        if result.label != FLOOR:
            count = sum(other.label == result.label for other in named.values())
            named[f"{result.label} ({count + 1})" if count else result.label] = result
    return Comparison(
        model=model,
        trained=group[0].model["trained"],
        target=group[0].target,
        task=group[0].task,
        parameters=group[0].parameters,
        results=named,
        extended_from=group[0].model.get("extended_from"),
        floor=next((result for result in group if result.label == FLOOR), None),
    )


def first_figure(result: Result) -> str:
    """The first measure at its greatest length, with its interval, of every kind of question."""
    (group,) = comparisons([result])
    figures, length = [], 0
    for series in group.main:
        row = group.last(result.label, series)
        if row is not None:
            length = row.length
            interval = row.interval and f"({row.interval})"
            figures.append(" ".join(filter(None, [series.kind, row.text, interval])))
    if not figures:
        return ""
    title = measure_of(group.main[0].measure).title.lower()
    return f" at {length:,} tokens: {title} {', '.join(figures)}"
