"""Arguments that several verbs share: parameters of a method, and where to write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ropepatch.errors import RopepatchError, argument
from ropepatch.extension.planning import check_method, find_method
from ropepatch.files import parse_json, read_text
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.scaling.file import is_scaling_file
from ropepatch.settings import Length


def find_checkpoint(
    model: str | os.PathLike[str], revision: str | None, original: Length | None
) -> Checkpoint:
    """Find the checkpoint that a user names; config.json only for a Hub id."""
    if not isinstance(model, str | os.PathLike):
        raise RopepatchError(
            f"{argument('model')} must be a checkpoint folder or a Hub id, got {type(model)}",
            hint="save it, and pass the folder; `passkey` and `perplexity` take the model",
        )
    place = model if isinstance(model, str) else Path(model)
    return Checkpoint.find(place, revision, original=original)


def parse_settings(method: str, settings: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE texts into the parameters of a method, in its declared types.

    Args:
        method: A name, or a scaling file.
        settings: The texts.
    """
    if not settings:
        return {}
    kind = None if is_scaling_file(method) else find_method(method)
    types = (
        {key: get_type_hints(kind)[key] for key in kind.model_fields} if kind else {}
    )
    parameters: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            option = argument("settings")
            raise RopepatchError(
                f"{option} {setting} has no value", hint=f"write {option} NAME=VALUE"
            )
        parameters[name] = (
            _value(method, name, text, types[name]) if name in types else text
        )
    check_method(method, parameters)
    return parameters


def _value(method: str, name: str, text: str, kind: Any) -> Any:
    """A text in a declared type; if it does not parse, the text itself, for the error of the method."""
    if type(None) in get_args(kind) and text.lower() in ("none", "null"):
        return None
    several = "tuple" in str(kind)
    try:
        is_file = several and text.endswith(".json")
        listed = (
            text.removeprefix("[").removesuffix("]").split(",") if several else text
        )
        value = parse_json(read_text(Path(text))) if is_file else listed
        return TypeAdapter(kind).validate_python(value)
    except (ValidationError, ValueError, OSError) as error:
        if not several:
            return text
        hint = f"`ropepatch methods {method}` lists its parameters"
        words = "numbers separated by commas, or a JSON file with a list"
        raise RopepatchError(
            f"{name} must be {words}, got {text!r}", hint=hint
        ) from error


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


def check_writable(place: Path, hint: str) -> None:
    """Refuse a file or folder that cannot be written, before the work for it."""
    try:
        folder = next(
            above for above in (place, *place.absolute().parents) if above.exists()
        )
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RopepatchError(
            f"cannot write {place}: {error.strerror or error}", hint=hint
        ) from error


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
