"""Files and folders that are written whole or not at all, and those that come with the package."""

from __future__ import annotations

import errno
import glob
import json
import logging
import math
import os
import re
import reprlib
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from ropepatch.errors import RopepatchError

logger = logging.getLogger(__name__)


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
    """Refuse to write more bytes than the disk of the folder `place` has room for.

    Raises:
        RopepatchError: That `what` needs so much and `place` has so much, with the hint.
    """
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
    """A folder to write into that takes its name only when all went well, and is gone otherwise.

    Raises:
        RopepatchError: If the disk does not let it be written.
    """
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
            raise _disk_error(error, folder) from error
        raise


def _disk_error(error: OSError, folder: Path) -> RopepatchError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    named = Path(os.fsdecode(error.filename or folder))
    if not (folder.is_relative_to(named) or f"/.{folder.name}." in named.as_posix()):
        return RopepatchError(f"cannot read {named}: {reason}", hint="make the file readable")
    hints = {
        errno.ENOSPC: "free some space, or choose another --out",
        errno.EDQUOT: "free some of your quota, or choose another --out",
        errno.EROFS: "choose a folder on a file system that can be written to",
        errno.EACCES: "choose a folder you may write to",
    }
    return RopepatchError(
        f"cannot write {folder}: {reason}", hint=hints.get(error.errno or 0, "choose another --out")
    )


@contextmanager
def whole_file(file: Path, *, new: bool = False) -> Iterator[Path]:
    """A path beside the file to write to; it takes the file's name if all went well, else it is gone.

    Args:
        file: The file.
        new: Raise FileExistsError where there is one of that name by then; it is replaced otherwise.
    """
    with _partial(file, Path.touch) as partial:
        yield partial
        if new:
            try:
                os.link(partial, file)
                return
            except FileExistsError:
                raise
            except OSError:  # no links on this file system: take the name first
                file.touch(exist_ok=False)
        partial.replace(file)


def remove_leftovers(path: Path) -> None:
    """Remove what killed processes left of a file or folder they were writing, and tell of it."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.partial"):
        with suppress(OSError), _locked(partial) as is_dead:
            if is_dead:
                logger.warning("removing %s, which a process left that was killed", partial)
                remove(partial)


@contextmanager
def _partial(path: Path, make: Callable[[Path], object]) -> Iterator[Path]:
    """What takes the name of a path when it is whole: made beside it, and gone in the end if it did not."""
    remove_leftovers(path)
    with ExitStack() as held:
        yield _claimed(path, make, held)


def _claimed(path: Path, make: Callable[[Path], object], held: ExitStack) -> Path:
    """One that is made and locked; another where it was taken for a dead process's before it was locked."""
    while True:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        held.callback(remove, partial)
        make(partial)
        try:
            is_ours = held.enter_context(_locked(partial)) and partial.exists()
        except FileNotFoundError:
            is_ours = False
        except OSError:  # nothing can be locked here, and nobody removes anything
            is_ours = True
        if is_ours:
            held.callback(remove, partial)  # while it is locked
            return partial


def remove(path: Path) -> None:
    """Remove a file or a folder, or as much of it as goes; nothing where there is none."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Lock a file or folder itself, which ends with the process; False if another process has it locked."""
    try:
        import fcntl
    except ImportError as error:  # not on Windows
        raise OSError("files cannot be locked here") from error
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


PACKAGE = Path(__file__).parent


def shipped(folder: str) -> Path:
    """A folder like ``eval/suites``: within an installed package, or beside the package in a checkout."""
    installed = PACKAGE / "shipped_data" / folder
    return installed if installed.is_dir() else PACKAGE.parent / folder


SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(
    text: str, *, each_key_once: bool = False, parse_int: Callable[[str], int] | None = None
) -> Any:
    """What a text says in JSON, which knows no NaN and no infinity, of numbers and texts that can be written.

    Args:
        text: The text.
        each_key_once: Refuse an object that gives a key twice; the last one counts otherwise.
        parse_int: What makes a number of the digits of a whole one.

    Raises:
        ValueError: It is no JSON.
        RecursionError: It is nested too deep.
    """
    hook = _each_key_once if each_key_once else None
    content = json.loads(
        text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=hook, parse_int=parse_int
    )
    if SURROGATE.search(text):
        json.dumps(content, ensure_ascii=False).encode()  # a lone half of a pair is no text, and raises
    return content


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{reprlib.repr(digits)} is too large a number")
    return number


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError(f"a key is given twice: {reprlib.repr([key for key, _ in pairs])}")
    return content


def check_regular(path: Path) -> None:
    """Refuse a pipe, a socket or a device, also behind a link, before it is opened: reading may never end.

    Raises:
        RopepatchError: It is one of them. What is missing or a folder is left to whoever opens it.
    """
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
    """The UTF-8 text of a regular file.

    Raises:
        RopepatchError: It is a pipe, a socket or a device.
        OSError: It cannot be read.
        ValueError: It is not UTF-8.
    """
    check_regular(path)
    return path.read_text(encoding="utf-8", errors=errors)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        RopepatchError: If the file is missing, no regular file, unreadable, not JSON or not an object.
    """
    try:
        content = parse_json(read_text(path))
    except FileNotFoundError:
        raise RopepatchError(
            f"no {path.name} in {path.parent}", hint="a checkpoint folder holds config.json and *.safetensors"
        ) from None
    except OSError as error:
        reason = error.strerror or error
        raise RopepatchError(f"cannot read {path}: {reason}", hint="make the file readable") from error
    except (ValueError, RecursionError) as error:
        raise RopepatchError(f"cannot read {path}: {error}", hint="the file must be UTF-8 JSON") from error
    if not isinstance(content, dict):
        raise RopepatchError(
            f"{path} must hold a JSON object, got {type(content).__name__}",
            hint="copy the file again from where the checkpoint came from",
        )
    return content


def json_text(content: Any, *, indent: int | None = 2) -> str:
    """JSON that every reader understands: no NaN, no infinity."""
    return json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False)


def write_json(path: Path, content: Any, *, indent: int | None = 2) -> None:
    """A file of `json_text`."""
    path.write_text(json_text(content, indent=indent) + "\n", encoding="utf-8")


def check_resumed(what: str, earlier: Mapping[str, Any], now: Mapping[str, Any], *, hint: str) -> None:
    """Refuse to go on with what an earlier call left behind, if something else decided its outcome.

    Args:
        what: What is wrong, such as "FOLDER is of another run".
        earlier: All that decided the outcome of the earlier call, as read from JSON.
        now: The same of this call.
        hint: What the user can do.

    Raises:
        RopepatchError: With all that differs.
    """
    same = json.loads(json.dumps(now))  # tuples are lists there
    keys = [*same, *(key for key in earlier if key not in same)]
    if differing := [
        key for key in keys if (key in earlier, earlier.get(key)) != (key in same, same.get(key))
    ]:
        raise RopepatchError(f"{what}: it differs in {', '.join(differing)}", hint=hint)
