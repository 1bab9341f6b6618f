"""Files and folders that are written whole or not at all, JSON, and what comes with the package."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import reprlib
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from ropepatch.errors import RopepatchError, argument


def check_name(path: str | Path) -> None:
    """Refuse a name whose bytes are no UTF-8: no record, no JSON and no safetensors file can hold it."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise RopepatchError(f"the name {path} is not UTF-8", hint="rename it") from error


def absent(out: str | Path) -> Path:
    """The absolute path of a folder that does not exist yet; one that does is refused."""
    check_name(out)
    try:
        folder = Path(out).expanduser().absolute()
        exists = folder.exists() or folder.is_symlink()
    except (OSError, RuntimeError) as error:  # a name that is too long, a folder closed to us, ~ of nobody
        reason = getattr(error, "strerror", None) or error
        raise RopepatchError(
            f"cannot write {out}: {reason}", hint=f"choose another {argument('out')}"
        ) from error
    if exists:
        raise RopepatchError(
            f"{folder} already exists", hint=f"choose another {argument('out')}; nothing is overwritten"
        )
    if any(parent.exists() and not parent.is_dir() for parent in folder.parents):
        raise RopepatchError(
            f"cannot write {folder}: Not a directory", hint=f"choose another {argument('out')}"
        )
    return folder


def is_gguf(model: str | os.PathLike[str]) -> bool:
    """Whether a model is a GGUF file by its name."""
    return os.fspath(model).lower().endswith(".gguf") and not Path(model).is_dir()


def check_space(what: str, place: Path, needed: int, *, hint: str) -> None:
    """Refuse to write more bytes than the disk of the folder `place` has room for."""
    free = shutil.disk_usage(place).free
    if needed > free:
        raise RopepatchError(f"{what} needs {_size(needed)}, {place} has {_size(free)} free", hint=hint)


def _size(num_bytes: int) -> str:
    for unit, power in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= power:
            return f"{num_bytes / power:.1f} {unit}"
    return f"{num_bytes} bytes"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into; it takes its name if all went well and is removed otherwise."""
    parents = [parent for parent in folder.parents if not parent.exists()]
    try:
        with _partial(folder, lambda new: new.mkdir(parents=True)) as partial:
            yield partial
            partial.rename(folder)
    except BaseException as error:
        for parent in parents:
            with suppress(OSError):  # another process writes into it, or it was never made
                parent.rmdir()
        if isinstance(error, OSError):
            raise disk_error(error, folder) from error
        raise


# Errors of writing alone, whichever file they name: that of a copy names what it reads.
OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def disk_error(error: OSError, folder: Path) -> RopepatchError:
    """The error that a new file or folder could not be written, or what it is copied from not read."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    named = Path(os.fsdecode(error.filename or folder))
    ours = folder.is_relative_to(named) or f"/.{folder.name}." in named.as_posix()
    if error.errno not in OF_WRITING and not ours:
        return RopepatchError(f"cannot read {named}: {reason}", hint="make the file readable")
    hints = {
        errno.ENOSPC: f"free some space, or choose another {argument('out')}",
        errno.EDQUOT: f"free some of your quota, or choose another {argument('out')}",
        errno.EROFS: "choose a folder on a file system that can be written to",
        errno.EACCES: "choose a folder you may write to",
    }
    return RopepatchError(
        f"cannot write {folder}: {reason}",
        hint=hints.get(error.errno or 0, f"choose another {argument('out')}"),
    )


@contextmanager
def whole_file(file: Path, *, new: bool = False) -> Iterator[Path]:
    """Yield a path to write to; it takes the name of the file if all went well and is removed otherwise.

    Args:
        file: The file.
        new: Raise FileExistsError if the file exists by then, instead of replacing it.
    """
    with _partial(file, Path.touch) as partial:
        try:
            yield partial
        except OSError as error:
            if error.errno in OF_WRITING:
                error.filename = str(file)
            raise
        if new:
            try:
                os.link(partial, file)
                return
            except FileExistsError:
                raise
            except OSError:  # no links on this file system: take the name first
                file.touch(exist_ok=False)
        partial.replace(file)


