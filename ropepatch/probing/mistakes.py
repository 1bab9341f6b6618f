"""The most common errors of engines in applying an extended checkpoint's RoPE scaling."""

from __future__ import annotations

import torch

from ropepatch.errors import RopepatchError
from ropepatch.extension.record import Record
from ropepatch.model.mistakes import misread
from ropepatch.scaling import make_scaling
from ropepatch.scaling.rope import Frequencies, Rope


def ropes(record: Record) -> dict[str, Frequencies]:
    """Return the frequencies of the extended model and of each common error that differs from them."""
    return misread(
        Frequencies(torch.tensor(record.inv_freq), record.attention_factor),
        Frequencies(torch.tensor(record.inv_freq_before), record.attention_factor_before),
        _rescaled(record, 2 * record.factor, record.original_max_position_embeddings),
        _rescaled(record, record.factor, record.target),
    )


def _rescaled(record: Record, factor: float, window: int) -> Frequencies | None:
    """Apply a record's method with another factor or original length; None if it accepts none."""
    carried = tuple(record.inv_freq_before) if record.already_scaled else None
    try:
        rope = Rope(
            record.rotary_dim, record.rope_theta, window, carried, float(record.attention_factor_before)
        )
        return make_scaling(record.method, **record.parameters | {"factor": factor}).frequencies(rope)
    except RopepatchError:
        return None
