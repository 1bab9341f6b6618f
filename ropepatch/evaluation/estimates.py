"""How long a measurement will take, by one short row of tokens."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ropepatch.model.head import evaluating, gives_positions, input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ropepatch.evaluation.tasks import Measurement

SAMPLE = 512  # tokens that are timed, at most


def forecast(model: PreTrainedModel, measurements: Sequence[Measurement]) -> str:
    """How long measurements take one after the other, in a line.

    The time of a short row is scaled by what each row costs, attention included. Sequences read in
    batches take less.
    """
    rows: Counter[int] = Counter()
    unknown = set()
    for measurement in measurements:
        read = measurement.task.reads(measurement.parameters)
        if read is None:
            unknown.add(measurement.task.name)
        else:
            rows.update(read)
    measured = f"{len(measurements)} measurement{'s' * (len(measurements) > 1)}"
    without = f", without {', '.join(sorted(unknown))}, whose time is not known" if unknown else ""
    if not rows:
        return measured + without
    sample = min(SAMPLE, *rows)
    seconds = _seconds(model, sample)
    work = sum(count * seen(model, length) for length, count in rows.items()) / seen(model, sample)
    return (
        f"{measured}: about {_time(seconds * work)}{without} (a row of {sample} tokens took {seconds:.2g} s)"
    )


def seen(model: PreTrainedModel, length: int) -> float:
    """The cost of reading a sequence, in tokens that its tokens see; one costs 6 * width beside attention."""
    embedding: Any = model.get_input_embeddings().weight  # [V, width]
    width: int = embedding.shape[1]
    return length * (6 * width + length / 2)


def _seconds(model: PreTrainedModel, tokens: int) -> float:
    """What a row of tokens takes, the second time."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device=input_device(model))
    takes_some = any(map(gives_positions, model.modules()))
    options: dict[str, Any] = {"logits_to_keep": 1} if takes_some else {}
    with evaluating(model), torch.inference_mode():
        for _ in range(2):
            begin = time.perf_counter()
            model(input_ids=ids, use_cache=False, **options).logits[:, -1].sum().item()
            seconds = time.perf_counter() - begin
    return seconds


def _time(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} s"
