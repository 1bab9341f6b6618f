"""Stream documents from files, folders, saved datasets and the Hub; all are read by `datasets`."""

from __future__ import annotations

import glob
import json
import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
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
OBJECTS, TABLES = (".jsonl", ".json"), (".parquet", ".csv")
LINES = 16  # that memory holds at a time
DATASET_ID = re.compile(rf"(?P<name>{HUB_NAME}/{HUB_NAME})(:[\w.+-]+)?", re.ASCII)
FILE_NAME = re.compile(r".*\.(txt|json|jsonl|parquet|csv)(\.gz)?")
OF_THE_HUB = "no such path is here; check id, config, split and network, or log in with `hf auth login`"
EXPECTED = (
    "give a text, JSONL, CSV or Parquet file, a folder of *.txt and *.jsonl, a saved dataset, or a dataset "
    "id owner/name"
)

Document = str | list[int]


def stream_documents(
    source: str | Path, *, field: str = "text", split: str = "test"
) -> Iterator[Document]:
    """Stream the documents of a source, texts or token ids.

    A source is one of these; local paths take precedence over ids on the Hub:

    - a text file, split at every ``<|endoftext|>``, with white space around documents dropped;
    - a ``.jsonl`` or ``.json`` file with one object per line; both kinds may be gzipped (``.gz``);
    - a folder of ``*.txt`` and ``*.jsonl``, in sorted order, at any depth;
    - a dataset that ``save_to_disk`` wrote, or a ``.parquet`` or ``.csv`` file;
    - the id of a dataset on the Hub, ``owner/name`` or ``owner/name:config``; none of its code is run.

    Memory holds one document and a batch of lines or rows at a time. Blank documents are dropped.

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
    # Too long a name, NUL, ~ of an unknown user
    with _explaining(f"look for {str(source)!r}", EXPECTED):
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
    path = Path(source).expanduser()
    if path.exists():
        check_regular(path)
        return path
    named = DATASET_ID.fullmatch(str(source))
    if isinstance(source, Path) or not named or FILE_NAME.fullmatch(named["name"]):
        raise RopepatchError(f"no such file or folder: {source}", hint=EXPECTED)
    return None


def _is_saved(folder: Path) -> bool:
    return any(
        (folder / name).is_file() for name in ("state.json", "dataset_dict.json")
    )


def _files_in(folder: Path) -> list[Path]:
    patterns = ["*.arrow", "*.json"] if _is_saved(folder) else IN_FOLDERS
    files = {
        path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()
    }
    if not files:
        raise RopepatchError(
            f"no text in {folder}: it has no *.txt or *.jsonl file", hint=EXPECTED
        )
    return sorted(files)


def _read_file(file: Path, field: str) -> Iterator[Document]:
    suffix = Path(file.name.removesuffix(".gz")).suffix
    hint = f"copy it again; if it is not UTF-8, convert it, e.g. iconv -f latin1 -t utf-8 {file.name}"
    with _explaining(f"read {file}", hint):
        if suffix in TABLES:
            yield from _read_rows(_streamed(file, suffix), field, str(file))
        elif suffix in OBJECTS:
            yield from _read_objects(file, field)
        else:
            yield from _read_texts(file)


def _streamed(file: Path, suffix: str) -> Any:
    """Return an `IterableDataset` of the rows of a table or the lines of a text."""
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.packaged_modules.parquet.parquet import Parquet
    from datasets.packaged_modules.text.text import Text

    readers: dict[str, Any] = {
        ".parquet": (Parquet, {}),
        ".csv": (Csv, {"keep_default_na": False}),
        ".txt": (Text, {"keep_linebreaks": True, "chunksize": 2**18}),
    }
    reader, options = readers[suffix]
    files = {"train": [glob.escape(str(file.absolute()))]}
    # It puts a lock there, and the home may be read-only
    with TemporaryDirectory() as cache:
        builder = reader(cache, data_files=files, **options)
    return builder.as_streaming_dataset("train")


def _lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text, with line ends as in Python's text mode."""
    tables = _streamed(file, ".txt").with_format("arrow").iter(batch_size=LINES)
    for number, table in enumerate(tables):
        lines = table.column("text").to_pylist()
        if number == 0:
            lines[0] = lines[0].removeprefix("\ufeff")  # a byte order mark
        yield from lines


