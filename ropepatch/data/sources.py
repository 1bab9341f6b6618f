"""Stream documents from files, folders, saved datasets and the Hub, by `datasets`."""

from __future__ import annotations

import glob
import logging
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from ropepatch.errors import RopepatchError
from ropepatch.files import check_name, check_regular
from ropepatch.settings import HUB_NAME

SEPARATOR = "<|endoftext|>"
TOKEN_IDS = "input_ids"
IN_FOLDERS = ["*.txt", "*.txt.gz", "*.jsonl", "*.jsonl.gz"]
LINES_AT_ONCE, ROWS_AT_ONCE = 4096, 16  # lines of a text, or documents, that are held in memory
TABLE = {"keep_default_na": False}  # an empty cell is a blank text
CHUNKS = {"chunksize": 2**20}  # bytes
LINES = CHUNKS | {"keep_linebreaks": True}
BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {  # of `datasets`, with their options
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
    ".csv": ("csv", TABLE),
    ".tsv": ("csv", TABLE | {"sep": "\t"}),
    ".jsonl": ("json", CHUNKS),
    ".json": ("json", CHUNKS),
}
DATASET_ID = re.compile(rf"(?P<name>{HUB_NAME}/{HUB_NAME})(:(?P<config>[\w.+-]+))?", re.ASCII)
FILE_NAME = re.compile(r".*\.(txt|json|jsonl|parquet|arrow|csv|tsv)(\.gz)?")
MAX_DOCUMENT = 2**30  # characters
OF_THE_HUB = "no such path is here; check id, config, split and network, or log in with `hf auth login`"
EXPECTED = (
    "give a text, JSONL, CSV or Parquet file, a folder of *.txt and *.jsonl, a saved dataset, or a dataset "
    "id owner/name"
)


Document = str | list[int]


def stream_documents(source: str | Path, *, field: str = "text", split: str = "test") -> Iterator[Document]:
    """Stream the documents of a source, texts or token ids.

    A source is one of these; local paths take precedence over ids on the Hub:

    - a text file, split at every ``<|endoftext|>``, with white space around documents dropped;
    - a ``.jsonl`` or ``.json`` file with one object per line; both kinds may be gzipped (``.gz``);
    - a folder of ``*.txt`` and ``*.jsonl``, in sorted order, at any depth;
    - a dataset that ``save_to_disk`` wrote, or a ``.parquet``, ``.arrow``, ``.csv`` or ``.tsv`` file;
    - the id of a dataset on the Hub, ``owner/name`` or ``owner/name:config``; none of its code is run.

    Memory holds a few thousand rows or lines at a time. Blank documents are dropped.

    Args:
        source: A path, or a string that is a path or an id; a ``Path`` is never an id.
        field: The field of an object or row that contains a text or a list of token ids; else
            ``input_ids``.
        split: The split of a dataset with splits.
    """
    documents = (
        document
        for document in _open(source, field, split)
        if (document.strip() if isinstance(document, str) else document)
    )
    first = next(documents, None)
    if first is None:
        raise RopepatchError(f"no text in {source}: all of it is blank", hint=EXPECTED)
    return chain([first], documents)


def local_files(source: str | Path) -> list[Path] | None:
    """Return the files that `stream_documents` reads for a source; None for a dataset id on the Hub."""
    check_name(source)
    with _explaining(f"look for {str(source)!r}", EXPECTED):  # too long a name, NUL, ~ of an unknown user
        path = _local(source)
        if path is None:
            return None
        return _files_in(path) if path.is_dir() else [path]


def _open(source: str | Path, field: str, split: str) -> Iterator[Document]:
    files = local_files(source)
    if files is None:
        name, _, config = str(source).partition(":")
        return _read_hub(name, config or None, field, split)
    path = Path(source).expanduser()
    if path.is_dir() and _is_saved(path):
        return _read_saved(path, field, split)
    return chain.from_iterable(_read_file(file, field) for file in files)


def _local(source: str | Path) -> Path | None:
    """Return the path of a local source; None for an id on the Hub."""
    if source == "":  # as a path, the current folder
        raise RopepatchError("the source is an empty name", hint=EXPECTED)
    path = Path(source).expanduser()
    if path.exists():
        check_regular(path)
        return path
    named = DATASET_ID.fullmatch(str(source))
    if isinstance(source, Path) or not named or FILE_NAME.fullmatch(named["name"]):
        raise RopepatchError(f"no such file or folder: {source}", hint=EXPECTED)
    if Path(named["name"]).exists():
        raise RopepatchError(
            f"{named['name']} is a path on this machine, which has no config",
            hint=f"leave out :{named['config']}",
        )
    return None


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _files_in(folder: Path) -> list[Path]:
    patterns = ["*.arrow", "*.json"] if _is_saved(folder) else IN_FOLDERS
    files = {path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()}
    if not files:
        raise RopepatchError(f"no text in {folder}: it has no *.txt or *.jsonl file", hint=EXPECTED)
    return sorted(files)


