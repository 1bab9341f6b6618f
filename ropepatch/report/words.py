"""What a report says in sentences."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ropepatch.attention import MAPS
from ropepatch.evaluation.comparisons import Comparison, training_free
from ropepatch.evaluation.ranking import Ranking, rank
from ropepatch.evaluation.results import Result
from ropepatch.evaluation.table import enumeration
from ropepatch.evaluation.tasks import task_of

VERSIONS = ("ropepatch", "transformers", "torch")


def outcome(groups: Sequence[Comparison]) -> list[str]:
    """What was found on one model for one target: what was measured, what came out, what to do."""
    model, target = groups[0].model, f"{groups[0].target:,}"
    results = {name: result for group in groups for name, result in group.results.items()}
    begin = f"{model} was {groups[0].history}. "
    begin += f"Measured here: {_measured(results, target)}."
    sentences: list[str] = []
    named: list[str] = []  # the best of every task, the first of these first
    worded = [group for group in groups if task_of(group.task).columns and group.lengths()]
    first = {group.task: group for group in reversed(worded)}
    for group in (group for group in worded if first[group.task] is group):
        task, length = task_of(group.task), group.lengths()[-1]
        rows = group.at(length)
        named.append(task.best(rows))
        names = [name for name in dict.fromkeys([*named, *_always_named(group)]) if name in rows]
        called = {_called(name) if len(rows) > 1 else "it": rows[name] for name in names}
        sentences.append(task.sentence(group, length, called, best=len(rows) > 1))
        sentences += task.remarks(group, length)
    ranking = _ranking(list(first.values()))
    return [" ".join(part) for part in ([begin], sentences, ranking.advice if ranking else ()) if part]


def verdict(groups: Sequence[Comparison]) -> list[tuple[str, str]]:
    """What `ropepatch compare` recommends, in figures by their names; empty where nothing is recommended."""
    first = {group.task: group for group in reversed(groups)}
    ranking = _ranking(list(first.values()))
    if ranking is None or ranking.recommended is None:
        return []
    loss = next(group for group in first.values() if task_of(group.task).ranks == "loss")
    base = next(label for label, result in loss.results.items() if result.scaling is None)
    rows = {row.label: row for row in ranking.rows}
    taken, plain = rows[ranking.recommended], rows[base]
    low, high = taken.price_interval
    doubt = f" (95 % interval {low:+.3f} to {high:+.3f})" if math.isfinite(low) else ""
    figures = [
        ("Take", taken.label),
        (
            f"Loss over {loss.target:,} tokens",
            f"{taken.nats:.3f}, {taken.nats - plain.nats:+.3f} nats against as it is",
        ),
        (f"Short-context cost, {loss.trained:,} tokens", f"{taken.price:+.3f} nats{doubt}"),
    ]
    if taken.found is not None:
        figures.append((f"Found at {loss.target:,} tokens", f"{taken.found:.0%} of {taken.asked} questions"))
    return figures


def origin(results: Sequence[Result]) -> list[str]:
    """Where the results come from: versions, device, data type, and how much text was read."""
    lines = [
        ", ".join(f"{name} {version}" for name, version in result.env.items() if name in VERSIONS)
        + f"; {result.env.get('device', 'unknown device')}, {result.env.get('dtype', '')}".rstrip(", ")
        for result in results
        if result.env  # the floor of a text is no measurement
    ]
    texts = [
        f"{result.parameters.get('text', 'text')}, {result.parameters['tokens']:,} tokens"
        for result in results
        if "tokens" in result.parameters
    ]
    return [*dict.fromkeys(lines), *dict.fromkeys(texts)]


def _measured(results: Mapping[str, Result], target: str) -> str:
    adapted = [name for name, result in results.items() if result.adapted]
    free = ", training-free" * bool(adapted)
    maps = [name for name, result in results.items() if result.scaling and result.scaling["method"] in MAPS]
    scaled = [name for name, result in results.items() if result.scaling and not result.adapted]
    scaled = [name for name in scaled if name not in maps]
    words = []
    for names, one, rest in ((scaled, "scaling", " of its rope"), (maps, "attention map", "")):
        if names:
            count = f"{len(names)} {one}{'s' * (len(names) > 1)}{rest}"
            words.append(f"{count} to {target} tokens{free}: {enumeration(names)}")
    if adapted:
        words.append(f"trained for {target} tokens: {enumeration(adapted)}")
    return "; ".join(words) or f"the model as it is, to {target} tokens"


def _always_named(group: Comparison) -> list[str]:
    """The model as it is, and whatever was trained, before and after."""
    adapted = {name: result for name, result in group.results.items() if result.adapted}
    before = {training_free(group.results, result) for result in adapted.values()}
    return [
        name
        for name, result in group.results.items()
        if result.scaling is None or name in adapted or name in before
    ]


def _called(name: str) -> str:
    return f"the model {name}" if name == "as it is" else name


def _ranking(groups: Sequence[Comparison]) -> Ranking | None:
    """The advice that `ropepatch compare` gives, where the results hold what it needs."""
    loss = next((group for group in groups if task_of(group.task).ranks == "loss"), None)
    if loss is None:
        return None
    results = list(loss.results.values())
    base = [result.label for result in results if result.scaling is None]
    whole = all(
        "by_document" in result.tables
        and any(row["end"] <= loss.trained for row in result.tables.get("by_position", ()))
        for result in results
    )
    unique = len({result.label for result in results}) == len(results)
    if len(base) != 1 or len(results) < 2 or not whole or not unique or "digest" not in loss.parameters:
        return None
    asking = (result for group in groups if group is not loss for result in group.results.values())
    return rank([*results, *asking], base=base[0])


def variants(groups: Sequence[Comparison]) -> dict[int, str]:
    """What sets each comparison apart from the others of its task, by its `id`; empty where nothing does."""
    apart = {}
    for group in groups:
        others = [other.parameters for other in groups if other.task == group.task]
        derived = task_of(group.task).derived
        telling = [
            name
            for name in group.parameters
            if name not in derived and any(other.get(name) != group.parameters[name] for other in others)
        ]
        apart[id(group)] = ", ".join(_setting(name, group.parameters[name]) for name in telling)
    return apart


def _setting(name: str, value: Any) -> str:
    if name in ("protocol", "text"):
        return str(value)
    return f"{name} {value.get('name', '…') if isinstance(value, dict) else value}"


def provenance(result: Result) -> list[tuple[str, str]]:
    """Everything that stands behind a result, by name."""
    lines = {"task": result.task, "target": result.target}
    lines |= {f"model {name}": value for name, value in result.model.items()}
    lines |= {f"scaling {name}": value for name, value in (result.scaling or {}).items()}
    lines |= dict(result.parameters)
    rows = result.tables.get("by_length") or ()
    lines |= {f"{name} read": rows[-1][name] for name in ("tokens", "documents") if rows and name in rows[-1]}
    lines |= dict(result.env)
    lines |= {} if result.seconds is None else {"seconds": result.seconds}
    return [(name, _value(value)) for name, value in lines.items() if value is not None]


def _value(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) > 12:
        return f"{len(value)} numbers, {value[0]} to {value[-1]}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
