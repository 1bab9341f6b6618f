"""The weight files of a checkpoint: checked by their headers, copied without loading."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from ropepatch.errors import RopepatchError, argument
from ropepatch.files import read_json

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD = re.compile(r"[^/\\]+\.safetensors")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model.pt")
COPY_BLOCK = 16 << 20  # bytes copied between two progress reports
FINGERPRINT_SAMPLE = 1 << 20
MISFIT = "put config.json and the weights of the same checkpoint together"

Progress = Callable[[int, int], None]  # bytes done, total bytes


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file.

    Args:
        file: A safetensors file.
        dtype: The dtype, as safetensors names it: F32, BF16.
        shape: The shape, rows first.
        offset: The offset of its first byte in the file.
        num_bytes: The size in bytes.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Weights:
    """The headers of weight files.

    Args:
        files: The paths, the index first if there is one.
        tensors: Every tensor in the files, by name.
        metadata: The metadata of a single file; None if there is none.
    """

    files: tuple[Path, ...]
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str] | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor."""
        return {name: entry.shape for name, entry in self.tensors.items()}

    @property
    def num_bytes(self) -> int:
        """The total size of all files."""
        return sum(file.stat().st_size for file in self.files)


def read_headers(folder: Path) -> Weights:
    """Find the weights and check every file against its header and the index, without reading tensors.

    Of two sets of weights, this is the one that stock transformers (5.4 to 5.24) loads.

    Raises:
        RopepatchError: If weights are missing, truncated, damaged or pickled.
    """
    sets = weight_sets(folder)
    if sets[:1] == [SINGLE]:
        return read_header(folder / SINGLE)
    if sets:
        return _indexed(folder / INDEX)
    message = f"no weights in {folder}"
    hint = f"expected {SINGLE}, or {INDEX} with its files"
    for name in PICKLES:
        if (folder / name).exists():
            message = f"{folder} holds its weights as a pickle ({name}), which can run code when it is loaded"
            hint = "where you trust it, load model and tokenizer with transformers and save_pretrained both"
    raise RopepatchError(message, hint=hint)


def weight_sets(folder: Path) -> list[str]:
    """Return the sets of weights in a folder by their first files; stock transformers loads the first set."""
    return [name for name in (SINGLE, INDEX) if (folder / name).exists()]


def _indexed(index: Path) -> Weights:
    shard_of: Any = read_json(index).get("weight_map")
    names: list[Any] = list(shard_of.values()) if isinstance(shard_of, dict) else [None]
    if not all(isinstance(name, str) and SHARD.fullmatch(name) for name in names):
        raise RopepatchError(
            f"weight_map of {index} must name a safetensors file beside it for each tensor",
            hint="copy the index again from where the checkpoint came from",
        )
    shards = {
        name: read_header(index.with_name(name)).tensors for name in sorted({*names})
    }
    tensors = dict(ChainMap(*reversed(shards.values())))  # transformers loads the last
    if absent := shard_of.keys() - tensors.keys():
        raise RopepatchError(
            f"{INDEX} names {min(absent)}, which is in no file",
            hint="the index and the files come from different checkpoints: copy both again",
        )
    return Weights((index, *(index.with_name(name) for name in shards)), tensors)


def read_header(file: Path) -> Weights:
    """Read the header of one safetensors file, without reading tensors.

    Raises:
        RopepatchError: If the file is missing, unreadable, truncated, damaged or not safetensors.
    """
    # safe_open checks the file. With framework="pt" it maps it privately, and rejects files larger than the
    # memory. It reports a file without read permission as missing, so the file is opened first.
    try:
        with file.open("rb") as opened, safe_open(file, framework="np"):
            begin = 8 + int.from_bytes(opened.read(8), "little")
            content: dict[str, Any] = json.loads(opened.read(begin - 8))
    except OSError as error:
        raise RopepatchError(
            f"cannot read {file}: {error.strerror or error}",
            hint="download it again, make it readable, or check the disk",
        ) from error
    except SafetensorError as error:
        message = f"{file.name} is truncated or damaged: {error}"
        raise RopepatchError(message, hint="download the file again") from error
    metadata = content.pop("__metadata__", None)
    tensors = {}
    for name, entry in content.items():
        first, end = entry["data_offsets"]
        tensors[name] = TensorEntry(
            file, entry["dtype"], tuple(entry["shape"]), begin + first, end - first
        )
    return Weights((file,), tensors, metadata)


