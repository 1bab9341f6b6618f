"""Files and folders that are written completely or not at all, JSON, and bundled files."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import reprlib
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ropepatch.errors import RopepatchError, argument


def check_name(path: str | Path) -> None:
    """Raise a `RopepatchError` for a name that is not UTF-8, which JSON and safetensors cannot store."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise RopepatchError(
            f"the name {path} is not UTF-8", hint="rename it"
        ) from error


def absent(out: str | Path) -> Path:
    """Return the absolute path of a new folder; raise a `RopepatchError` if it exists."""
    check_name(out)
    try:
        folder = Path(out).expanduser().absolute()
        folder.lstat()
    except FileNotFoundError:
        return folder
    except (OSError, RuntimeError) as error:  # name too long, below a file, no ~user
        reason = getattr(error, "strerror", None) or error
        raise RopepatchError(
            f"cannot write {out}: {reason}", hint=f"choose another {argument('out')}"
        ) from error
    raise _exists(folder)


def _exists(path: Path) -> RopepatchError:
    return RopepatchError(
        f"{path} already exists",
        hint=f"choose another {argument('out')}; nothing is overwritten",
    )


def from_here(path: Path) -> str:
    """Return a path for a person to read: relative if it is in the current folder, else absolute."""
    here, path = Path.cwd(), path.expanduser().absolute()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def is_gguf(model: str | os.PathLike[str]) -> bool:
    """Return whether the name of a model is that of a GGUF file."""
    return os.fspath(model).lower().endswith(".gguf") and not Path(model).is_dir()


def check_space(what: str, place: Path, needed: int, *, hint: str) -> None:
    """Raise a `RopepatchError` unless the disk of the folder `place` has enough free bytes."""
    free = shutil.disk_usage(place).free
    if needed > free:
        needs, has = f"{needed / 1e9:.3f} GB", f"{free / 1e9:.3f} GB"
        raise RopepatchError(f"{what} needs {needs}, {place} has {has} free", hint=hint)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to write into; rename it on success, remove it on an error."""
    parents = [parent for parent in folder.parents if not parent.exists()]
    try:
        with _partial(folder, lambda new: new.mkdir(parents=True)) as partial:
            yield partial
            partial.rename(folder)
    except BaseException as error:
        for parent in parents:
            # Another process writes into it, or it was never made
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            raise disk_error(error, folder) from error
        raise


# Errors that only writing raises; the error of a failed copy names the file it reads.
OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def disk_error(error: OSError, folder: Path) -> RopepatchError:
    """Make the error of a new file or folder that cannot be written, or of an unreadable source."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    named = Path(os.fsdecode(error.filename or folder))
    ours = folder.is_relative_to(named) or f"/{_hidden(folder)}" in named.as_posix()
    if error.errno not in OF_WRITING and not ours:
        return RopepatchError(
            f"cannot read {named}: {reason}", hint="make the file readable"
        )
    # Another process has just written it
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return _exists(folder)
    hint = f"choose another {argument('out')}"
    if error.errno == errno.ENOSPC:
        hint = f"free some space, or {hint}"
    return RopepatchError(f"cannot write {folder}: {reason}", hint=hint)


