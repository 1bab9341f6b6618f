"""What a caller may write in several ways, read once: a model's name, a length, a list, a place to write."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

from ropepatch.errors import RopepatchError, argument
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.settings import Length, parse_length, relative_length


def model_name(model: str | os.PathLike[str]) -> str:
    """A model as a command line names it: a folder called tiny is not the bundled checkpoint."""
    return "./tiny" if model == Path("tiny") else os.fspath(model)


def text_name(text: str | os.PathLike[str] | None) -> str | None:
    """A text as a command line names it."""
    return os.fspath(text) if isinstance(text, os.PathLike) else text


def in_tokens(length: Length, model: str, revision: str | None, original: Length | None = None) -> int:
    """A length in tokens: 32768, `32k`, or a multiple of the model's own context or of the original, `4x`.

    Raises:
        RopepatchError: If it is none of these, or there is no such model.
    """
    if not str(length).endswith("x"):
        return parse_length(str(length))
    return relative_length(length, Checkpoint.find(model, revision, original=original).window)


def check_writable(place: Path, hint: str) -> None:
    """Refuse a file or folder that could not be made, before the work that it is to hold.

    Raises:
        RopepatchError: With the reason, and the hint.
    """
    try:
        folder = next(above for above in (place, *place.absolute().parents) if above.exists())
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RopepatchError(f"cannot write {place}: {error.strerror or error}", hint=hint) from error


def check_places(out: str | Path | None, report: str | Path | None = None) -> tuple[Path | None, Path | None]:
    """The folder for results and the file of a report as paths.

    Raises:
        RopepatchError: The folder is none, or the report cannot be written.
    """
    folder, page = (None if place is None else Path(place) for place in (out, report))
    if page is not None:
        if os.path.lexists(page):
            raise RopepatchError(
                f"{page} already exists", hint=f"choose another {argument('report')}; nothing is overwritten"
            )
        if not page.absolute().parent.is_dir():
            raise RopepatchError(f"no folder {page.parent} for the report", hint="make it first")
        if not can_report():
            raise RopepatchError("a report needs matplotlib and jinja2", hint='pip install "ropepatch[plot]"')
        check_writable(page, f"choose another {argument('report')}")
    if folder is not None:
        if os.path.lexists(folder) and not folder.is_dir():
            raise RopepatchError(f"{folder} is no folder", hint=f"{argument('out')} is a folder")
        check_writable(folder, f"choose another {argument('out')}")
    return folder, page


def can_report() -> bool:
    """Whether what a report is drawn and written with is installed."""
    return all(find_spec(module) for module in ("matplotlib", "jinja2"))
