"""Documents from wherever they are kept, read as they are asked for."""

from __future__ import annotations

import glob
import gzip
import json
import re
import reprlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any

from ropepatch.errors import RopepatchError
from ropepatch.files import check_regular

SEPARATOR = b"<|endoftext|>"
TOKEN_IDS = "input_ids"
IN_FOLDERS = ["*.txt", "*.txt.gz", "*.jsonl", "*.jsonl.gz"]
FORMATS = {".parquet": "parquet", ".arrow": "arrow"}  # of datasets
HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<config>[\w.+-]+))?", re.ASCII)
FILE_NAME = re.compile(r".*\.(txt|json|jsonl|parquet|arrow)(\.gz)?")
HALF_A_PAIR = re.compile("[\\ud800-\\udfff]")  # of surrogates, which JSON can spell and is no character
OF_THE_HUB = "no such path is here; check id, config, split and network, or log in with `hf auth login`"
LARGEST = 2**30  # bytes of a document
HOPELESS = 1000  # bad rows with no good one before them: a stream would be read to its end in vain
EXPECTED = (
    "give a text or JSONL file, a folder of *.txt and *.jsonl, a saved dataset, or a dataset id owner/name"
)

Read = str | list[int] | RopepatchError  # a document, or what is wrong with the row in its place


def stream_documents(
    source: str | Path,
    *,
    field: str = "text",
    split: str = "test",
    on_bad: Callable[[str], None] | None = None,
) -> Iterator[str | list[int]]:
    """The documents of a source, texts or token ids, each read when it is asked for.

    Sources are, and what is on this machine goes before the Hub:

    - a text file, split at every ``<|endoftext|>``, white space around documents dropped;
    - a ``.jsonl`` or ``.json`` file of one object per line; either kind of file may be gzipped (``.gz``);
    - a folder of ``*.txt`` and ``*.jsonl``, in sorted order, at any depth;
    - what `datasets` wrote with ``save_to_disk``, or a ``.parquet`` or ``.arrow`` file;
    - the id of a dataset on the Hub, ``owner/name`` or ``owner/name:config``; none of its code is run.

    Memory holds one document (of `datasets`, one batch of rows) at a time. Blank documents are dropped.

    Args:
        source: A path, or a string that is a path or an id; a ``Path`` is never an id.
        field: The field of an object or row that holds a text or a list of token ids; where it is absent
            ``input_ids`` is read.
        split: The split to read, of a dataset with splits.
        on_bad: Is told in one line of each bad row, which is then left out; None to raise. A bad row is a
            line that is no JSON object, a row without the field, a value that is neither text nor token ids,
            or a text or line with bytes that are not UTF-8.

    Raises:
        RopepatchError: At once: no such source, split or package, no documents, a column that is not there,
            or, without ``on_bad``, a fault in the first; with it, if all rows are bad, or the first thousand.
            When it is reached: without ``on_bad`` a bad row; a file that cannot be read, or a Hub that no
            longer answers.
    """
    bad: list[str] = []
    documents = _sound(_open(source, field, split), bad, on_bad)
    first = next(documents, None)
    if first is None and bad:
        among = "all" if len(bad) < HOPELESS else "the first"
        raise RopepatchError(
            f"{among} {len(bad)} rows of {source} are bad; the first: {bad[0]}", hint="check field and format"
        )
    if first is None:
        raise RopepatchError(f"no text in {source}: all of it is blank", hint=EXPECTED)
    return chain([first], documents)


def local_files(source: str | Path) -> list[Path] | None:
    """The files that `stream_documents` reads a source from; None for the id of a dataset on the Hub.

    Raises:
        RopepatchError: No such source.
    """
    with _looking_for(source):
        path = _local(source)
        if path is None:
            return None
        return _files_in(path) if path.is_dir() else [path]