@contextmanager
def whole_file(file: Path, *, new: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to; rename it on success, remove it on an error.

    Args:
        file: The file.
        new: Raise FileExistsError if the file exists by then instead of replacing it.
    """
    with _partial(file, Path.touch) as partial:
        try:
            yield partial
        except OSError as error:
            if error.errno in OF_WRITING:
                error.filename = str(file)
            raise
        if new and file.exists():
            raise FileExistsError(errno.EEXIST, "File exists", str(file))
        partial.replace(file)


@contextmanager
def _partial(path: Path, make: Callable[[Path], object]) -> Iterator[Path]:
    """Yield a temporary path in the same folder, and remove it on exit unless it was renamed.

    It is locked as long as this process lives; those that killed processes left are removed.
    """
    beginning = _hidden(path)
    for left in path.parent.glob(f"{glob.escape(beginning)}{8 * '[0-9a-f]'}.partial"):
        with suppress(OSError, ImportError), _locked(left):
            remove(left)
    partial = path.with_name(f"{beginning}{secrets.token_hex(4)}.partial")
    with ExitStack() as stack:
        stack.callback(remove, partial)
        while not partial.exists():  # another call may remove it before it is locked
            make(partial)
            # This file system has no locks, or it is Windows
            with suppress(OSError, ImportError):
                stack.enter_context(_locked(partial, wait=True))
        yield partial


def _hidden(path: Path) -> str:
    """Begin the names of temporary files for a path; with their endings, they fit into 255 bytes."""
    return f".{path.name.encode()[:200].decode(errors='ignore')}."


@contextmanager
def _locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a file or folder; raise an OSError if another process does."""
    import fcntl

    opened = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(opened)


def remove(path: Path) -> None:
    """Remove a file, or as much of a folder as possible, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


PACKAGE = Path(__file__).parent
MOST_DIGITS = 308  # of an integer that is also a float


def shipped(folder: str) -> Path:
    """Return a bundled folder like ``eval/suites``, in an installed package or in a git checkout."""
    installed = PACKAGE / "shipped_data" / folder
    return installed if installed.is_dir() else PACKAGE.parent / folder


def parse_json(text: str | bytes, *, infinity: bool = False) -> Any:
    """Parse strict JSON: no NaN, no numbers beyond the range of a float, no invalid Unicode.

    Args:
        text: The text.
        infinity: Parse also NaN and Infinity, which transformers writes and reads.

    Raises:
        ValueError: If it is not JSON, or nested too deeply.
    """
    try:
        content = json.loads(text, parse_int=_integer)
        json.dumps(content, ensure_ascii=False, allow_nan=infinity).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    return content


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"{reprlib.repr(digits)} is too large a number")
    return int(digits)


def check_regular(*paths: Path) -> None:
    """Raise a `RopepatchError` for a pipe, socket or device, from which reading may never end."""
    for path in paths:
        try:
            mode = path.stat().st_mode
        except (OSError, ValueError):  # missing, no permission, name too long, NUL
            continue
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise RopepatchError(
                f"{path} is a pipe, a socket or a device, expected a regular file",
                hint="write what it holds to a file first, or remove it",
            )


def read_text(path: Path, *, errors: str = "strict") -> str:
    """Read the UTF-8 text of a regular file."""
    check_regular(path)
    return path.read_text(encoding="utf-8", errors=errors)


def _is_of_transformers(path: Path) -> bool:
    """Whether transformers reads and writes a file; to Python's json, Infinity and NaN are numbers."""
    return path.name.endswith("config.json")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    try:
        content = parse_json(read_text(path), infinity=_is_of_transformers(path))
    except FileNotFoundError:
        raise RopepatchError(
            f"no {path.name} in {path.parent}",
            hint="a checkpoint folder holds config.json and *.safetensors",
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RopepatchError(
            f"cannot read {path}: {reason}",
            hint="it must be a readable UTF-8 JSON file",
        ) from error
    if not isinstance(content, dict):
        raise RopepatchError(
            f"{path} must hold a JSON object, got {type(content).__name__}",
            hint="copy the file again from where the checkpoint came from",
        )
    return content


def json_text(content: Any, *, indent: int | None = 2, infinity: bool = False) -> str:
    """Format JSON in ASCII, without NaN and infinity unless allowed."""
    return json.dumps(content, indent=indent, allow_nan=infinity)


def write_json(path: Path, content: Any, *, indent: int | None = 2) -> None:
    """Write a JSON file; see `json_text`."""
    text = json_text(content, indent=indent, infinity=_is_of_transformers(path))
    path.write_text(f"{text}\n", encoding="utf-8")


def check_resumed(
    what: str, earlier: Mapping[str, Any], now: Mapping[str, Any], *, hint: str
) -> None:
    """Raise a `RopepatchError` if the resumed call had other arguments, and name those that differ.

    Args:
        what: The first words of the error, such as "FOLDER is of another run".
        earlier: All arguments of the earlier call that decide its outcome, as read from JSON.
        now: The same arguments of this call.
        hint: The hint of the error.
    """
    these = json.loads(json.dumps(now))  # with lists instead of tuples, as in `earlier`
    keys = dict.fromkeys([*these, *earlier])
    differing = [key for key in keys if earlier.get(key) != these.get(key)]
    if differing:
        raise RopepatchError(f"{what}: it differs in {', '.join(differing)}", hint=hint)


HUB_TOKEN = re.compile(rb"hf_[A-Za-z0-9]{34}")
PRIVATE_KEY = re.compile(
    rb"-----BEGIN[ A-Z0-9]{0,40}PRIVATE KEY( BLOCK)?-----[\s\S]{64,}?KEY( BLOCK)?-----"
)

LARGEST = 256 << 20  # bytes; larger files are not searched


def check_secrets(
    files: Mapping[str, Path], token: str | None = None
) -> tuple[str, ...]:
    """Raise `RopepatchError` for files with a Hub token or a private key, in UTF-8, UTF-16 or UTF-32.

    The error does not contain the secret.

    Args:
        files: The files by their names in an error.
        token: The user's own token, of any form.

    Returns:
        The names of files too large to search.
    """
    large = []
    for name, path in files.items():
        try:
            check_regular(path)
            if path.stat().st_size > LARGEST:
                large.append(name)
                continue
            data = path.read_bytes().replace(b"\0", b"")  # UTF-16 and UTF-32 as ASCII
        except OSError as error:
            raise RopepatchError(
                f"cannot read {path}: {error.strerror or error}",
                hint="make the file readable, or remove it",
            ) from error
        is_token = HUB_TOKEN.search(data) or (token and token.encode() in data)
        if is_token or PRIVATE_KEY.search(data):
            raise RopepatchError(
                f"{name} contains {'a Hub access token' if is_token else 'a private key'}",
                hint="remove it, and revoke it if others may have seen it",
            )
    return tuple(large)


def check_outside(source: Path, folder: Path) -> None:
    """Raise a `RopepatchError` if a new folder lies inside the source checkpoint."""
    if folder.resolve().is_relative_to(source.resolve()):
        raise RopepatchError(
            f"{folder} lies inside the source checkpoint",
            hint=f"choose an {argument('out')} outside it",
        )


def check_inside(files: Collection[Path], folder: Path) -> None:
    """Raise a `RopepatchError` for a link that leads out of the checkpoint, or a non-regular file.

    The Hub's cache links a snapshot's files to its own blobs; these count as inside.
    """
    check_regular(*files)
    home = folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    for file in files:
        target = file.resolve()
        if not (target.is_relative_to(home) or target.parent == blobs):
            raise RopepatchError(
                f"{file} is a link that leads out of the checkpoint, to {target}",
                hint="put the file itself there if it belongs to the checkpoint, else remove the link",
            )


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
