"""Tokenised sources, cached on disk by `datasets`.

A row of an entry is a block of whole documents: their token ids and lengths, int32 as bytes.

Shapes: N tokens, D documents.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from huggingface_hub import HfApi
from numpy.typing import NDArray
from torch import Tensor

from ropepatch.data.sources import local_files, quiet_datasets, stream_documents
from ropepatch.data.texts import CHARACTERS, Texts, first_token, take, tokenise
from ropepatch.errors import RopepatchError
from ropepatch.settings import key_of, relative_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 3  # version of entries and of the tokenisation
BLOCK = 2**18  # tokens of a row, approximately
ROWS = 16  # rows that are written together

Int32 = NDArray[np.int32]
Advance = Callable[[int, int | None], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class TokenStore:
    """The documents of a source in one stream of tokens."""

    name: str  # a path or an id
    chunks: tuple[Int32, ...]  # the tokens, mapped from files
    starts: Tensor  # of each document, and the end of the last, int64 [D + 1]
    short: int = 0  # documents left out because they were too short
    min_tokens: int = 1

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the tokens and the lengths of the documents."""
        hashed = hashlib.sha256()
        for begin in range(0, len(self), BLOCK):
            hashed.update(self.ids(begin, min(begin + BLOCK, len(self))).int().numpy().data)
        hashed.update(self.starts.diff().int().numpy().data)
        return hashed.hexdigest()

    @property
    def report(self) -> str:
        """One line with the numbers of documents, tokens and dropped short documents."""
        there = f"{amount(len(self.starts) - 1)} documents, {amount(len(self))} tokens"
        if not self.short:
            return there
        return f"{there}; {amount(self.short)} shorter than {self.min_tokens} tokens left out"

    @cached_property
    def _ends(self) -> list[int]:
        """The end of each chunk in the stream."""
        return list(accumulate(map(len, self.chunks)))

    def first(self, tokens: int) -> TokenStore:
        """Return the first documents that together have that many tokens, or all if there are fewer."""
        count = min(int(torch.searchsorted(self.starts, tokens)), len(self.starts) - 1)
        return replace(self, starts=self.starts[: count + 1])

    def ids(self, begin: int, end: int) -> Tensor:
        """Return the tokens from ``begin`` to ``end``, int64."""
        number = bisect_right(self._ends, begin)
        parts: list[NDArray[Any]] = [np.empty(0, dtype=np.int64)]
        while begin < end and number < len(self.chunks):
            offset = self._ends[number] - len(self.chunks[number])
            parts.append(self.chunks[number][begin - offset : end - offset])
            begin, number = self._ends[number], number + 1
        return torch.from_numpy(np.concatenate(parts))

    def piece(self, begin: int, end: int) -> tuple[Tensor, tuple[int, ...]]:
        """Return token ids, int64 [end - begin], and the number of them from each document."""
        first, last = torch.searchsorted(self.starts, torch.tensor([begin + 1, end])).tolist()
        cuts = [begin, *self.starts[first:last].tolist(), end]
        lengths = tuple(after - before for before, after in pairwise(cuts))
        return self.ids(begin, end), lengths

    def __len__(self) -> int:
        """The number of tokens."""
        return int(self.starts[-1])


def joined(stores: Sequence[TokenStore], name: str) -> TokenStore:
    """Return the documents of several stores in one."""
    chunks = tuple(chunk for store in stores for chunk in store.chunks)
    lengths = torch.cat([store.starts.diff() for store in stores])
    return TokenStore(name, chunks, torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]))


