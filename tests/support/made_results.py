"""Results that were never measured, for tests of what is drawn and written from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ropepatch.attention import MAPS, make_map
from ropepatch.evaluation.passkey import Passkey
from ropepatch.evaluation.results import Result
from ropepatch.scaling import make_scaling
from ropepatch.scaling.rope import Rope

ENV = {
    "ropepatch": "0.1.0",
    "transformers": "5.4.0",
    "torch": "2.8.0",
    "device": "cpu",
    "dtype": "torch.float32",
}


def loss(nats: float, width: float | None = 0.1) -> dict[str, Any]:
    interval = [None, None] if width is None else [nats - width, nats + width]
    ppl = math.exp(nats) if nats < 700 else None
    return {"nats": nats, "interval": interval, "perplexity": ppl, "tokens": 1000, "documents": 10}


def model_record(name: str = "tiny", trained: int = 256, rotary_dim: int = 16) -> dict[str, Any]:
    rope = Rope(rotary_dim, 10_000.0, trained)
    shape = {"rotary_dim": rotary_dim, "rope_theta": 10_000.0, "inv_freq": rope.inv_freq().tolist()}
    return {"name": name, "revision": None, "weights": "sha256:0123", "trained": trained} | shape


def scaling_record(method: str, model: dict[str, Any], target: int) -> dict[str, Any]:
    rope = Rope(model["rotary_dim"], model["rope_theta"], model["trained"])
    own = make_map(method).fitted(model["trained"], target) if method in MAPS else None
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
    tables: dict[str, Any],
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
        tables=tables,
        env=ENV,
        seconds=1.5,
    )


def reading(
    label: str,
    nats: Sequence[float],
    *,
    lengths: Sequence[int] = (256, 512, 1024),
    method: str | None = None,
    model: dict[str, Any] | None = None,
    width: float | None = 0.1,
    gain: Sequence[float] = (),
    documents: bool = False,
    **parameters: Any,
) -> Result:
    """A perplexity result whose losses by length, and by the stretches between the lengths, are `nats`."""
    edges = [0, *lengths]
    tables: dict[str, Any] = {
        "by_length": [{"length": n, **loss(x, width)} for n, x in zip(lengths, nats, strict=True)],
        "by_position": [
            {"begin": begin, "end": end, **loss(x, width)}
            for begin, end, x in zip(edges, edges[1:], nats, strict=False)
        ],
    }
    if gain:
        tables["gain"] = [
            {"begin": begin, "end": end, **{k: v for k, v in loss(x, width).items() if k != "perplexity"}}
            for begin, end, x in zip(lengths, lengths[1:], gain, strict=False)
        ]
    if documents:
        tables["by_document"] = [{"nats": 100 * nats[-1] + k, "tokens": 100} for k in range(10)]
    given = {
        "protocol": "one-pass",
        "text": "books",
        "digest": "f00d",
        "pieces": 10,
        "read": lengths[-1],
        "tokens": 10_240,
        "bos": "none",
    }
    settings = given | {"lengths": list(lengths)} | parameters
    return result_of("perplexity", label, tables, settings, method=method, model=model, target=lengths[-1])


def asking(
    label: str,
    correct: Sequence[int],
    *,
    n: int = 4,
    lengths: Sequence[int] = (256, 512, 1024),
    depths: Sequence[float] = (0.0, 0.5, 1.0),
    method: str | None = None,
    model: dict[str, Any] | None = None,
    **parameters: Any,
) -> Result:
    """A passkey result in which `correct` of n keys are found at every depth of each length."""

    def count(found: int, of: int) -> dict[str, Any]:
        return {"correct": found, "n": of, "interval": list(Passkey(found, of).interval)}

    by_length = dict(zip(lengths, correct, strict=True))
    read = max((length for length, found in by_length.items() if found >= 0.856 * n), default=None)
    tables = {
        "cells": [
            {"length": length, "depth": depth, **count(found, n)}
            for length, found in by_length.items()
            for depth in depths
        ],
        "by_length": [
            {"length": length, **count(found * len(depths), n * len(depths))}
            for length, found in by_length.items()
        ],
        "effective_length": [{"length": read, "threshold": 0.856}],
    }
    given = {"trials": n, "seed": 0, "depths": list(depths), "distractors": 0, "threshold": 0.856}
    settings = given | {"lengths": list(lengths)} | parameters
    return result_of("passkey", label, tables, settings, method=method, model=model, target=lengths[-1])


def scoring(label: str, scores: dict[tuple[str, str], float], *, method: str | None = None) -> Result:
    """An lm-eval result."""
    rows = [
        {"task": task, "metric": metric, "value": value, "stderr": 0.02, "n": 20}
        for (task, metric), value in scores.items()
    ]
    parameters = {"tasks": ["long_task", "short_task"], "limit": 20}
    return result_of("lm-eval", label, {"scores": rows}, parameters, method=method)


def adapted(result: Result) -> Result:
    """The same of weights that were trained."""
    weights = {"weights": "sha256:4567", "adapted_from": result.model["weights"]}
    return replace(result, model=dict(result.model) | weights)
