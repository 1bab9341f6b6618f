"""What follows from a ranking: the scaling to take, and why, in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ropepatch.evaluation.grid import THRESHOLD

if TYPE_CHECKING:
    from ropepatch.evaluation.ranking import Ranked, Standing


def advise(standing: Standing, rows: Sequence[Ranked]) -> tuple[str | None, tuple[str, ...]]:
    """The label to take by `RULE`, None where nothing is seen to help, and the sentences that say why.

    Args:
        standing: What is known.
        rows: Its rows.
    """
    base, measured = standing.base, standing.reading[standing.base]
    scalings = {row.label: row for row in rows if row.label != base}
    if standing.sums[base].num_documents < 2:
        return None, ("One piece of text tells no scaling from another: give more.",)
    helping = [label for label in scalings if standing.helps(label)]
    if not helping:
        return None, (_refusal(standing, list(scalings)),)
    level = standing.levels(helping)[0]
    tied = [scalings[label] for label in level if not standing.gain(level[0], over=label)[1][0] > 0]
    chosen = min(tied, key=lambda row: (-_found(row) if standing.finding else 0, row.inside, row.nats))
    to, trained = measured.target, measured.model["trained"]
    advice = [_gain(standing, chosen.label)]
    least = min(helping, key=standing.nats)
    if least not in level:
        more, less = standing.found[chosen.label].against(standing.found[least])
        advice.append(
            f"{least} loses the least over {to} tokens, {standing.nats(least) - chosen.nats:+.3f} nats, and "
            f"finds less: {scalings[least].found:.0%}. Of the questions that only one of the two answers, "
            f"{chosen.label} answers {more:.3g} of {more + less:.3g}."
        )
    if len(tied) > 1:
        others = ", ".join(row.label for row in tied if row is not chosen)
        equal = [row for row in tied if not standing.finding or row.found == chosen.found]
        reasons = ["finds the most"] * (len(equal) < len(tied))
        reasons += [f"loses the least within {trained} tokens"] * (len(equal) > 1)
        advice.append(f"This text does not tell it from {others}; of these, it {' and '.join(reasons)}.")
    elif len(level) > 1:
        nats, (low, high) = standing.gain(chosen.label, over=level[1])
        advice.append(
            f"The next, {level[1]}, loses {nats:.3f} nats more (95 % interval {low:.3f} to {high:.3f})."
        )
    if chosen.price > 0:
        low, high = chosen.price_interval
        doubt = f" (95 % interval {low:+.3f} to {high:+.3f})" if math.isfinite(low) else ""
        advice.append(
            f"Its short-context cost: {chosen.price:+.3f} nats within the first {trained} tokens{doubt}."
        )
    advice += _of_finding(standing, chosen, list(scalings.values()))
    return chosen.label, tuple(advice)


def _gain(standing: Standing, label: str) -> str:
    to = standing.reading[label].target
    nats, (low, _) = standing.gain(label, over=standing.base)
    reasons = [f"{nats:.3f} nats per token less than the model as it is over {to} tokens"] * (low > 0)
    if standing.finds_more(label, standing.base):
        ours, base = standing.found[label], standing.found[standing.base]
        found = f"it finds {_share(ours.share, ours.interval)} of what is asked for at {to} tokens"
        reasons.append(f"{found}, the model as it is {_share(base.share, base.interval)}")
    return f"Take {label}: {'; '.join(reasons)}."


def _of_finding(standing: Standing, chosen: Ranked, scalings: Sequence[Ranked]) -> list[str]:
    """What is to be known of what the recommended scaling finds."""
    to, trained = standing.reading[chosen.label].target, standing.reading[chosen.label].model["trained"]
    if chosen.found is None:
        return []
    if not standing.finding:
        return [
            "What is found tells nothing: as it is, the model does not find such things within "
            f"{trained} tokens."
        ]
    finder, advice = max(scalings, key=_found), []
    if _found(finder) > chosen.found:
        unseen = standing.helps(finder.label)
        told = ", which so few questions do not tell apart," if unseen else ""
        advice.append(
            f"The most is found by {finder.label}, {finder.found:.0%} against {chosen.found:.0%}{told} for "
            f"{finder.nats - chosen.nats:+.3f} nats over the target."
        )
    if chosen.found < THRESHOLD:
        adapted = any(result.adapted for result in standing.reading.values())
        advice.append(
            f"It finds {chosen.found:.0%} of what is asked for at {to} tokens: "
            f"{'train longer' if adapted else 'train it'}, or choose a nearer target."
        )
    return advice


def _refusal(standing: Standing, scalings: Sequence[str]) -> str:
    to = standing.reading[standing.base].target
    for label in scalings:
        if standing.beats(label):
            nats, _ = standing.gain(label, over=standing.base)
            ours, base = standing.found[label], standing.found[standing.base]
            return (
                f"Do not extend: over {to} tokens no scaling is seen to beat the model as it is without "
                f"being worse in what it finds or in its loss. {label} finds {ours.share:.0%}, the model as "
                f"it is {base.share:.0%}; {label} loses {-nats:+.3f} nats against the model as it is."
            )
    first = min(scalings, key=standing.nats)
    adapted = any(result.adapted for result in standing.reading.values())
    gain, (low, high) = standing.gain(first, over=standing.base)
    return (
        f"Do not extend: over {to} tokens none of these scalings{', trained or not,' * adapted} is seen "
        f"to read this text better than the model as it is ({first} by {gain:+.3f} nats, "
        f"95 % interval {low:+.3f} to {high:+.3f}){', or to find more' * standing.finding}."
    )


def _found(row: Ranked) -> float:
    return row.found or 0.0


def _share(share: float, interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{share:.0%} (95 % interval {low:.0%} to {high:.0%})"