def _read_texts(file: Path) -> Iterator[str]:
    text = ""
    for line in _lines(file):  # a separator never spans two lines
        *ends, rest = line.split(SEPARATOR)
        for end in ends:
            yield (text + end).strip()
            text = ""
        text += rest
    yield text.strip()


def _read_objects(file: Path, field: str) -> Iterator[Document]:
    for number, line in enumerate(_lines(file), start=1):
        if not line.strip():
            continue
        line_name = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RopepatchError(
                f"{line_name} is not JSON: {error}",
                hint='each line must be an object such as {"text": "..."}',
            ) from error
        if not isinstance(row, dict):
            raise RopepatchError(
                f"{line_name} must be a JSON object, got {reprlib.repr(row)}",
                hint='such as {"text": "..."}',
            )
        yield _document(row, field, line_name)


def _document(row: Mapping[str, Any], field: str, row_name: str) -> Document:
    name = field if field in row else TOKEN_IDS
    if name not in row:
        raise RopepatchError(
            f"{row_name} has no field {field!r}, nor {TOKEN_IDS}",
            hint=f"it has {reprlib.repr(list(row))}",
        )
    value = row[name]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and ids_of(value) is not None:
        return value
    raise RopepatchError(
        f"{row_name}: {name} must be a text or a list of token ids, got {reprlib.repr(value)}",
        hint="name the field that holds the texts",
    )


def ids_of(document: Any) -> Tensor | None:
    """Return the token ids [T] of a document, int64 on the CPU; None if it is not a list of token ids."""
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        ids = torch.as_tensor(document).cpu()
        if len(ids):
            torch.iinfo(ids.dtype)  # TypeError: no whole numbers
        ids = ids.long()
        if ids.ndim == 1 and bool(((ids >= 0) & (ids < 2**31)).all()):
            return ids
    return None


def check_document(document: Any, index: int) -> str | Tensor:
    """Return a text, or token ids [T], after checking it.

    The first document must not be a file name. Later ones are not checked: they may be lines of a text.
    """
    if not isinstance(document, str):
        ids = ids_of(document)
        if ids is not None:
            return ids
        raise RopepatchError(
            f"documents[{index}] must be a text or a list of token ids, got {reprlib.repr(document)}",
            hint="drop empty texts; token ids must be a list of whole numbers from 0",
        )
    if index == 0:
        with suppress(OSError, ValueError):  # too long for a name, or with a NUL
            if Path(document).is_file():
                raise RopepatchError(
                    f"documents[{index}] is the name of a file, {document!r}: documents are texts",
                    hint="pass its content: [Path(name).read_text()]",
                )
    return document


def _read_saved(folder: Path, field: str, split: str) -> Iterator[Document]:
    from datasets import DatasetDict, load_from_disk

    with _explaining(f"read {folder}", "save it again with save_to_disk"):
        dataset = load_from_disk(str(folder))
        if isinstance(dataset, DatasetDict):
            if split not in dataset:
                raise RopepatchError(
                    f"{folder} has no split {split!r}",
                    hint=f"it has {', '.join(dataset)}",
                )
            dataset = dataset[split]
        yield from _read_rows(dataset.with_format(None), field, str(folder))


def _read_hub(
    name: str, config: str | None, field: str, split: str
) -> Iterator[Document]:
    from datasets import load_dataset

    with _explaining(f"read {name} from the Hub", OF_THE_HUB):
        dataset = load_dataset(name, config, split=split, streaming=True)
        yield from _read_rows(dataset, field, name)


def _read_rows(dataset: Any, field: str, name: str) -> Iterator[Document]:
    columns = dataset.column_names or []  # None if unknown
    for wanted in (field, TOKEN_IDS):
        if wanted in columns:
            dataset = dataset.select_columns([wanted])
            break
    for number, row in enumerate(dataset):
        yield _document(row, field, f"{name}, row {number}")


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
