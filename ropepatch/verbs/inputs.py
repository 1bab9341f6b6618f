"""Arguments that several verbs share: parameters of a method, and where to write."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from ropepatch.errors import RopepatchError, argument
from ropepatch.files import check_writable
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.settings import Length


def find_checkpoint(
    model: str | os.PathLike[str], revision: str | None, original: Length | None
) -> Checkpoint:
    """Find the checkpoint to measure that a user names; config.json only for a Hub id."""
    if not isinstance(model, str | os.PathLike):
        raise RopepatchError(
            f"{argument('model')} must be a checkpoint folder or a Hub id, got {type(model)}",
            hint="save it, and pass the folder; `passkey` and `perplexity` take the model",
        )
    place = model if isinstance(model, str) else Path(model)
    checkpoint = Checkpoint.find(place, revision, original=original)
    checkpoint.stock.check_generates()
    return checkpoint


def default_folder(model: str, *parts: str) -> Path:
    """Return where a command writes by default: MODEL and the parts in the working folder.

    If the working folder is in the checkpoint itself, it is next to the checkpoint.
    """
    source = Path(model)
    with suppress(RuntimeError):  # ~ of an unknown user
        source = source.expanduser()
    source = Path(os.path.normpath(source.absolute()))
    name = "-".join(filter(None, (source.name, *parts)))
    if source.is_dir() and Path.cwd().is_relative_to(source.resolve()):
        return source.parent / name
    return Path(name)


def check_places(
    out: str | Path | None, report: str | Path | None = None
) -> tuple[Path | None, Path | None]:
    """Check the folder for results and the report file, and return their paths."""
    folder, page = (None if place is None else Path(place) for place in (out, report))
    if page is not None:
        if os.path.lexists(page):
            raise RopepatchError(
                f"{page} already exists",
                hint=f"choose another {argument('report')}; nothing is overwritten",
            )
        if not page.absolute().parent.is_dir():
            raise RopepatchError(
                f"no folder {page.parent} for the report", hint="create it first"
            )
        if not can_report():
            raise RopepatchError(
                "a report needs matplotlib and jinja2",
                hint='pip install "ropepatch[plot]"',
            )
        check_writable(page, f"choose another {argument('report')}")
    if folder is not None:
        if os.path.lexists(folder) and not folder.is_dir():
            raise RopepatchError(
                f"{argument('out')} must be a folder, got {folder}",
                hint="choose a folder",
            )
        check_writable(folder, f"choose another {argument('out')}")
    return folder, page


def can_report() -> bool:
    """Whether the packages for a report are installed."""
    return all(find_spec(module) for module in ("matplotlib", "jinja2"))
