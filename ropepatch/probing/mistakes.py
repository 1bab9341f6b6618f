"""The commonest ways in which engines misread the rope of an extended checkpoint."""

from __future__ import annotations

import torch

from ropepatch.errors import RopepatchError
from ropepatch.extension.record import Record
from ropepatch.model.mistakes import misread
from ropepatch.scaling import make_scaling
from ropepatch.scaling.rope import Frequencies, Rope


def ropes(record: Record) -> dict[str, Frequencies]:
    """The frequencies of the extended model, and those of each mistake that differs from all before it."""
    return misread(
        Frequencies(torch.tensor(record.inv_freq), record.attention_factor),
        Frequencies(torch.tensor(record.inv_freq_before), record.attention_factor_before),
        _rescaled(record, 2 * record.factor, record.original_max_position_embeddings),
        _rescaled(record, record.factor, record.target),
    )


def _rescaled(record: Record, factor: float, window: int) -> Frequencies | None:
    """The method of a record with another factor or window; None where it takes none."""
    carried = tuple(record.inv_freq_before) if record.already_scaled else None
    try:
        rope = Rope(
            record.rotary_dim, record.rope_theta, window, carried, float(record.attention_factor_before)
        )
        return make_scaling(record.method, **record.parameters | {"factor": factor}).frequencies(rope)
    except RopepatchError:
        return None
