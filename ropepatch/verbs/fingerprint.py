"""The fingerprint that `extend` and `train` write into a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ropepatch.errors import RopepatchError, argument
from ropepatch.model import reading_file as readings
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.probing.judging import shows_no_error
from ropepatch.probing.making import affordable, duration, make_reading, why_none

if TYPE_CHECKING:
    from ropepatch.extension.planning import Plan
    from ropepatch.extension.writing import Written
    from ropepatch.progress import Progress, Say


def check_fingerprint(plan: Plan) -> None:
    """Refuse a requested fingerprint if none is possible."""
    if reason := why_none(
        plan.config, plan.method.name, plan.source.config.window, plan.target
    ):
        raise RopepatchError(f"{argument('reading')}: {reason}", hint="leave it out")


def add_fingerprint(
    written: Written,
    *,
    asked: bool,
    device: str,
    say: Say,
    progress: Progress,
) -> None:
    """Write the fingerprint of a checkpoint if requested or quick, or say why there is none.

    An existing fingerprint of the same weights is kept.
    """
    checkpoint, record, folder = Checkpoint(written.path), written.record, written.path
    try:
        if (
            readings.exists(folder)
            and readings.read(folder).weights == checkpoint.fingerprint
        ):
            return
        hypotheses = None if asked else affordable(checkpoint, record, device)
        if isinstance(hypotheses, str):
            raise RopepatchError(hypotheses)
        if asked:
            say(f"computing {readings.FILE}: {duration(checkpoint, record, device)}")
        with progress("fingerprint") as advance:
            reading = make_reading(
                checkpoint,
                device=device,
                hypotheses=hypotheses,
                progress=advance,
                record=record,
                model=written.model,
            )
        readings.write(folder, reading)
        if shows_no_error(reading):
            reach = f"up to {reading.target:,} tokens"
            say(
                f"warning: {readings.FILE} cannot show a RoPE error: none changes this model {reach}"
            )
    except RopepatchError as error:
        if asked:
            raise
        say(f"no {readings.FILE}: {error}")
