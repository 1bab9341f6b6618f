"""`reading.json` beside a checkpoint that was just extended."""

from __future__ import annotations

from pathlib import Path

from ropepatch.errors import RopepatchError
from ropepatch.extension import record as records
from ropepatch.model import reading_file as readings
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.pipeline.running import Feedback
from ropepatch.probing.making import affordable, make_reading


def add_reading(folder: Path, device: str, *, unasked: bool, feedback: Feedback) -> None:
    """Write the reading of a checkpoint, or say why there is none.

    Args:
        folder: The checkpoint; a reading of its weights that is there already stays.
        device: Where it is read.
        unasked: Whether to read only what is read within a minute or two.
        feedback: Takes the reason, and a bar.
    """
    checkpoint = Checkpoint(folder)
    try:
        if readings.exists(folder) and readings.read(folder).weights == checkpoint.fingerprint:
            return
        hypotheses = affordable(checkpoint, records.read(folder), device) if unasked else None
        if isinstance(hypotheses, str):
            feedback.say(f"no {readings.FILE}: {hypotheses}")
            return
        with feedback.progress("reading") as advance:
            reading = make_reading(checkpoint, device=device, hypotheses=hypotheses, progress=advance)
        readings.write(folder, reading)
    except RopepatchError as error:  # the checkpoint is written and proven
        feedback.say(f"no {readings.FILE}: {error}")
