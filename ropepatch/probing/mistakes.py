"""The most common errors of engines in applying an extended checkpoint's RoPE scaling."""

from __future__ import annotations

import torch

from ropepatch.errors import RopepatchError
from ropepatch.extension.record import Record
from ropepatch.model.reading_file import RIGHT
from ropepatch.scaling import make_scaling
from ropepatch.scaling.rope import Frequencies, Rope

UNSCALED, TWICE, FACTORLESS, DOUBLED, MISREAD = (
    "unscaled",
    "applied twice",
    "without attention factor",
    "factor doubled",
    "original length misread",
)


def ropes(record: Record) -> dict[str, Frequencies]:
    """Return the frequencies of the extended model, and of each error that differs from all before it."""
    right = Frequencies(torch.tensor(record.inv_freq), record.attention_factor)
    before = Frequencies(
        torch.tensor(record.inv_freq_before), record.attention_factor_before
    )
    a = right.attention_factor / before.attention_factor
    squared = right.inv_freq * (right.inv_freq / before.inv_freq).nan_to_num(1.0)
    every: dict[str, Frequencies | None] = {
        RIGHT: right,
        UNSCALED: before,
        FACTORLESS: right._replace(attention_factor=before.attention_factor),
        TWICE: Frequencies(squared, right.attention_factor * a),
        DOUBLED: _rescaled(
            record, 2 * record.factor, record.original_max_position_embeddings
        ),
        MISREAD: _rescaled(record, record.factor, record.target),
    }
    different: dict[str, Frequencies] = {}
    for name, frequencies in every.items():
        if frequencies and all(
            frequencies.distance(other) > 1e-7 for other in different.values()
        ):
            different[name] = frequencies
    return different


def _rescaled(record: Record, factor: float, window: int) -> Frequencies | None:
    """Apply a record's method with another factor or original length; None if it accepts none."""
    carried = tuple(record.inv_freq_before) if record.already_scaled else None
    try:
        rope = Rope(
            record.rotary_dim,
            record.rope_theta,
            window,
            carried,
            float(record.attention_factor_before),
        )
        return make_scaling(
            record.method, **record.parameters | {"factor": factor}
        ).frequencies(rope)
    except RopepatchError:
        return None
