"""Which scaling reads a target best: from the results of a comparison, with the doubt that they leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.curves import Perplexity, difference
from ropepatch.evaluation.grid import THRESHOLD
from ropepatch.evaluation.results import mean_nats

if TYPE_CHECKING:
    from ropepatch.evaluation.results import Result

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One scaling at the target.

    Attributes:
        label: Its name in the results.
        nats: Mean loss over the whole target, nats per token.
        interval: Of the mean, 95 %.
        behind: By how much it is behind the first of the ranking, in nats, and the 95 % interval of that,
            text by text.
        inside: Mean loss within the trained context.
        keys: Pass keys found at the target, of how many; None if none were asked for.
    """

    label: str
    nats: float
    interval: Interval
    behind: float
    behind_interval: Interval
    inside: float
    keys: tuple[int, int] | None

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


def rank(results: Sequence[Result], *, base: str, ignored: Sequence[str] = ()) -> Ranking:
    """Rank the scalings of one model at one target by their loss over all of it.

    Scalings whose paired interval to the best holds 0 are tied; among them the one that finds the most keys
    is recommended, then the one with the least loss within the trained context.

    Args:
        results: Of one-pass perplexity, and of pass keys if these were asked for, one per label.
        base: The label of the model as it is.
        ignored: Labels that are no scalings.

    Raises:
        RopepatchError: No scaling, no base, or results that are not of the same texts.
    """
    reading = {r.label: r for r in results if r.task == "perplexity" and r.label not in ignored}
    adapted = any(r.adapted for r in reading.values())
    retrieval = {r.label: r for r in results if r.task == "passkey"}
    if base not in reading or len(reading) < 2:
        raise RopepatchError("nothing to rank: need the model as it is and at least one scaling")
    if len({r.parameters["digest"] for r in reading.values()}) > 1:
        raise RopepatchError("the results are of different texts", hint="compare them in one suite")
    sums = {label: document_sums(result) for label, result in reading.items()}
    order = sorted(sums, key=lambda label: sums[label].mean)
    rows = []
    for label in order:
        behind, interval = difference(sums[label], sums[order[0]])
        rows.append(
            Ranked(
                label=label,
                nats=sums[label].mean,
                interval=sums[label].interval,
                behind=behind,
                behind_interval=interval,
                inside=_inside(reading[label]),
                keys=_keys(retrieval[label]) if label in retrieval else None,
            )
        )
    retrieves = base in retrieval and _retrieves(retrieval[base], within=reading[base].model["trained"])
    advice = _advice(rows, sums, base, reading[base], retrieves=retrieves, adapted=adapted)
    return Ranking(tuple(rows), *advice)


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
    by_label = {row.label: row for row in rows}
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
    chosen = min(tied, key=lambda row: (-(row.keys or (0, 1))[0], row.inside, row.nats))
    gain = sums[base].mean - chosen.nats
    advice = [
        f"Take {chosen.label}: {gain:.3f} nats per token less than the model as it is over {to} tokens."
    ]
    if len(tied) > 1:
        others = ", ".join(row.label for row in tied if row is not chosen)
        most = [row for row in tied if row.keys == chosen.keys]
        reasons = ["finds the most pass keys"] * (len(most) < len(tied))
        reasons += [f"loses the least within {trained} tokens"] * (len(most) > 1)
        advice.append(f"This text does not tell it from {others}; of these, it {' and '.join(reasons)}.")
    price = chosen.inside - by_label[base].inside
    if price > 0:
        advice.append(f"Its price: {price:+.3f} nats within the first {trained} tokens.")
    if chosen.keys is not None and not retrieves:
        advice.append(
            f"Pass keys tell nothing: as it is, the model does not find them within {trained} tokens."
        )
    elif chosen.keys is not None and chosen.keys[0] < THRESHOLD * chosen.keys[1]:
        advice.append(
            f"It finds {chosen.keys[0]} of {chosen.keys[1]} pass keys at {to} tokens: "
            f"{'train longer' if adapted else 'train it'}, or choose a nearer target."
        )
    return chosen.label, tuple(advice)


def document_sums(result: Result) -> Perplexity:
    """What was read of every document, for differences in pairs."""
    documents = tuple((row["nats"], row["tokens"]) for row in result.tables["by_document"])
    return Perplexity(sum(nats for nats, _ in documents), sum(tokens for _, tokens in documents), documents)


def _inside(result: Result) -> float:
    rows = [row for row in result.tables["by_position"] if row["end"] <= result.model["trained"]]
    return mean_nats(rows)


def _retrieves(result: Result, *, within: int) -> bool:
    """Whether a model finds the pass keys at some length that it was trained to read."""
    rows = [row for row in result.tables["by_length"] if row["length"] <= within]
    return any(row["correct"] >= THRESHOLD * row["n"] for row in rows)


def _keys(result: Result) -> tuple[int, int]:
    row = max(result.tables["by_length"], key=lambda row: row["length"])
    return row["correct"], row["n"]
