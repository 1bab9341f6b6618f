"""Which scaling reads a target best: from the results of a comparison, with the doubt that they leave."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ropepatch.attention import MAPS, AttentionMap
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.curves import Perplexity, difference
from ropepatch.evaluation.grid import THRESHOLD
from ropepatch.evaluation.results import Result, document_sums, finite, mean_nats
from ropepatch.evaluation.table import enumeration
from ropepatch.evaluation.tasks import task_of

Interval = tuple[float, float]

RULE = (
    "of the scalings that are seen to beat the model as it is and that this text does not tell from the one "
    "with the least loss over the target (95 % interval of the difference, text by text), the one that finds "
    "the most passkeys, if the model can find them within its trained context, then the one with the least "
    "loss within that context."
)


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One scaling at the target.

    Attributes:
        label: Its name in the results.
        nats: Mean loss over the whole target, nats per token.
        interval: The 95 % interval of that mean.
        behind: By how much it is behind the first of the ranking, in nats, and the 95 % interval of that,
            text by text.
        inside: Mean loss within the trained context.
        price: By how much that is above the loss of the model as it is, in nats, and the 95 % interval of
            that, text by text; infinite for results without the sums of each text within that context.
        keys: Passkeys found at the target, of how many; None if none were asked for.
        front: Whether no other is at least as good in all of nats, keys and inside and better in one; keys
            count if the model finds them within its trained context, and all were asked for them.
    """

    label: str
    nats: float
    interval: Interval
    behind: float
    behind_interval: Interval
    inside: float
    price: float
    price_interval: Interval
    keys: tuple[int, int] | None
    front: bool

    @property
    def tied(self) -> bool:
        """Whether the texts do not tell it from the first."""
        return self.behind_interval[0] <= 0


@dataclass(frozen=True)
class Ranking:
    """The scalings, best first, and the advice that follows.

    Attributes:
        rows: Best first.
        recommended: The label to take; None where none of the scalings helps.
        advice: Why, in sentences.
    """

    rows: tuple[Ranked, ...]
    recommended: str | None
    advice: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """The same for JSON, which has no infinity: None stands for it."""
        record: dict[str, Any] = _finite(asdict(self))
        return record


def rank(results: Sequence[Result], *, base: str, ignored: Sequence[str] = ()) -> Ranking:
    """Rank the scalings of one model at one target by their loss over all of it.

    Scalings whose paired interval to the best holds 0 are tied. Recommended is, of the tied ones that are
    themselves seen to beat the model as it is, the one that finds the most passkeys, if the model finds them
    within its trained context, then the one with the least loss within that (`RULE`). Loss decides first:
    every token tells of it, where 20 keys leave a third of the scale open. A control, an attention map that
    forgets, is ranked and never recommended.

    Args:
        results: Of one-pass perplexity, and of passkeys if these were asked for. Where several of one kind
            have a label, as of two passkey tasks, the first of them ranks.
        base: The label of the model as it is.
        ignored: Labels that are no scalings.

    Raises:
        RopepatchError: No scaling, no base, or results that are not of the same texts.
    """
    by_role: dict[str | None, dict[str, Result]] = {"loss": {}, "retrieval": {}}
    for result in results:
        if result.label not in ignored:
            by_role.setdefault(task_of(result.task).ranks, {}).setdefault(result.label, result)
    reading, retrieval = by_role["loss"], by_role["retrieval"]
    adapted = any(result.adapted for result in reading.values())
    if base not in reading or len(reading) < 2:
        raise RopepatchError("nothing to rank: need the model as it is and at least one scaling")
    if len({r.parameters["digest"] for r in reading.values()}) > 1:
        raise RopepatchError("the results are of different texts", hint="compare them in one suite")
    sums = {label: document_sums(result) for label, result in reading.items()}
    order = sorted(sums, key=lambda label: sums[label].mean)
    inside = {label: _inside(result) for label, result in reading.items()}
    keys = {label: _keys(retrieval[label]) for label in order if label in retrieval}
    retrieves = base in retrieval and _retrieves(retrieval[base], within=reading[base].model["trained"])
    comparable = retrieves and len(keys) == len(order)
    front = _front(
        {
            label: (
                sums[label].mean,
                inside[label],
                *([-keys[label][0] / keys[label][1]] if comparable else []),
            )
            for label in order
        }
    )
    rows = []
    for label in order:
        behind, interval = difference(sums[label], sums[order[0]])
        price, price_interval = _price(reading[label], reading[base])
        rows.append(
            Ranked(
                label=label,
                nats=sums[label].mean,
                interval=sums[label].interval,
                behind=behind,
                behind_interval=interval,
                inside=inside[label],
                price=price,
                price_interval=price_interval,
                keys=keys.get(label),
                front=label in front,
            )
        )
    maps = {label for label, result in reading.items() if _map_of(result)}
    controls = [label for label in order if (kind := _map_of(reading[label])) and kind.control]

    def without(labels: Collection[str]) -> Ranking:
        if reading.keys() <= {base, *labels}:
            return Ranking((), None, ())
        return rank(results, base=base, ignored=[*ignored, *labels])

    if controls:
        others = without(controls)
        aside = f"{enumeration(controls)} is a control, which forgets what is far: nothing to take."
        return Ranking(tuple(rows), others.recommended, (*others.advice, aside))
    taken, advice = _advice(rows, sums, base, reading[base], retrieves=retrieves, adapted=adapted)
    if taken in maps:
        plain = without(maps).recommended
        only = f"Only transformers runs {taken}, by code that comes with the checkpoint"
        if plain:
            only += f"; the best that other engines run, too, is {plain}, "
            only += f"{sums[plain].mean - sums[taken].mean:+.3f} nats over the target"
        advice += (f"{only}.",)
    return Ranking(tuple(rows), taken, advice)


