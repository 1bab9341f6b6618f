"""What an interrupted call leaves, from which the same command goes on."""

from __future__ import annotations

from pathlib import Path

from ropepatch.fitting import fitting
from ropepatch.pipeline.learned import MEASURED, START, work_folder
from ropepatch.pipeline.request import Request


def kept(request: Request, *, dry_run: bool) -> str:
    """What an interrupted `extend` leaves: its checkpoint, that of the training, or of the search."""
    if dry_run:
        return "nothing is kept"
    folder = request.folder.expanduser().absolute()
    run, work = folder.with_name(f"{folder.name}.run"), work_folder(request)
    if folder.exists():
        after = (
            "the same command goes on" if request.recipe else "`ropepatch eval` or `ropepatch push` goes on"
        )
        return f"{folder} is written; {after}"
    if request.recipe is not None and run.is_dir():
        steps = (path.name.rpartition("-")[2] for path in run.glob("checkpoint-*"))
        last = max((int(step) for step in steps if step.isdigit()), default=0)
        return f"{run} keeps step {last} of {request.recipe.max_steps}; the same command goes on from it"
    if (work / START).is_file() and (work / MEASURED).is_dir():
        return f"{work} keeps every result that is finished; the same command goes on"
    return kept_by_fit(work)


def kept_by_fit(work: Path) -> str:
    """What an interrupted `fit` leaves in its work folder."""
    if (work / fitting.STATE).is_file():
        return f"{work} keeps the descent; the same command resumes it"
    return "nothing is kept; the same command starts anew"
