"""Invented results, for tests of figures, rankings and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import stats

from ropepatch.attention import REMAPPINGS, make_remapping
from ropepatch.evaluation import results as made
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.results import MEASURES, Result, Row
from ropepatch.scaling import make_scaling
from ropepatch.scaling.rope import Rope

ENV = {
    "ropepatch": "0.1.0",
    "transformers": "5.4.0",
    "torch": "2.8.0",
    "device": "cpu",
    "dtype": "torch.float32",
}
Values = float | Sequence[float]  # a mean, or the value of every cluster


def model_record(
    name: str = "tiny", trained: int = 256, rotary_dim: int = 16
) -> dict[str, Any]:
    rope = Rope(rotary_dim, 10_000.0, trained)
    shape = {
        "rotary_dim": rotary_dim,
        "rope_theta": 10_000.0,
        "inv_freq": rope.inv_freq().tolist(),
    }
    weights = f"sha256:{'0123' if name == 'tiny' else name}"
    return {
        "name": name,
        "revision": None,
        "weights": weights,
        "trained": trained,
    } | shape


def scaling_record(method: str, model: dict[str, Any], target: int) -> dict[str, Any]:
    rope = Rope(model["rotary_dim"], model["rope_theta"], model["trained"])
    own = (
        make_remapping(method).fitted(model["trained"], target)
        if method in REMAPPINGS
        else None
    )
    made = make_scaling("none" if own else method, factor=target / model["trained"])
    after = made.frequencies(rope, target)
    return {
        "method": method,
        "factor": made.factor,
        "parameters": (own or made).parameters(),
        "target": target,
        "attention_factor": after.attention_factor,
        "inv_freq": after.inv_freq.tolist(),
    }


def result_of(
    task: str,
    label: str,
    rows: Sequence[Row],
    parameters: dict[str, Any],
    *,
    method: str | None = None,
    model: dict[str, Any] | None = None,
    target: int = 1024,
) -> Result:
    """A result of a task, with the record of its scaling."""
    model = model or model_record()
    scaling = None if method is None else scaling_record(method, model, target)
    return Result(
        task=task,
        label=label,
        model=model,
        scaling=scaling,
        target=target,
        parameters=parameters,
        rows=list(rows),
        env=ENV,
        seconds=1.5,
    )


def row_of(
    measure: str, at: dict[str, Any], values: Sequence[float], weight: float = 100
) -> Row:
    """The row whose clusters, each of this weight, have these means."""
    share = measure in MEASURES and MEASURES[measure].share
    mean = Mean(tuple((value * weight, weight) for value in values), share)
    return made.row_of(measure, at, mean)


def spread(mean: float, width: float | None, clusters: int = 10) -> list[float]:
    """Clusters with a 95 % interval of this half-width, as a share of the mean; without a width one cluster.

    Each cluster is as hard for all methods, in proportion. So a difference has the same relative width.
    """
    if width is None:
        return [mean]
    places = np.linspace(-1, 1, clusters)
    if clusters > 2:
        places *= width / (stats.sem(places) * stats.t.ppf(0.975, clusters - 1))
    return [float(mean * (1 + place)) for place in places]


def reading(
    label: str,
    nats: Sequence[Values],
    *,
    lengths: Sequence[int] = (256, 512, 1024),
    method: str | None = None,
    model: dict[str, Any] | None = None,
    width: float | None = 0.1,
    gain: Sequence[Values] = (),
    **parameters: Any,
) -> Result:
    """A perplexity result whose losses by length, and by the stretches between the lengths, are `nats`.

    Each is a mean over 10 documents of 100 tokens; see `spread` for their width. Or it is the losses of all
    documents.
    """

    def rows(
        measure: str, places: Sequence[dict[str, Any]], values: Sequence[Values]
    ) -> list[Row]:
        each = [
            spread(value, width) if isinstance(value, float | int) else value
            for value in values
        ]
        return [
            row_of(measure, at, value) for at, value in zip(places, each, strict=True)
        ]

    stretches = [{"begin": begin, "end": end} for begin, end in pairwise([0, *lengths])]
    made = rows("loss", [{"length": length} for length in lengths], nats) + rows(
        "loss", stretches, nats
    )
    if gain:
        made += rows("gain", stretches[1:], gain)
    given = {
        "stride": None,
        "text": "books",
        "digest": "f00d",
        "pieces": 10,
        "tokens": 10 * lengths[-1],
        "bos": "none",
    }
    settings = given | {"lengths": list(lengths)} | parameters
    return result_of(
        "perplexity",
        label,
        made,
        settings,
        method=method,
        model=model,
        target=lengths[-1],
    )


def asking(
    label: str,
    correct: Sequence[int] | Mapping[str, Sequence[int]],
    *,
    n: int = 4,
    lengths: Sequence[int] = (256, 512, 1024),
    depths: Sequence[float] = (0.1, 0.5, 0.9),
    log_prob: Sequence[Values] | None = None,
    method: str | None = None,
    model: dict[str, Any] | None = None,
    **parameters: Any,
) -> Result:
    """A retrieval result with the correct answer in `correct` of n haystacks at every depth of each length.

    Args:
        label: See `Result`.
        correct: Numbers by length, or by kind of question and length; without kinds for passkeys.
        n: The number of haystacks.
        lengths: Lengths in tokens.
        depths: The depths, each with one answer of each kind and haystack.
        log_prob: Answer log-probs by length, their mean or each haystack's; None for -0.1 nats where the
            answer is correct, and -3 elsewhere.
        method: The name of the scaling.
        model: The record of the model.
        **parameters: Further parameters of the result.
    """
    by_kind = correct if isinstance(correct, Mapping) else {"passkey": correct}
    rows: list[Row] = []
    for place, length in enumerate(lengths):
        for kind, counts in by_kind.items():
            right = [
                [(i + d) % n < counts[place] for i in range(n)]
                for d in range(len(depths))
            ]
            means = [sum(each) / len(depths) for each in zip(*right, strict=True)]
            logs: Sequence[float] = [-0.1 * mean - 3 * (1 - mean) for mean in means]
            if log_prob is not None:
                stated = log_prob[place]
                logs = (
                    spread(stated, 0.1, n)
                    if isinstance(stated, float | int)
                    else stated
                )
            places = [{"length": length}] * (len(by_kind) == 1) + [
                {"kind": kind, "length": length}
            ]
            for at in places:
                rows.append(row_of("found", dict(at), means, len(depths)))
                rows.append(row_of("log_prob", dict(at), logs, len(depths)))
            of_depths = zip(depths, right, strict=True)
            rows += [
                row_of("found", places[0] | {"depth": depth}, found, 1)
                for depth, found in of_depths
            ]
    given = {
        "kinds": list(by_kind),
        "haystacks": n,
        "keys": 1,
        "seed": 0,
        "text": None,
        "form": "plain",
    }
    settings = given | {"digest": "cafe", "lengths": list(lengths)} | parameters
    return result_of(
        "retrieval",
        label,
        rows,
        settings,
        method=method,
        model=model,
        target=lengths[-1],
    )


def scoring(
    label: str, scores: dict[tuple[str, str], float], *, method: str | None = None
) -> Result:
    """An lm-eval result with scores by task and metric, each ± 0.04 over 20 documents."""
    rows = [
        Row(
            measure=metric,
            at={"task": task, "version": "1"},
            value=value,
            low=value - 0.04,
            high=value + 0.04,
            n=20,
        )
        for (task, metric), value in scores.items()
    ]
    parameters = {"tasks": ["long_task", "short_task"], "limit": 20}
    return result_of("lm-eval", label, rows, parameters, method=method)


def fine_tuned(result: Result) -> Result:
    """The same result for fine-tuned weights."""
    weights = {"weights": "sha256:4567", "fine_tuned_from": result.model["weights"]}
    return replace(result, model=dict(result.model) | weights)