def _advice(
    rows: list[Ranked],
    sums: dict[str, Perplexity],
    base: str,
    measured: Result,
    *,
    retrieves: bool,
    adapted: bool,
) -> tuple[str | None, tuple[str, ...]]:
    to, trained = measured.target, measured.model["trained"]
    scalings = [row for row in rows if row.label != base]
    if sums[base].num_documents < 2:
        return None, ("One piece of text tells no scaling from another: give more.",)
    gain, (low, high) = difference(sums[base], sums[scalings[0].label])
    if low <= 0:
        return None, (
            f"Do not extend: over {to} tokens none of these scalings{', trained or not,' * adapted} is seen "
            f"to read this text better than the model as it is ({scalings[0].label} by {gain:+.3f} nats, "
            f"95 % interval {low:+.3f} to {high:+.3f}).",
        )
    # The best scaling is now the first of all rows, to which they are tied or not.
    tied = [row for row in scalings if row.tied and difference(sums[base], sums[row.label])[1][0] > 0]
    chosen = min(tied, key=lambda row: (-_found(row) if retrieves else 0, row.inside, row.nats))
    gain = sums[base].mean - chosen.nats
    advice = [
        f"Take {chosen.label}: {gain:.3f} nats per token less than the model as it is over {to} tokens."
    ]
    if len(tied) > 1:
        others = ", ".join(row.label for row in tied if row is not chosen)
        equal = [row for row in tied if not retrieves or row.keys == chosen.keys]
        reasons = ["finds the most passkeys"] * (len(equal) < len(tied))
        reasons += [f"loses the least within {trained} tokens"] * (len(equal) > 1)
        advice.append(f"This text does not tell it from {others}; of these, it {' and '.join(reasons)}.")
    elif len(scalings) > 1 and not scalings[1].tied:
        low, high = scalings[1].behind_interval
        advice.append(
            f"The next, {scalings[1].label}, loses {scalings[1].behind:.3f} nats more (95 % interval "
            f"{low:.3f} to {high:.3f})."
        )
    if chosen.price > 0:
        low, high = chosen.price_interval
        doubt = f" (95 % interval {low:+.3f} to {high:+.3f})" if math.isfinite(low) else ""
        advice.append(
            f"Its short-context cost: {chosen.price:+.3f} nats within the first {trained} tokens{doubt}."
        )
    finder = max(scalings, key=_found)
    if retrieves and _found(finder) > _found(chosen):
        advice.append(
            f"The most passkeys are found by {finder.label}, {_found(finder)} against {_found(chosen)}, "
            f"for {finder.nats - chosen.nats:+.3f} nats over the target."
        )
    if chosen.keys is not None and not retrieves:
        advice.append(
            f"Passkeys tell nothing: as it is, the model does not find them within {trained} tokens."
        )
    elif chosen.keys is not None and chosen.keys[0] < THRESHOLD * chosen.keys[1]:
        advice.append(
            f"It finds {chosen.keys[0]} of {chosen.keys[1]} passkeys at {to} tokens: "
            f"{'train longer' if adapted else 'train it'}, or choose a nearer target."
        )
    return chosen.label, tuple(advice)


def _map_of(result: Result) -> type[AttentionMap] | None:
    return MAPS.get((result.scaling or {}).get("method", ""))


def _front(figures: Mapping[str, tuple[float, ...]]) -> set[str]:
    """The labels that no other is at least equal to in every figure, less being better, and unlike in one."""

    def beaten(mine: tuple[float, ...]) -> bool:
        return any(
            other != mine and all(a <= b for a, b in zip(other, mine, strict=True))
            for other in figures.values()
        )

    return {label for label, mine in figures.items() if not beaten(mine)}


def _inside(result: Result) -> float:
    rows = [row for row in result.tables["by_position"] if row["end"] <= result.model["trained"]]
    return mean_nats(rows)


def _price(result: Result, base: Result) -> tuple[float, Interval]:
    """The loss within the trained context above that of the model as it is; see `Ranked.price`."""
    if all("by_document_inside" in measured.tables for measured in (result, base)):
        return difference(*(document_sums(measured, "by_document_inside") for measured in (result, base)))
    return _inside(result) - _inside(base), (-math.inf, math.inf)


def _found(row: Ranked) -> int:
    return 0 if row.keys is None else row.keys[0]


def _retrieves(result: Result, *, within: int) -> bool:
    """Whether a model finds the passkeys at some length that it was trained to read."""
    rows = [row for row in result.tables["by_length"] if row["length"] <= within]
    return any(row["correct"] >= THRESHOLD * row["n"] for row in rows)


def _keys(result: Result) -> tuple[int, int]:
    row = max(result.tables["by_length"], key=lambda row: row["length"])
    return row["correct"], row["n"]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return finite(value) if isinstance(value, float) else value
