"""The weight files of a checkpoint: checked by their headers, cloned without being read."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ropepatch.errors import RopepatchError
from ropepatch.files import check_regular, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NAMED = "transformers_weights"  # the key of config.json that names another file to stock transformers
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model.pt")
BLOCK = 16 << 20  # bytes copied between two progress reports
SAMPLE = 1 << 20

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class TensorEntry:
    """What a header says of one tensor.

    Args:
        file: Where it is.
        dtype: In the words of safetensors: F32, BF16.
        shape: Rows first.
        offset: Of its first byte, from the start of the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of itself.

    Args:
        tensors: By their names.
        metadata: What the program that wrote it added; None for nothing.
        num_bytes: Of all tensors together.
    """

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str] | None
    num_bytes: int


@dataclass(frozen=True)
class Weights:
    """The weight files of one checkpoint folder.

    Args:
        files: Their paths, the index first where there is one.
        tensors: Every tensor in them.
    """

    files: tuple[Path, ...]
    tensors: dict[str, TensorEntry]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor."""
        return {name: entry.shape for name, entry in self.tensors.items()}

    @property
    def num_bytes(self) -> int:
        """The size of all files, and of a copy, which has no holes where they may have some."""
        return sum(file.stat().st_size for file in self.files)


def read_headers(folder: Path) -> Weights:
    """Find the weights and check every file against its own header and the index; no tensor is read.

    Where a folder holds two sets of weights, it is the one that stock transformers (5.4 to 5.24) loads.

    Raises:
        RopepatchError: If weights are missing, truncated, damaged or pickled, or config.json names others.
    """
    sets = weight_sets(folder)
    config = folder / "config.json"
    named = read_json(config).get(NAMED) if config.exists() else None
    if named not in (None, *sets[:1]):
        raise RopepatchError(
            f"config.json names {named!r} as its weights ({NAMED}), expected {[*sets, SINGLE][0]!r}",
            hint=f"load it with transformers and save_pretrained it, which leaves {NAMED} out",
        )
    if sets[:1] == [SINGLE]:
        return Weights((folder / SINGLE,), _tensors(folder / SINGLE))
    if sets:
        return _indexed(folder, folder / INDEX)
    pickles = [name for name in PICKLES if (folder / name).exists()]
    if pickles:
        raise RopepatchError(
            f"{folder} holds its weights as a pickle ({pickles[0]}), which can run code when it is loaded",
            hint=f"where you trust it, convert it: {_conversion(folder)}",
        )
    raise RopepatchError(
        f"no weights in {folder}",
        hint=f"expected {SINGLE}, or {INDEX} with its files; pickles (*.bin) are not read",
    )


def weight_sets(folder: Path) -> list[str]:
    """The sets of weights in a folder, each by its first file; stock transformers loads the first one."""
    return [name for name in (SINGLE, INDEX) if (folder / name).exists()]


def _indexed(folder: Path, index: Path) -> Weights:
    places = read_json(index).get("weight_map")
    hint = "copy the index again from where the checkpoint came from"
    if not isinstance(places, dict):
        raise RopepatchError(f"{index} has no weight_map of tensor names to file names", hint=hint)
    for name in places.values():
        if not (isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name):
            raise RopepatchError(
                f"{index} names {name!r}, expected a *.safetensors file beside it", hint=hint
            )
    shards = {name: _tensors(folder / name) for name in sorted(set(places.values()))}
    for tensor, name in places.items():
        if tensor not in shards[name]:
            raise RopepatchError(
                f"{INDEX} places {tensor} in {name}, which does not hold it",
                hint="the index and the files come from different checkpoints: copy both again",
            )
    tensors = {tensor: entry for shard in shards.values() for tensor, entry in shard.items()}
    return Weights((index, *(folder / name for name in shards)), tensors)


def read_header(file: Path) -> Header:
    """The header of a safetensors file; no tensor is read.

    Raises:
        SafetensorError: The file is truncated, damaged or something else.
        OSError: It cannot be read, or mapped into this memory.
        RopepatchError: It is a pipe, a socket or a device.
    """
    check_regular(file)
    # framework="pt" maps the file privately, so that a file larger than the memory would be refused.
    # It says of a file that is closed to us that it is missing, but first of all it checks the file.
    try:
        with file.open("rb") as opened, safe_open(file, framework="np"):
            begin = 8 + int.from_bytes(opened.read(8), "little")
            content: dict[str, Any] = json.loads(opened.read(begin - 8))
    except MemoryError:  # under a limit of the address space
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(file)) from None
    metadata = content.pop("__metadata__", None)
    tensors = {
        name: TensorEntry(file, entry["dtype"], tuple(entry["shape"]), begin + entry["data_offsets"][0])
        for name, entry in content.items()
    }
    return Header(tensors, metadata, file.stat().st_size - begin)


def _conversion(folder: Path) -> str:
    """The command that makes safetensors of a pickle."""
    source, out = json.dumps(str(folder)), json.dumps(f"{folder}-safetensors")
    code = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"[kind.from_pretrained({source}).save_pretrained({out}) for kind in (M, T)]"
    )
    return f"python -c {shlex.quote(code)}"