def default_cache() -> Path:
    """Return ``$ROPEPATCH_CACHE/tokens``, or else `tokens` in the user's cache, ``~/.cache/ropepatch``."""
    own, shared = os.environ.get("ROPEPATCH_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(own) if own else Path(shared or "~/.cache") / "ropepatch"
    return folder.expanduser() / "tokens"


def tokenised(
    source: Texts,
    tokenizer: PreTrainedTokenizerBase,
    *,
    trained: int,
    vocabulary: int,
    tokens: int,
    cache: Path,
    advance: Advance | None = None,
) -> TokenStore:
    """Return the first documents of a source that together have ``tokens`` tokens, or all if there are fewer.

    The source is read no further. Texts are tokenised as in `cut_windows`: after the beginning-of-sequence
    token, else the end-of-sequence token, else nothing. Token ids stay unchanged. The key of the entry
    consists of the tokenizer, the settings of the source, the tokens, and the sizes and times of its files or
    its revision on the Hub. If the Hub cannot be reached, the latest entry is used. `min_tokens` may be
    relative to the original context length, ``trained``; see also `default_cache`.
    """
    min_tokens = max(relative_length(source.min_tokens, trained), 1)
    name, revision = _identity(source.text)
    settings = (FORMAT, name, source.field, source.split, min_tokens, tokens)
    key = key_of((*settings, tokenizer_digest(tokenizer), first_token(tokenizer)))[:24]
    documents = _read(source, tokenizer, vocabulary, tokens, min_tokens)
    blocks = _blocks(documents, source.text, min_tokens, tokens, advance)
    store = stored(cache, _entry(cache, key, revision), lambda: blocks, source.text)
    store = replace(store, min_tokens=min_tokens)
    for chunk in store.chunks:
        _check_vocabulary(int(chunk.max()), vocabulary, source.text)
    return store


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of everything that determines how a tokenizer splits a text."""
    hashed = hashlib.sha256(type(tokenizer).__qualname__.encode())
    hashed.update(repr(getattr(tokenizer, "split_special_tokens", None)).encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        content |= {"truncation": None, "padding": None}  # state of the last call
        hashed.update(json.dumps(content, sort_keys=True).encode())
        return hashed.hexdigest()
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            hashed.update(file.name.encode() + file.read_bytes())
    return hashed.hexdigest()


Block = tuple[list[Tensor], int]  # documents, and the number of shorter ones that were left out


def stored(cache: Path, key: str, make: Callable[[], Iterable[Block]], source: str) -> TokenStore:
    """Return the entry of a cache with this key; `datasets` writes it, once, if it is missing.

    Processes that need it wait for the one that writes. An interrupted writer leaves no entry.
    """
    from datasets import Dataset, Features, Value

    def rows() -> Iterator[dict[str, Any]]:
        for documents, short in make():
            ids = b"".join(document.int().numpy().tobytes() for document in documents)
            lengths = np.array([len(document) for document in documents], dtype=np.int32)
            yield {"ids": ids, "lengths": lengths.tobytes(), "short": short}

    features = Features({"ids": Value("binary"), "lengths": Value("binary"), "short": Value("int64")})
    with _explaining(cache, source), quiet_datasets():
        written = Dataset.from_generator(
            rows, features=features, cache_dir=str(cache), fingerprint=key, writer_batch_size=ROWS
        )
    return _mapped(written, source)


def _mapped(written: Any, source: str) -> TokenStore:
    """The tokens in the memory that Arrow maps from an entry's files."""
    chunks, lengths = [], [np.zeros(1, dtype=np.int32)]
    for batch in written.data.to_batches():
        if len(ids := _numbers(batch.column("ids"))):
            chunks.append(ids)
        lengths.append(_numbers(batch.column("lengths")))
    starts = torch.from_numpy(np.concatenate(lengths).cumsum(dtype=np.int64))
    return TokenStore(source, tuple(chunks), starts, sum(written.data.column("short").to_pylist()))


def _numbers(column: Any) -> Int32:
    """The numbers of all rows of an Arrow array of bytes, without a copy."""
    _, offsets, values = column.buffers()
    ends = np.frombuffer(offsets, dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(values, dtype=np.int32)[ends[0] // 4 : ends[-1] // 4]


@contextmanager
def _explaining(cache: Path, source: str) -> Iterator[None]:
    """Turn errors of the cache into one line; those of the source are its own."""
    from datasets.exceptions import DatasetGenerationError

    try:
        yield
    except (OSError, NotImplementedError, DatasetGenerationError) as error:
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        if cause is not None and not isinstance(cause, OSError | NotImplementedError):
            raise cause from None  # an error of the source
        reason = getattr(cause, "strerror", None) or cause
        raise RopepatchError(
            f"cannot cache the tokens of {source} in {cache}: {reason}",
            hint="free some space, or set ROPEPATCH_CACHE to a folder on another disk",
        ) from error


def amount(count: int) -> str:
    """Format a count: 5.1 M, or 1,204."""
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count:,}"


def _blocks(
    documents: Iterable[Tensor], source: str, min_tokens: int, tokens: int, advance: Advance | None
) -> Iterator[Block]:
    """Yield blocks of the documents that are long enough, up to ``tokens`` tokens."""
    block, size, taken, short, longest, kept = list[Tensor](), 0, 0, 0, 0, False
    for ids in documents:
        if len(ids) < min_tokens:
            short, longest = short + 1, max(longest, len(ids))
            continue
        block.append(ids)
        size, taken, kept = size + len(ids), taken + len(ids), True
        if advance is not None:
            advance(taken, tokens)
        if size >= BLOCK or taken >= tokens:
            yield block, short
            block, size, short = [], 0, 0
        if taken >= tokens:
            return
    if not kept:
        raise RopepatchError(
            f"no document of {source} has {min_tokens} tokens: the longest of {short} has {longest}",
            hint="give longer documents, or a smaller min_tokens",
        )
    if block or short:
        yield block, short


def _read(
    source: Texts, tokenizer: PreTrainedTokenizerBase, vocabulary: int, tokens: int, min_tokens: int
) -> Iterator[Tensor]:
    """Yield the token ids [T] of documents until those that are long enough have ``tokens`` tokens."""
    documents, taken = stream_documents(source.text, field=source.field, split=source.split), 0
    # A token is rarely shorter than a character, so read at most one character per missing token.
    while batch := take(documents, min(CHARACTERS, tokens - taken)):
        for ids in tokenise(tokenizer, batch, first=first_token(tokenizer)):
            if len(ids) >= min_tokens:
                _check_vocabulary(int(ids.max()), vocabulary, source.text)
                taken += len(ids)
            yield ids


def _check_vocabulary(largest: int, vocabulary: int, source: str) -> None:
    if largest >= vocabulary:
        raise RopepatchError(
            f"{source} holds token id {largest}, expected 0 to {vocabulary - 1}",
            hint="use the tokenizer, or the tokenised set, that belongs to the model",
        )


def _identity(source: str) -> tuple[str, str | None]:
    """Return the name and the revision of a source; None if the Hub cannot be reached."""
    files = local_files(source)
    if files is not None:
        states = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return str(Path(source).expanduser().resolve()), key_of(states)
    try:
        return source, HfApi().dataset_info(source.partition(":")[0], timeout=10).sha
    except Exception as error:  # e.g. offline: the latest entry may serve
        logger.debug("no revision of %s: %s", source, error)
        return source, None


def _entry(cache: Path, key: str, revision: str | None) -> str:
    """The key with the revision, or that of the latest entry if the Hub cannot be reached."""
    if revision is not None:
        return f"{key}-{revision[:24]}"
    entries = (cache / "generator").glob(f"default-fingerprint={key}-*/*/*.arrow")
    earlier = max(entries, key=lambda file: file.stat().st_mtime, default=None)
    if earlier is None:
        return f"{key}-unknown"
    logger.warning("cannot check the revision on the Hub; using the cached one: %s", earlier)
    return earlier.parents[1].name.partition("=")[2]