def _read_file(file: Path, field: str) -> Iterator[Document]:
    from datasets import load_dataset

    builder, options = BUILDERS.get(Path(file.name.removesuffix(".gz")).suffix, ("text", LINES))
    if "::" in str(file.absolute()):  # to fsspec a chain of file systems
        raise RopepatchError(f"datasets cannot read {file}: its path contains ::", hint="rename it")
    hint = f"it must be a {builder} file that datasets can read, in UTF-8"
    with _explaining(f"read {file}", hint):
        files = {"train": [glob.escape(str(file.absolute()))]}
        where: dict[str, Any] = {"data_files": files, "split": "train", "streaming": True}
        with quiet_datasets():
            dataset = load_dataset(builder, **where, **options)
        if builder == "text":
            yield from _documents_of_lines(_lines(dataset), file)
        else:
            yield from _documents_of_rows(dataset, field, str(file))


def _lines(dataset: Any) -> Iterator[str]:
    for number, table in enumerate(_tables(dataset, LINES_AT_ONCE)):
        lines = table.column("text").to_pylist()
        if not number:
            lines[0] = lines[0].removeprefix("\ufeff")  # a byte order mark
        yield from lines


def _documents_of_lines(lines: Iterable[str], file: Path) -> Iterator[str]:
    """Join the lines of a text file up to every separator, which never spans two lines."""
    parts, size = list[str](), 0
    for line in lines:
        *ends, rest = line.split(SEPARATOR)
        for end in ends:
            yield "".join([*parts, end]).strip()
            parts, size = [], 0
        parts.append(rest)
        size += len(rest)
        if size > MAX_DOCUMENT:
            raise RopepatchError(
                f"{file} has a document of more than {MAX_DOCUMENT:,} characters",
                hint=f"is it text? put {SEPARATOR} between the documents of a text file",
            )
    yield "".join(parts).strip()


def _documents_of_rows(
    dataset: Any, field: str, name: str, at_once: int = ROWS_AT_ONCE
) -> Iterator[Document]:
    with quiet_datasets():
        features = dataset.features or {}  # None if unknown
    wanted = [column for column in dict.fromkeys((field, TOKEN_IDS)) if column in features]
    for column in wanted:
        if type(features[column]).__name__ == "Json":  # values of several types, written as JSON
            raise RopepatchError(
                f"{name}: {column} must be a text or a list of token ids in every row",
                hint="name the field that holds the texts",
            )
    dataset = dataset.select_columns(wanted) if wanted else dataset
    rows = chain.from_iterable(table.to_pylist() for table in _tables(dataset, at_once))
    for number, row in enumerate(rows):
        yield _document(row, field, f"{name}, row {number}")


def _tables(dataset: Any, at_once: int) -> Iterator[Any]:
    """Yield Arrow tables of so many rows."""
    tables = iter(dataset.with_format("arrow").iter(batch_size=at_once))
    while True:
        with quiet_datasets():
            table = next(tables, None)
        if table is None:
            return
        yield table


def _document(row: Mapping[str, Any], field: str, row_name: str) -> Document:
    present = [name for name in (field, TOKEN_IDS) if name in row]
    if not present:
        raise RopepatchError(
            f"{row_name} has no field {field!r}, nor {TOKEN_IDS}", hint=f"it has {reprlib.repr(list(row))}"
        )
    name = next((name for name in present if row[name] is not None), present[0])
    value = row[name]
    if isinstance(value, str) or (isinstance(value, list) and ids_of(value) is not None):
        return value
    raise RopepatchError(
        f"{row_name}: {name} must be a text or a list of token ids, got {reprlib.repr(value)}",
        hint="name the field that holds the texts",
    )


def ids_of(document: Any) -> Tensor | None:
    """Return the token ids [T] of a document, int64 on the CPU; None if it is not a list of token ids."""
    if isinstance(document, Sequence) and any(isinstance(token, bool) for token in document):
        return None
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        ids = torch.as_tensor(document).cpu()
        whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        if ids.ndim == 1 and (whole or not len(ids)):
            ids = ids.long()
            return ids if not len(ids) or (ids.min() >= 0 and ids.max() < 2**31) else None
    return None


def _read_saved(folder: Path, field: str, split: str) -> Iterator[Document]:
    from datasets import DatasetDict, load_from_disk

    with _explaining(f"read {folder}", "save it again with save_to_disk"):
        dataset = load_from_disk(str(folder))
        if isinstance(dataset, DatasetDict):
            if split not in dataset:
                raise RopepatchError(f"{folder} has no split {split!r}", hint=f"it has {', '.join(dataset)}")
            dataset = dataset[split]
        yield from _documents_of_rows(dataset, field, str(folder))


def _read_hub(name: str, config: str | None, field: str, split: str) -> Iterator[Document]:
    from datasets import load_dataset

    with _explaining(f"read {name} from the Hub", OF_THE_HUB):
        with quiet_datasets():
            dataset = load_dataset(name, config, split=split, streaming=True)
        yield from _documents_of_rows(dataset, field, name, at_once=1)  # no row is downloaded in advance


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Hide the progress bars of `datasets`, and logs of errors that it raises, within the block."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("datasets")
    level, shown = logger.level, not are_progress_bars_disabled()
    disable_progress_bars()
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        if shown:
            enable_progress_bars()


@contextmanager
def _explaining(what: str, hint: str) -> Iterator[None]:
    """Turn any error into a RopepatchError of one line."""
    try:
        yield
    except RopepatchError:
        raise
    except Exception as error:  # of datasets, pyarrow, fsspec, httpx and others
        reason = shorten(str(error) or type(error).__name__, 300)
        raise RopepatchError(f"cannot {what}: {reason}", hint=hint) from error
