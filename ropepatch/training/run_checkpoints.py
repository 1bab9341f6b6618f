"""The checkpoints of a run, each written elsewhere and renamed once it is whole."""

from __future__ import annotations

import re
from pathlib import Path

from ropepatch.files import remove

PARTIAL = ".partial"  # the folder of a run in which the next one is written
NAME = re.compile(r"checkpoint-(\d+)")


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, the newest last."""
    named = [(int(match[1]), folder) for folder in run.glob("*") if (match := NAME.fullmatch(folder.name))]
    return [folder for _, folder in sorted(named)]


def newest(run: Path) -> Path | None:
    """The newest checkpoint of a run, or None; what an interruption left half written is removed."""
    remove(run / PARTIAL)
    return next(reversed(checkpoints(run)), None)