def _sound(
    rows: Iterator[Read], bad: list[str], on_bad: Callable[[str], None] | None
) -> Iterator[str | list[int]]:
    """The documents that are not blank; ``bad`` is filled up to the first."""
    none_yet = True
    for row in rows:
        if isinstance(row, RopepatchError):
            if on_bad is None:
                raise row
            on_bad(str(row))
            if none_yet:
                bad.append(str(row))
                if len(bad) == HOPELESS:
                    return
        elif row.strip() if isinstance(row, str) else row:
            none_yet = False
            yield row


def _open(source: str | Path, field: str, split: str) -> Iterator[Read]:
    with _looking_for(source):
        path = _local(source)
        if path is None:
            name, _, config = str(source).partition(":")
            return _read_hub(name, config or None, field, split)
        if not path.is_dir():
            return _read_file(path, field)
        if _is_saved(path):
            for file in path.rglob("*"):
                check_regular(file)
            return _read_saved(path, field, split)
        return chain.from_iterable(_read_file(file, field) for file in _files_in(path))


def _local(source: str | Path) -> Path | None:
    """The path of a source that is on this machine; None for what can only be an id of the Hub."""
    if source == "":  # the folder we are in, as a path
        raise RopepatchError("the source is an empty name", hint=EXPECTED)
    path = Path(source).expanduser()
    if path.exists():
        check_regular(path)
        return path
    named = HUB_ID.fullmatch(str(source))
    if isinstance(source, Path) or not named or FILE_NAME.fullmatch(named["name"]):
        raise RopepatchError(f"no such file or folder: {source}", hint=EXPECTED)
    if Path(named["name"]).exists():
        raise RopepatchError(
            f"{named['name']} is a path on this machine, which has no config",
            hint=f"leave out :{named['config']}",
        )
    return None


