"""The checkpoints of a run, each written elsewhere and renamed once it is complete."""

from __future__ import annotations

import re
from pathlib import Path

from ropepatch.files import remove

PARTIAL = ".partial"  # in the folder of a run: where the next checkpoint is written
NAME = re.compile(r"checkpoint-(\d+)")


def checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run, the newest last."""
    named = [
        (int(match[1]), folder)
        for folder in run.glob("*")
        if (match := NAME.fullmatch(folder.name))
    ]
    return [folder for _, folder in sorted(named)]


def newest(run: Path) -> Path | None:
    """Return the newest checkpoint of a run, or None; remove a partial one."""
    remove(run / PARTIAL)
    return next(reversed(checkpoints(run)), None)