@contextmanager
def _partial(path: Path, make: Callable[[Path], object]) -> Iterator[Path]:
    """Yield a temporary path beside it, and remove that on exit unless it was renamed."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        make(partial)
        yield partial
    finally:
        remove(partial)


def remove(path: Path) -> None:
    """Remove a file or a folder, or as much of it as goes; nothing where there is none."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


PACKAGE = Path(__file__).parent


def shipped(folder: str) -> Path:
    """A folder like ``eval/suites``: within an installed package, or beside the package in a checkout."""
    installed = PACKAGE / "shipped_data" / folder
    return installed if installed.is_dir() else PACKAGE.parent / folder


ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str | bytes) -> Any:
    """Parse strict JSON: no NaN, no number that no float holds, no text that is no UTF-8.

    Raises:
        ValueError: It is no JSON, or nested too deep.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        content = json.loads(text, parse_constant=_refuse, parse_float=_number, parse_int=_number)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if ESCAPED_SURROGATE.search(text):
        json.dumps(content, ensure_ascii=False).encode()
    return content


def _number(digits: str) -> int | float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{reprlib.repr(digits)} is too large a number")
    return int(digits) if digits.lstrip("-").isdigit() else number


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def check_regular(path: Path) -> None:
    """Refuse a pipe, a socket or a device, also behind a link, before it is opened: reading may never end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # missing, closed to us, too long a name, NUL
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise RopepatchError(
            f"{path} is a pipe, a socket or a device, expected a regular file",
            hint="write what it holds to a file first, or remove it",
        )


def read_text(path: Path, *, errors: str = "strict") -> str:
    """Read the UTF-8 text of a regular file."""
    check_regular(path)
    return path.read_text(encoding="utf-8", errors=errors)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    try:
        content = parse_json(read_text(path))
    except FileNotFoundError:
        raise RopepatchError(
            f"no {path.name} in {path.parent}", hint="a checkpoint folder holds config.json and *.safetensors"
        ) from None
    except OSError as error:
        reason = error.strerror or error
        raise RopepatchError(f"cannot read {path}: {reason}", hint="make the file readable") from error
    except ValueError as error:
        raise RopepatchError(f"cannot read {path}: {error}", hint="the file must be UTF-8 JSON") from error
    if not isinstance(content, dict):
        raise RopepatchError(
            f"{path} must hold a JSON object, got {type(content).__name__}",
            hint="copy the file again from where the checkpoint came from",
        )
    return content


NOT_ASCII = re.compile(r"[\x7f-\U0010ffff]")


def json_text(content: Any, *, indent: int | None = 2) -> str:
    """Format strict JSON: no NaN, no infinity, and escapes for what is not printable."""
    text = json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False)
    return NOT_ASCII.sub(lambda one: one[0] if one[0].isprintable() else json.dumps(one[0])[1:-1], text)


def write_json(path: Path, content: Any, *, indent: int | None = 2) -> None:
    """Write a file of `json_text`."""
    path.write_text(json_text(content, indent=indent) + "\n", encoding="utf-8")


def check_resumed(what: str, earlier: Mapping[str, Any], now: Mapping[str, Any], *, hint: str) -> None:
    """Refuse to resume an earlier call of other arguments, naming those that differ.

    Args:
        what: The first words of the error, such as "FOLDER is of another run".
        earlier: All arguments of the earlier call that decide its outcome, as read from JSON.
        now: The same of this call.
        hint: The hint of the error.
    """
    same = json.loads(json.dumps(now))  # tuples are lists there
    keys = [*same, *(key for key in earlier if key not in same)]
    if differing := [
        key for key in keys if (key in earlier, earlier.get(key)) != (key in same, same.get(key))
    ]:
        raise RopepatchError(f"{what}: it differs in {', '.join(differing)}", hint=hint)