def fingerprint(weights: Weights) -> str:
    """Identify the weights of a checkpoint: sha256 over the names, sizes and samples of the files.

    Only the first, the last and 14 evenly spaced MiB of each file are read, so 140 GB take a second. Use
    `checksums` to verify all bytes.
    """
    digest = hashlib.sha256()
    for file in weights.files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as source:
            for sample in range(16):
                source.seek(max(0, size - FINGERPRINT_SAMPLE) * sample // 15)
                digest.update(source.read(FINGERPRINT_SAMPLE))
    return digest.hexdigest()


def checksums(weights: Weights) -> dict[str, str]:
    """Compute the sha256 of every weight file, by name."""
    names = [file.name for file in weights.files]
    with ThreadPoolExecutor() as pool:  # hashlib releases the GIL
        return dict(zip(names, pool.map(sha256, weights.files), strict=True))


def changed(weights: Weights, sums: Mapping[str, str]) -> list[str]:
    """Return the weight files whose sha256 differs from the recorded one."""
    now = checksums(weights)
    return [name for name in now if sums.get(name) != now[name]]


def sha256(file: Path) -> str:
    """Compute the sha256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def clone_files(
    files: tuple[Path, ...],
    folder: Path,
    *,
    link: bool,
    progress: Progress | None,
    changes: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({}),
) -> None:
    """Copy files into a folder, or make hard links.

    A file with tensors in ``changes`` is rewritten.

    Raises:
        RopepatchError: If a hard link cannot be made.
        OSError: If the disk is full or read-only.
    """
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        # A file in the Hub's cache is a link to a blob
        origin, target = file.resolve(), folder / file.name
        is_weights = changes and file.suffix == ".safetensors"
        header = read_header(file) if is_weights else Weights((), {})
        if ours := changes.keys() & header.tensors:
            kept = {name: changes[name] for name in ours}
            _rewrite(origin, target, kept, header.metadata)
        elif link:
            _hard_link(origin, target)
        else:
            for copied in _copy(origin, target):
                if progress:
                    progress(done + copied, total)
        done += file.stat().st_size
        if progress:
            progress(done, total)


def _rewrite(
    origin: Path,
    target: Path,
    changes: Mapping[str, Callable[[Tensor], Tensor]],
    metadata: dict[str, str] | None,
) -> None:
    from safetensors.torch import load, save  # only rewriting needs torch

    from ropepatch.model.config import stock_code

    # Read, not mapped: if another program truncates the file, this raises an error instead of a signal.
    with stock_code(f"read {origin}", "write it again when nothing else does"):
        tensors = load(origin.read_bytes())
    for name, change in changes.items():
        tensors[name] = change(tensors[name])
    target.write_bytes(save(tensors, metadata))


def _hard_link(origin: Path, target: Path) -> None:
    try:
        os.link(origin, target)
    except OSError as error:
        raise RopepatchError(
            f"cannot hard-link {target.name}: {error.strerror}",
            hint=f"leave {argument('link_weights')} out, or put {argument('out')} where the source is",
        ) from error


def _copy(origin: Path, target: Path) -> Iterator[int]:
    copied = 0
    with origin.open("rb") as source, target.open("wb") as copy:
        files = source.fileno(), copy.fileno()
        # Where the file system can, the blocks are shared until either file is modified
        with suppress(AttributeError, OSError):  # not on Linux, or not between these
            while count := os.copy_file_range(*files, COPY_BLOCK):
                copied += count
                yield copied
        while block := source.read(COPY_BLOCK):
            copied += copy.write(block)
            yield copied
