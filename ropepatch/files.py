"""Files and folders that are written whole or not at all, and those that come with the package."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from ropepatch.errors import RopepatchError


def absent(out: str | Path) -> Path:
    """The folder as an absolute path.

    Raises:
        RopepatchError: If it exists, or nothing can be there.
    """
    try:
        folder = Path(out).expanduser().absolute()
        exists = folder.exists() or folder.is_symlink()
    except (OSError, RuntimeError) as error:  # a name that is too long, a folder closed to us, ~ of nobody
        reason = getattr(error, "strerror", None) or error
        raise RopepatchError(f"cannot write {out}: {reason}", hint="choose another --out") from error
    if exists:
        raise RopepatchError(f"{folder} already exists", hint="choose another --out; nothing is overwritten")
    return folder


def check_space(what: str, place: Path, needed: int, *, hint: str) -> None:
    """Refuse to write more bytes than the disk has room for.

    Args:
        what: What is written, in errors.
        place: A folder on that disk.
        needed: Bytes.
        hint: What to do.

    Raises:
        RopepatchError: With both sizes.
    """
    free = shutil.disk_usage(place).free
    if needed > free:
        raise RopepatchError(
            f"{what} needs {needed / 1e9:.1f} GB, {place} has {free / 1e9:.1f} GB free", hint=hint
        )


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into that takes its name only when all went well, and is gone otherwise.

    Raises:
        RopepatchError: If the disk does not let it be written.
    """
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    made = [parent for parent in folder.parents if not parent.exists()]
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in made:
            if parent.is_dir():
                parent.rmdir()
        if isinstance(error, OSError):
            raise _disk_error(error, folder) from error
        raise


def _disk_error(error: OSError, folder: Path) -> RopepatchError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    hints = {
        errno.ENOSPC: "free some space, or use --link-weights on the file system of the source",
        errno.EDQUOT: "free some of your quota, or use --link-weights on the file system of the source",
        errno.EROFS: "choose a folder on a file system that can be written to",
        errno.EACCES: "choose a folder you may write to",
    }
    return RopepatchError(
        f"cannot write {folder}: {reason}", hint=hints.get(error.errno or 0, "choose another --out")
    )


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A path beside the file to write to; it takes the file's name if all went well, else it is gone."""
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


PACKAGE = Path(__file__).parent


def shipped(folder: str) -> Path:
    """A folder like ``eval/suites``: within an installed package, or beside the package in a checkout."""
    installed = PACKAGE / "shipped_data" / folder
    return installed if installed.is_dir() else PACKAGE.parent / folder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        RopepatchError: If the file is missing, unreadable, not JSON or not an object.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except FileNotFoundError:
        raise RopepatchError(
            f"no {path.name} in {path.parent}", hint="a checkpoint folder holds config.json and *.safetensors"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise RopepatchError(f"cannot read {path}: {error}", hint="the file must be UTF-8 JSON") from error
    if not isinstance(content, dict):
        raise RopepatchError(
            f"{path} must hold a JSON object, got {type(content).__name__}",
            hint="copy the file again from where the checkpoint came from",
        )
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """A JSON file that every reader understands: no NaN, no infinity."""
    path.write_text(
        json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )
