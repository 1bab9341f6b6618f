"""Which results may stand side by side: of one task, measured alike, on one model and for one target."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ropepatch.evaluation.results import Result, Row, as_read

FLOOR = "floor"  # the label of what no model can beat


@dataclass(frozen=True)
class Comparison:
    """Results side by side.

    Attributes:
        model: The name of the model.
        trained: The context it was trained on, in tokens; or was extended to.
        target: The context to reach, in tokens.
        task: The name of their task.
        parameters: How all of them were measured.
        results: By a name that is theirs alone; without the floor.
        floor: What no model can beat, where it is known.
        extended_from: The context it was trained on, if it was extended since and not trained; else None.
    """

    model: str
    trained: int
    target: int
    task: str
    parameters: Mapping[str, Any]
    results: Mapping[str, Result]
    floor: Result | None
    extended_from: int | None = None

    @property
    def history(self) -> str:
        """What it was trained on, and how far it was extended without training, in words."""
        if self.extended_from is None:
            return f"trained on {self.trained:,} tokens"
        return f"trained on {self.extended_from:,}, extended to {self.trained:,} tokens"

    def rows(self, table: str) -> dict[str, Sequence[Row]]:
        """A table of every result that has it, by name."""
        return {name: rows for name, result in self.results.items() if (rows := result.tables.get(table))}

    def named(self) -> dict[str, Result]:
        """Every result by its name, the floor last."""
        return dict(self.results) if self.floor is None else {**self.results, FLOOR: self.floor}

    def lengths(self) -> list[int]:
        """Those of the table ``by_length``, ascending."""
        return sorted({row["length"] for rows in self.rows("by_length").values() for row in rows})

    def at(self, length: int) -> dict[str, Row]:
        """The row of that length of every result that has it, by name."""
        return {
            name: row
            for name, rows in self.rows("by_length").items()
            for row in rows
            if row["length"] == length
        }

    def last(self, name: str) -> tuple[int, Row] | None:
        """The greatest length up to the target at which a result has a row, and the row."""
        rows = {row["length"]: row for row in self.rows("by_length").get(name, ())}
        greatest = max((length for length in rows if length <= self.target), default=None)
        return None if greatest is None else (greatest, rows[greatest])


def training_free(results: Mapping[str, Result], adapted: Result) -> str | None:
    """The name of the result with the scaling of an adapted one and the weights that it was adapted from."""
    scaling, weights = as_read(adapted.scaling), adapted.model["adapted_from"]
    for name, result in results.items():
        if result.model.get("weights") == weights and as_read(result.scaling) == scaling:
            return name
    return None


def comparisons(results: Sequence[Result]) -> list[Comparison]:
    """The results in groups, in the order in which these begin."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        model = [result.model["name"], result.model.get("revision"), result.model["trained"]]
        alike = [result.task, model, result.target, result.parameters]
        groups.setdefault(json.dumps(alike, sort_keys=True, default=str), []).append(result)
    return [_comparison(group) for group in groups.values()]


def by_place(groups: Sequence[Comparison]) -> dict[tuple[str, int], list[Comparison]]:
    """Comparisons by the name of their model and their target, in the order in which these come."""
    places: dict[tuple[str, int], list[Comparison]] = {}
    for group in groups:
        places.setdefault((group.model, group.target), []).append(group)
    return places


def _comparison(group: Sequence[Result]) -> Comparison:
    named: dict[str, Result] = {}
    for result in group:
        if result.label != FLOOR:
            count = sum(other.label == result.label for other in named.values())
            named[f"{result.label} ({count + 1})" if count else result.label] = result
    return Comparison(
        model=group[0].model["name"],
        trained=group[0].model["trained"],
        target=group[0].target,
        task=group[0].task,
        parameters=group[0].parameters,
        results=named,
        extended_from=group[0].model.get("extended_from"),
        floor=next((result for result in group if result.label == FLOOR), None),
    )
