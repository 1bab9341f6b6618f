"""What a report says in sentences."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ropepatch.attention import MAPS
from ropepatch.evaluation.comparisons import Comparison, training_free
from ropepatch.evaluation.intervals import difference
from ropepatch.evaluation.ranking import Ranking, rank, signed
from ropepatch.evaluation.results import Result, Row, measure_of
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
    first = {group.task: group for group in reversed(groups) if group.measure is not None}
    for group in (group for group in groups if first.get(group.task) is group):
        for measure in dict.fromkeys(m for m, keys in group.kinds_of_rows() if keys == ("length",)):
            length = group.lengths(measure)[-1]
            rows = group.at(measure, length=length)
            named.append(_best(rows, measure))
            names = [name for name in dict.fromkeys([*named, *_always_named(group)]) if name in rows]
            sentences.append(sentence(group, measure, length, {name: rows[name] for name in names}))
        sentences += _of_training(group)
    ranking = _ranking(list(first.values()))
    return [" ".join(part) for part in ([begin], sentences, ranking.advice if ranking else ()) if part]


def sentence(group: Comparison, measure: str, length: int, rows: Mapping[str, Row]) -> str:
    """A measure at a length of each method, by what it is called, the most important first."""
    figures = []
    for name, row in rows.items():
        doubt = f"95 % interval {row.interval}" if row.interval else ""
        also = (
            f"perplexity {perplexity_text(row.value)}" if measure == "loss" and row.value is not None else ""
        )
        details = ", ".join(filter(None, [also, f"n = {row.n:,}" if measure == "found" else "", doubt]))
        figures.append(f"{name} {row.text}" + (f" ({details})" if details else ""))
    text = group.parameters.get("text")
    of = f" of {text}" if text and measure == "loss" else ""
    return f"{measure_of(measure).title} at {length:,} tokens{of}: {', '.join(figures)}."


def perplexity_text(nats: float) -> str:
    """exp(nats) as it is read: 1.702, 29.41, 1734, 1.3e6; ∞ where no number holds it."""
    if nats < math.log(1e4):
        value = math.exp(nats)
        return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.0f}"
    return f"{math.exp(nats):.1e}".replace("e+0", "e").replace("e+", "e") if nats < 700 else "∞"


def setup(group: Comparison) -> str:
    """What was measured, in a few words."""
    of = group.parameters
    if "pieces" in of:
        protocol = "" if of["protocol"] == "one-pass" else f", {of['protocol']}"
        return f"{of['text']}, {of['pieces']} x {of['read']} tokens{protocol}"
    if "haystacks" in of:
        each = f"{of['keys']} question{'s' * (of['keys'] > 1)} of each kind"
        return f"{of['haystacks']} haystacks, {each}: {', '.join(of['kinds'])}"
    return task_of(group.task).title or group.task


def verdict(groups: Sequence[Comparison]) -> list[tuple[str, str]]:
    """What `ropepatch compare` recommends, in figures by their names; empty where nothing is recommended."""
    first = {group.task: group for group in reversed(groups)}
    ranking = _ranking(list(first.values()))
    if ranking is None or ranking.recommended is None:
        return []
    target, trained = f"{groups[0].target:,}", f"{groups[0].trained:,}"
    taken = next(row for row in ranking.rows if row.label == ranking.recommended)
    figures = [
        ("Take", taken.label),
        (
            f"Loss over {target} tokens",
            f"{taken.loss.value:.3f}, gain over the baseline {signed(taken.loss_gain)}",
        ),
        (f"Short-context cost, {trained} tokens", f"{signed(taken.short_context_cost)} nats"),
    ]
    if taken.found is not None:
        found = f"{taken.found.value:.0%} of {taken.found.weight:.0f} answers"
        figures.append((f"Found at {target} tokens", found))
    return figures


def warnings(groups: Sequence[Comparison]) -> list[str]:
    """Every warning that belongs to the results of one model and target."""
    return list(dict.fromkeys(warning for group in groups for warning in group.warnings()))


def _best(rows: Mapping[str, Row], measure: str) -> str:
    better = measure_of(measure).better
    return max(rows, key=lambda name: -math.inf if (v := rows[name].value) is None else better * v)


def _of_training(group: Comparison) -> list[str]:
    """What every adaptation changed, document by document, and what no model can beat."""
    sentences = []
    for name, result in group.results.items():
        before = training_free(group.results, result) if result.adapted else None
        rows = (
            []
            if before is None
            else [group.results[k].row("loss", length=group.target) for k in (before, name)]
        )
        if before is not None and all(row is not None and row.clusters for row in rows):
            gain = difference(*(row.mean for row in rows if row is not None))
            if not gain.missing:
                low, high = gain.interval()
                said = "" if low > 0 else ": it does harm" if high < 0 else ", which is not significant"
                sentences.append(f"Training gains {name} {signed(gain)} nats per token over {before}{said}.")
    least = group.floor and group.floor.row("loss", length=group.lengths()[-1])
    return [*sentences, *([f"No model can be below {least.text}."] if least else [])]


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
    return "; ".join(words) or f"the baseline, to {target} tokens"


def _always_named(group: Comparison) -> list[str]:
    """The baseline, and whatever was trained, before and after."""
    adapted = {name: result for name, result in group.results.items() if result.adapted}
    before = {training_free(group.results, result) for result in adapted.values()}
    return [
        name
        for name, result in group.results.items()
        if result.scaling is None or name in adapted or name in before
    ]


def _ranking(groups: Sequence[Comparison]) -> Ranking | None:
    """The advice that `ropepatch compare` gives, where the results hold what it needs."""
    results = [result for group in groups for result in group.results.values()]
    loss = [result for result in results if result.of("loss", "begin", "end")]
    base = [result.label for result in loss if result.scaling is None]
    unique = len({result.label for result in loss}) == len(loss)
    if len(base) != 1 or len(loss) < 2 or not unique:
        return None
    needed = [(result, length) for result in loss for length in (result.target, result.model["trained"])]
    if any((row := result.row("loss", length=n)) is None or not row.clusters for result, n in needed):
        return None
    return rank(results, base=base[0])


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
    if rows := [row for row in result.rows if row.at.keys() == {"length"}]:
        lines |= {"n": rows[-1].n, "clusters": len(rows[-1].clusters)}
    lines |= dict(result.env)
    lines |= {} if result.seconds is None else {"seconds": result.seconds}
    return [(name, _value(value)) for name, value in lines.items() if value is not None]


def _value(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) > 12:
        return f"{len(value)} numbers, {value[0]} to {value[-1]}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