def fingerprint(weights: Weights) -> str:
    """Tells one checkpoint's weights from another's: sha256 over the names, sizes and samples of the files.

    Of each file the first, the last and 14 evenly spaced MiB are read, so that 140 GB take a second. It is a
    name and no proof; that is `checksums`.
    """
    digest = hashlib.sha256()
    for file in weights.files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as source:
            for sample in range(16):
                source.seek(max(0, size - SAMPLE) * sample // 15)
                digest.update(source.read(SAMPLE))
    return digest.hexdigest()


def checksums(weights: Weights) -> dict[str, str]:
    """The sha256 of every weight file, by its name: of all bytes, once for each file as it is on the disk."""
    places = [file.resolve() for file in weights.files]
    with ThreadPoolExecutor() as pool:  # hashlib leaves the other threads free
        sums = list(pool.map(sha256, places))
    return {file.name: checksum for file, checksum in zip(weights.files, sums, strict=True)}


def sha256(file: Path) -> str:
    """That of a file, which is read again only after it has changed."""
    status = file.stat()
    return _sha256(file, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=4096)
def _sha256(file: Path, as_it_is: tuple[int, ...]) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def foreign(reason: str) -> RopepatchError:
    """The error of weights that belong to another model."""
    return RopepatchError(
        f"the weights are not those of config.json: {reason}",
        hint="put config.json and the weights of the same checkpoint together",
    )


def check_fit(
    weights: Weights, expected: dict[str, tuple[int, ...]], tied: frozenset[str] = frozenset()
) -> None:
    """Refuse weights that belong to another model.

    Names that transformers renames while loading are left to the loader.

    Args:
        weights: What the checkpoint holds.
        expected: The tensors of the model that config.json describes.
        tied: Those of them that are another one's copy and need not be stored.

    Raises:
        RopepatchError: If no name agrees, one tensor has another shape, or one is missing.
    """
    shapes = weights.shapes
    if {_ending(name) for name in expected}.isdisjoint(map(_ending, shapes)):
        first = min(shapes, default="no tensor")
        raise foreign(f"they hold {first}, expected names like {min(expected)}")
    for name in sorted(expected.keys() & shapes.keys()):
        if shapes[name] != expected[name]:
            raise foreign(f"{name} has shape {list(shapes[name])}, expected {list(expected[name])}")
    missing = expected.keys() - shapes.keys() - tied
    # Where others are there, transformers renames while loading, and judges itself.
    if missing and shapes.keys() <= expected.keys():
        raise foreign(f"{len(missing)} missing keys, for instance {min(missing)}")


def _ending(name: str) -> str:
    """The part of a tensor's name that transformers keeps when it renames while loading."""
    return ".".join(name.split(".")[-2:])


def clone_files(files: tuple[Path, ...], folder: Path, *, link: bool, progress: Progress | None) -> None:
    """Bring files into a folder: by hard link, else as a copy-on-write clone, else byte by byte.

    Raises:
        RopepatchError: If a hard link cannot be made.
        OSError: If the disk is full or read-only.
    """
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        origin, size = file.resolve(), file.stat().st_size  # a file in the Hub's cache is a link to a blob
        if link:
            _hard_link(origin, folder / file.name)
        elif not _reflink(origin, folder / file.name):
            for copied in _copy(origin, folder / file.name):
                if progress:
                    progress(done + copied, total)
        done += size
        if progress:
            progress(done, total)


def _hard_link(origin: Path, target: Path) -> None:
    try:
        os.link(origin, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        raise RopepatchError(
            f"cannot hard-link {target.name}: {os.strerror(error.errno)}",
            hint="leave --link-weights out, or put --out on the file system of the source",
        ) from error


def _reflink(origin: Path, target: Path) -> bool:
    try:
        import fcntl
    except ImportError:  # not on Windows
        return False
    ficlone = 0x40049409  # linux/fs.h: share the blocks until one of the two files is written to
    with origin.open("rb") as source, target.open("wb") as clone:
        try:
            fcntl.ioctl(clone.fileno(), ficlone, source.fileno())
        except OSError:
            return False
    return True


def _copy(origin: Path, target: Path) -> Iterator[int]:
    copied = 0
    with origin.open("rb") as source, target.open("wb") as copy:
        while block := source.read(BLOCK):
            copied += copy.write(block)
            yield copied


def _tensors(file: Path) -> dict[str, TensorEntry]:
    try:
        return read_header(file).tensors
    except FileNotFoundError:
        message = f"{file.name} is missing from {file.parent}"
        raise RopepatchError(message, hint="download the checkpoint again; every shard is needed") from None
    except OSError as error:
        message = f"cannot read {file}: {error.strerror or error}"
        raise RopepatchError(message, hint="make the file readable, or look after the disk") from error
    except SafetensorError as error:
        message = f"{file.name} is truncated or damaged: {error}"
        raise RopepatchError(message, hint="download the file again") from error
