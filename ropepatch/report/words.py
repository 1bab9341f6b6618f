"""What a report says in sentences."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ropepatch.evaluation.comparisons import training_free
from ropepatch.evaluation.curves import difference
from ropepatch.evaluation.ranking import document_sums, rank
from ropepatch.report.tables import perplexity
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ropepatch.evaluation.comparisons import Comparison
    from ropepatch.evaluation.ranking import Ranking
    from ropepatch.evaluation.results import Result, Row

PROTOCOLS = {
    "one-pass": "Each piece is read once; its first N tokens give the figure at length N.",
    "truncated": "At length N, the first N tokens of each piece are read.",
    "sliding": (
        "At length N, windows of N tokens move over each piece, {stride} tokens at a time; each token "
        "counts once, in the first window that holds it."
    ),
    "disjoint": "At length N, each piece is cut into windows of N tokens that share nothing.",
}
BOS = {
    "document": "A beginning-of-sequence token stands before each document.",
    "window": "A beginning-of-sequence token stands before each window.",
    "none": "No beginning-of-sequence token is added.",
}
RESAMPLED = "Intervals: 95 %, from drawing whole documents again with replacement."
WILSON = "Intervals: Wilson's, 95 %."
TASKS = {"perplexity": "Perplexity", "passkey": "Pass keys", "lm-eval": "lm-eval"}
DERIVED = (
    "lengths",
    "digest",
    "tokens",
    "pieces",
    "metadata",
    "max_length",
)  # they follow from model and target


def outcome(groups: Sequence[Comparison]) -> list[str]:
    """What was found on one model for one target: what was measured, what came out, what to do."""
    model, trained, target = groups[0].model, groups[0].trained, short_length(groups[0].target)
    begin = f"{model} was trained on {short_length(trained)} tokens. "
    begin += f"Measured here: {_measured(_results(groups), target)}."
    sentences: list[str] = []
    advice: Sequence[str] = ()
    reading = next((group for group in groups if group.task == "perplexity" and group.lengths()), None)
    asking = next((group for group in groups if group.task == "passkey" and group.lengths()), None)
    best = None
    if reading is not None:
        best, loss = _loss(reading)
        sentences += loss
    if asking is not None:
        sentences += _keys(asking, best)
    if reading is not None and (ranking := _ranking(reading, asking)) is not None:
        advice = ranking.advice
    return [" ".join(part) for part in ([begin], sentences, advice) if part]


def _measured(results: Mapping[str, Result], target: str) -> str:
    adapted = [name for name, result in results.items() if result.adapted]
    scaled = [name for name, result in results.items() if result.scaling and not result.adapted]
    words = []
    if scaled:
        free = ", training-free" * bool(adapted)
        words = [f"{_count(len(scaled), 'scaling')} of its rope to {target} tokens{free}: {_listed(scaled)}"]
    if adapted:
        words.append(f"trained for {target} tokens: {_listed(adapted)}")
    return "; ".join(words) or f"the model as it is, to {target} tokens"


def _told(group: Comparison) -> list[str]:
    """Those that are always named: the model as it is, and whatever was trained, before and after."""
    adapted = {name: result for name, result in group.results.items() if result.adapted}
    before = {training_free(group.results, result) for result in adapted.values()}
    return [
        name
        for name, result in group.results.items()
        if result.scaling is None or name in adapted or name in before
    ]


def _loss(group: Comparison) -> tuple[str, list[str]]:
    length = group.lengths()[-1]
    rows = group.at(length)
    best = min(rows, key=lambda name: rows[name]["nats"])
    numbers = f"{rows[best]['nats']:.3f} nats per token{_interval(rows[best])}"
    reads = "reads best" if len(rows) > 1 else "is"
    sentence = f"Over {short_length(length)} tokens, {_called(best)} {reads}: {numbers}, a perplexity of "
    sentence += perplexity(rows[best]["nats"])
    if len(rows) == 1:
        sentence = f"Over {short_length(length)} tokens it loses {numbers}, a perplexity of "
        sentence += perplexity(rows[best]["nats"])
    for name in (name for name in _told(group) if name in rows and name != best):
        sentence += (
            f"; {_called(name)}, {rows[name]['nats']:.3f}, a perplexity of {perplexity(rows[name]['nats'])}"
        )
    sentences = [f"{sentence}.", *_training(group)]
    if group.floor is not None:
        bound = [row["nats"] for row in group.floor.tables["by_length"] if row["length"] == length]
        sentences += [f"No model can be below {nats:.3f}." for nats in bound]
    return best, sentences


def _training(group: Comparison) -> Iterator[str]:
    """What every adaptation brought, document by document, where the results say it."""
    for name, result in group.results.items():
        before = training_free(group.results, result) if result.adapted else None
        if before is None or any("by_document" not in group.results[k].tables for k in (name, before)):
            continue
        first, then = (document_sums(group.results[k]) for k in (before, name))
        if then.num_documents < 2:
            continue
        gain, (low, high) = difference(first, then)
        verdict = "" if low > 0 else ": it does harm" if high < 0 else ", which may be nothing"
        yield (
            f"By its training {name} gains {gain:+.3f} nats per token over {before} "
            f"(95 % interval {low:+.3f} to {high:+.3f}){verdict}."
        )


def _keys(group: Comparison, reader: str | None) -> list[str]:
    length = group.lengths()[-1]
    rows = group.at(length)
    most = max(rows, key=lambda name: rows[name]["correct"] / rows[name]["n"])
    named = [name for name in dict.fromkeys([reader, most]) if name in rows]
    named += [name for name in _told(group) if name in rows and name not in named]
    found = [f"{_called(name)} finds {_found(rows[name])}" for name in named]
    return [f"Of the pass keys at {short_length(length)} tokens, {_listed(found)}."]


def _called(name: str) -> str:
    return f"the model {name}" if name == "as it is" else name


def _found(row: Row) -> str:
    low, high = row["interval"]
    return f"{row['correct']} of {row['n']} (95 % interval {low:.0%} to {high:.0%})"


def _ranking(reading: Comparison, asking: Comparison | None) -> Ranking | None:
    """The advice that `ropepatch compare` gives, where the results hold what it needs."""
    results = list(reading.results.values())
    base = [result.label for result in results if result.scaling is None]
    whole = all(
        "by_document" in result.tables
        and any(row["end"] <= reading.trained for row in result.tables.get("by_position", ()))
        for result in results
    )
    unique = len({result.label for result in results}) == len(results)
    if len(base) != 1 or len(results) < 2 or not whole or not unique or "digest" not in reading.parameters:
        return None
    return rank([*results, *(asking.results.values() if asking else ())], base=base[0])


def method_of(group: Comparison) -> str:
    """How a comparison was measured."""
    given = group.parameters
    if group.task == "perplexity":
        pieces = f"{_number(given['pieces'])} pieces of" if "pieces" in given else "Text:"
        tokens = f", {_number(given['tokens'])} tokens in all" if "tokens" in given else ""
        words = [f"{pieces} {given.get('text', 'text')}{tokens}."]
        protocol = str(given.get("protocol", ""))
        words.append(PROTOCOLS.get(protocol, protocol).format(stride=given.get("stride")))
        words.append(BOS.get(str(given.get("bos", "")), ""))
        return " ".join(filter(None, [*words, RESAMPLED]))
    if group.task == "passkey":
        asked = (
            f"{given['trials']} keys per length and depth"
            if "trials" in given
            else "Keys by length and depth"
        )
        seed = f", seed {given['seed']}" if "seed" in given else ""
        others = given.get("distractors")
        words = [f"{asked}{seed}{f', among {others} other keys' if others else ''}."]
        words.append("A key is found if greedy decoding would say it to the last token.")
        if "threshold" in given:
            words.append(
                f"Effective length: the greatest at which at least {given['threshold']:.1%} are found."
            )
        return " ".join([*words, WILSON])
    limit = given.get("limit")
    return f"Tasks of lm-eval{f', {limit} documents each' if limit else ''}."


def variants(groups: Sequence[Comparison]) -> dict[int, str]:
    """What sets each comparison apart from the others of its task, by its `id`; empty where nothing does."""
    found = {}
    for group in groups:
        others = [other.parameters for other in groups if other.task == group.task]
        telling = [
            name
            for name in group.parameters
            if name not in DERIVED and any(other.get(name) != group.parameters[name] for other in others)
        ]
        found[id(group)] = ", ".join(_setting(name, group.parameters[name]) for name in telling)
    return found


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


def _results(groups: Sequence[Comparison]) -> Mapping[str, Result]:
    return {name: result for group in groups for name, result in group.results.items()}


def _interval(row: Row) -> str:
    low, high = row.get("interval") or (None, None)
    return "" if low is None or high is None else f" (95 % interval {low:.3f} to {high:.3f})"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
