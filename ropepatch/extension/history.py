"""What was done to a checkpoint before, by its record."""

from __future__ import annotations

from pathlib import Path

from ropepatch.errors import RopepatchError
from ropepatch.extension import record as records


def context_before(folder: Path, weights: str) -> int | None:
    """The context on which a checkpoint was trained that ropepatch extended since, without training it.

    None for any other checkpoint, and where its record cannot be read, or is of other weights than these.
    """
    try:
        record = records.read(folder) if records.exists(folder) else None
    except RopepatchError:
        return None
    before = None
    if record is not None and record.weights != weights:
        return None
    while record is not None and record.adaptation is None:
        before, record = record.original_max_position_embeddings, record.earlier
    return before
