"""Invented results, for tests of figures, rankings and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
from scipy.special import stdtrit

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


ROPE = Rope(16, 10_000.0, 256)


def model_record(name="tiny"):
    return {
        "name": name,
        "revision": None,
        "weights": f"sha256:{'0123' if name == 'tiny' else name}",
        "trained": 256,
        "rotary_dim": 16,
        "rope_theta": 10_000.0,
        "inv_freq": ROPE.inv_freq().tolist(),
    }


def scaling_record(method, target):
    factor = target / 256
    if method in REMAPPINGS:
        scaling = make_scaling("none", factor=factor)
        parameters = make_remapping(method).fitted(256, target).parameters()
    else:
        scaling = make_scaling(method, factor=factor)
        parameters = scaling.parameters()
    after = scaling.frequencies(ROPE, target)
    return {
        "method": method,
        "factor": scaling.factor,
        "parameters": parameters,
        "target": target,
        "attention_factor": after.attention_factor,
        "inv_freq": after.inv_freq.tolist(),
    }


def result_of(
    task, label, rows, parameters, *, method=None, model=None, target=1024, **more
):
    """A result of a task with these and more parameters, with the record of its scaling."""
    return Result(
        task=task,
        label=label,
        model=model or model_record(),
        scaling=method and scaling_record(method, target),
        target=target,
        parameters=parameters | more,
        rows=list(rows),
        env=ENV,
        seconds=1.5,
    )


def row_of(measure, at, values, weight=100):
    """The row whose clusters, each of this weight, have these means."""
    share = measure in MEASURES and MEASURES[measure].share
    mean = Mean(tuple((value * weight, weight) for value in values), share)
    return made.row_of(measure, at, mean)


def clusters(mean, width, count=10):
    """Clusters with a 95 % interval of this half-width, as a share of the mean; without a width one cluster.

    Each cluster is as hard for all methods, in proportion. So a difference has the same relative width. The
    values of all clusters instead of a mean stay as they are.
    """
    if not isinstance(mean, float | int):
        return mean
    if width is None:
        return [mean]
    places = np.linspace(-1, 1, count)
    if count > 2:
        error = places.std(ddof=1) / count**0.5
        places *= width / (error * stdtrit(count - 1, 0.975))
    return [float(mean * (1 + place)) for place in places]


def reading(
    label,
    nats,
    *,
    lengths=(256, 512, 1024),
    width=0.1,
    gain=(),
    **more,
):
    """A perplexity result whose losses by length, and by the stretches between the lengths, are `nats`.

    Each is a mean over 10 documents of 100 tokens; see `clusters` for their width. Or it is the losses of all
    documents. For more see `result_of`.
    """

    def rows(measure, places, values):
        pairs = zip(places, values, strict=True)
        return [row_of(measure, at, clusters(value, width)) for at, value in pairs]

    stretches = [{"begin": begin, "end": end} for begin, end in pairwise([0, *lengths])]
    made = rows("loss", [{"length": length} for length in lengths], nats)
    made += rows("loss", stretches, nats)
    if gain:
        made += rows("gain", stretches[1:], gain)
    parameters = {
        "lengths": list(lengths),
        "stride": None,
        "text": "books",
        "digest": "f00d",
        "pieces": 10,
        "tokens": 10 * lengths[-1],
        "bos": "none",
    }
    return result_of("perplexity", label, made, parameters, target=lengths[-1], **more)


def asking(
    label,
    correct,
    *,
    n=4,
    lengths=(256, 512, 1024),
    depths=(0.1, 0.5, 0.9),
    log_prob=None,
    **more,
):
    """A retrieval result with the correct answer in `correct` of n haystacks at every depth of each length.

    Args:
        label: See `Result`.
        correct: Numbers by length, or by kind of question and length; without kinds for passkeys.
        n: The number of haystacks.
        lengths: Lengths in tokens.
        depths: The depths, each with one answer of each kind and haystack.
        log_prob: Answer log-probs by length, their mean or each haystack's; None for -0.1 nats where the
            answer is correct, and -3 elsewhere.
        **more: See `result_of`.
    """
    by_kind = correct if isinstance(correct, Mapping) else {"passkey": correct}
    rows = []
    for place, length in enumerate(lengths):
        for kind, counts in by_kind.items():
            right = [
                [(i + d) % n < counts[place] for i in range(n)]
                for d in range(len(depths))
            ]
            means = [sum(each) / len(depths) for each in zip(*right, strict=True)]
            logs = [-0.1 * mean - 3 * (1 - mean) for mean in means]
            if log_prob is not None:
                logs = clusters(log_prob[place], 0.1, n)
            places = [{"kind": kind, "length": length}]
            if len(by_kind) == 1:
                places.insert(0, {"length": length})
            for at in places:
                rows.append(row_of("found", at, means, len(depths)))
                rows.append(row_of("log_prob", at, logs, len(depths)))
            for depth, found in zip(depths, right, strict=True):
                rows.append(row_of("found", places[0] | {"depth": depth}, found, 1))
    parameters = {
        "lengths": list(lengths),
        "kinds": list(by_kind),
        "haystacks": n,
        "keys": 1,
        "seed": 0,
        "text": None,
        "form": "plain",
        "digest": "cafe",
    }
    return result_of("retrieval", label, rows, parameters, target=lengths[-1], **more)


def scoring(label, scores, *, method=None):
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


def of(results, task, label):
    """The one result of a task with this label."""
    (found,) = (one for one in results if (one.task, one.label) == (task, label))
    return found


def fine_tuned(result):
    """The same result for fine-tuned weights."""
    weights = {"weights": "sha256:4567", "fine_tuned_from": result.model["weights"]}
    return replace(result, model=dict(result.model) | weights)