@contextmanager
def _looking_for(source: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, a closed folder, ~ of nobody, NUL
        raise RopepatchError(f"cannot look for {str(source)!r}: {error}", hint=EXPECTED) from error


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _files_in(folder: Path) -> list[Path]:
    patterns = ["*.arrow", "*.json"] if _is_saved(folder) else IN_FOLDERS
    files = {path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()}
    if not files:
        raise RopepatchError(f"no text in {folder}: it has no *.txt or *.jsonl file", hint=EXPECTED)
    return sorted(files)


def _read_file(file: Path, field: str) -> Iterator[Read]:
    kind = Path(file.name.removesuffix(".gz")).suffix
    if kind in (".jsonl", ".json"):
        return _read_objects(file, field)
    if kind in FORMATS:
        return _read_table(file, FORMATS[kind], field)
    return _read_texts(file)


def _read_texts(file: Path) -> Iterator[Read]:
    offset, content = 0, bytearray()
    for line in chain(_read_lines(file), [SEPARATOR]):  # no marker reaches over the end of a line
        *ends, rest = line.split(SEPARATOR)
        for end in ends:
            content += end
            begin, offset = offset, offset + len(content) + len(SEPARATOR)
            try:
                document: Read = _decode(content, file, begin).strip()
            except RopepatchError as bad:
                document = bad
            content = bytearray()  # a document may be all that memory holds
            yield document
        content += rest
        if len(content) > LARGEST:
            raise _too_long(file)


def _read_objects(file: Path, field: str) -> Iterator[Read]:
    offset = 0
    for number, line in enumerate(_read_lines(file), start=1):
        place = f"{file}, line {number}"
        try:
            text = _decode(line, file, offset)
            if text.strip():
                yield _document(_object(text, place), field, place)
        except RopepatchError as bad:
            yield bad
        offset += len(line)


def _object(text: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RopepatchError(
            f"{place} is not JSON: {error}", hint='each line must be an object such as {"text": "..."}'
        ) from error
    if not isinstance(row, dict):
        raise RopepatchError(
            f"{place} must be a JSON object, got {reprlib.repr(row)}", hint='such as {"text": "..."}'
        )
    return row


def _read_lines(file: Path) -> Iterator[bytes]:
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            while line := stream.readline(LARGEST + 1):
                if len(line) > LARGEST:
                    raise _too_long(file)
                yield line
    except (OSError, EOFError, zlib.error) as error:
        raise RopepatchError(f"cannot read {file}: {error}", hint="copy it again") from error


def _too_long(file: Path) -> RopepatchError:
    return RopepatchError(
        f"{file} has a document of more than {LARGEST:,} bytes",
        hint="is it text? put <|endoftext|> between the documents of a text file, or split the file",
    )


def _decode(content: bytes | bytearray, file: Path, offset: int) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RopepatchError(
            f"{file} is not UTF-8 text: byte 0x{content[error.start]:02x} at offset {offset + error.start}",
            hint=f"convert it, e.g. iconv -f latin1 -t utf-8 {file.name}",
        ) from error
    text = text if offset else text.removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _document(row: Mapping[str, Any], field: str, place: str) -> str | list[int]:
    name = field if field in row else TOKEN_IDS
    if name not in row:
        raise RopepatchError(
            f"{place} has no field {field!r}, nor {TOKEN_IDS}", hint=f"it has {reprlib.repr(list(row))}"
        )
    value = row[name]
    if isinstance(value, str) and not HALF_A_PAIR.search(value):
        return value
    if isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value):
        return value
    raise RopepatchError(
        f"{place}: {name} must be a text or a list of token ids, got {reprlib.repr(value)}",
        hint="name the field that holds the texts",
    )


def _read_saved(folder: Path, field: str, split: str) -> Iterator[Read]:
    datasets = _datasets()
    with _explaining(str(folder), "save it again with save_to_disk"):
        dataset = datasets.load_from_disk(str(folder))
        if isinstance(dataset, datasets.DatasetDict):
            if split not in dataset:
                raise RopepatchError(f"{folder} has no split {split!r}", hint=f"it has {', '.join(dataset)}")
            dataset = dataset[split]
        yield from _read_rows(dataset.with_format(None), field, str(folder))


def _read_table(file: Path, kind: str, field: str) -> Iterator[Read]:
    datasets = _datasets()
    with _explaining(str(file), f"it must be a {kind} file that datasets can read"):
        files = {"train": [glob.escape(str(file.absolute()))]}
        dataset = datasets.load_dataset(kind, data_files=files, split="train", streaming=True)
        yield from _read_rows(dataset, field, str(file))


def _read_hub(name: str, config: str | None, field: str, split: str) -> Iterator[Read]:
    datasets = _datasets()
    with _explaining(f"{name} from the Hub", OF_THE_HUB):
        dataset = datasets.load_dataset(name, config, split=split, streaming=True)
        yield from _read_rows(dataset, field, name)


def _read_rows(dataset: Any, field: str, name: str) -> Iterator[Read]:
    columns = dataset.column_names or []  # None where only the rows tell
    wanted = field if field in columns else TOKEN_IDS
    rows = dataset.select_columns([wanted]) if wanted in columns else dataset
    for number, row in enumerate(rows):
        try:
            yield _document(row, field, f"{name}, row {number}")
        except RopepatchError as bad:
            if columns and wanted not in columns:  # nor has any other row
                raise
            yield bad


def _datasets() -> Any:
    try:
        return import_module("datasets")
    except ImportError as error:
        raise RopepatchError(
            "datasets is needed to read this source", hint='pip install "ropepatch[eval]"'
        ) from error


@contextmanager
def _explaining(name: str, hint: str) -> Iterator[None]:
    try:
        yield
    except RopepatchError:
        raise
    except Exception as error:  # of datasets, pyarrow, fsspec, httpx ...: no list of them would stay whole
        reason = shorten(str(error) or type(error).__name__, 300)
        raise RopepatchError(f"cannot read {name}: {reason}", hint=hint) from error
