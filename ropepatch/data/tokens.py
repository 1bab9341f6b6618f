"""Tokenised sources, cached on disk by `datasets`: an entry has a row of token ids for every document.

Shapes: N tokens, D documents.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from huggingface_hub import HfApi
from torch import Tensor

from ropepatch.data.sources import TOKEN_IDS, local_files, stream_documents
from ropepatch.data.texts import CHARACTERS, Texts, first_token, take, tokenise
from ropepatch.errors import RopepatchError
from ropepatch.settings import key_of, relative_length

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

FORMAT = 4  # version of entries and of the tokenisation
ROWS = 64  # documents that memory holds until they are written

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class TokenStore:
    """The first documents of a source, as one stream of tokens."""

    name: str  # a path or an id
    documents: Dataset  # a row of token ids each, mapped from files
    starts: Tensor  # of each document, and the end of the last, int64 [D + 1]

    @classmethod
    def of(cls, name: str, *entries: Dataset) -> TokenStore:
        """Return the documents of cache entries, one after the other."""
        import pyarrow.compute as pc
        from datasets import concatenate_datasets

        documents = concatenate_datasets(entries)
        lengths = pc.list_value_length(documents.data.column(TOKEN_IDS)).to_numpy()
        starts = np.concatenate([[0], lengths]).cumsum()
        return cls(name, documents, torch.from_numpy(starts))

    @property
    def _stream(self) -> Any:
        """The tokens of all documents, an Arrow array of int32."""
        import pyarrow.compute as pc

        return pc.list_flatten(self.documents.data.column(TOKEN_IDS))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the tokens and the lengths of the documents."""
        hashed = hashlib.sha256()
        for chunk in self._stream.slice(0, len(self)).chunks:
            hashed.update(chunk.to_numpy().data)
        hashed.update(self.starts.diff().int().numpy().data)
        return hashed.hexdigest()

    @property
    def largest(self) -> int:
        """The largest token id."""
        return max(int(chunk.to_numpy().max()) for chunk in self._stream.chunks)

    @property
    def report(self) -> str:
        """The numbers of documents and tokens, as text."""
        return f"{len(self.starts) - 1:,} documents, {len(self):,} tokens"

    def first(self, tokens: int) -> TokenStore:
        """Return the first documents that together have that many tokens, or all if there are fewer."""
        count = min(int(torch.searchsorted(self.starts, tokens)), len(self.starts) - 1)
        return replace(self, starts=self.starts[: count + 1])

    def ids(self, begin: int, end: int) -> Tensor:
        """Return the tokens from ``begin`` to ``end``, int64."""
        return torch.from_numpy(
            self._stream.slice(begin, end - begin).to_numpy().astype(np.int64)
        )

    def piece(self, begin: int, end: int) -> tuple[Tensor, tuple[int, ...]]:
        """Return token ids, int64 [end - begin], and the number of them from each document."""
        first, last = torch.searchsorted(
            self.starts, torch.tensor([begin + 1, end])
        ).tolist()
        cuts = [begin, *self.starts[first:last].tolist(), end]
        lengths = tuple(after - before for before, after in pairwise(cuts))
        return self.ids(begin, end), lengths

    def __len__(self) -> int:
        """The number of tokens."""
        return int(self.starts[-1])


def default_cache() -> Path:
    """Return ``$ROPEPATCH_CACHE/tokens``, or else ``~/.cache/ropepatch/tokens``."""
    folder = os.environ.get("ROPEPATCH_CACHE", "~/.cache/ropepatch")
    return Path(folder).expanduser() / "tokens"


def tokenised(
    source: Texts,
    tokenizer: PreTrainedTokenizerBase,
    *,
    trained: int,
    vocabulary: int,
    tokens: int,
) -> TokenStore:
    """Return the first documents of a source that together have ``tokens`` tokens, or all if there are fewer.

    The source is read no further. Texts are tokenised as in `cut_windows`: after the beginning-of-sequence
    token, else the end-of-sequence token, else nothing. Token ids stay unchanged. The cache key consists of
    the tokenizer, the settings of the source, ``tokens``, and the sizes and times of its files or its
    revision on the Hub. If the Hub cannot be reached, the latest entry is used. `min_tokens` may be relative
    to the original context length, ``trained``; see also `default_cache`.
    """
    min_tokens = max(relative_length(source.min_tokens, trained), 1)
    name, revision = _identity(source.text)
    settings = (FORMAT, name, source.field, source.split, min_tokens, tokens)
    key = key_of((*settings, tokenizer_digest(tokenizer), first_token(tokenizer)))[:24]
    documents = partial(_read, source, tokenizer, min_tokens, tokens)
    entry = cached(_entry(key, revision), documents, source.text)
    store = TokenStore.of(source.text, entry)
    if store.largest >= vocabulary:
        raise RopepatchError(
            f"{source.text} holds token id {store.largest}, expected 0 to {vocabulary - 1}",
            hint="use the tokenizer, or the tokenised set, that belongs to the model",
        )
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


def cached(key: str, documents: Callable[[], Iterable[Tensor]], source: str) -> Dataset:
    """Return the cache entry with a key; if it is missing, `datasets` writes the documents to it.

    Other processes that need it wait until it is written. An interrupted process leaves no entry.
    """
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    cache = default_cache()

    def rows() -> Iterator[dict[str, Any]]:
        for ids in documents():
            yield {TOKEN_IDS: ids.int().numpy()}

    try:
        with _no_bars():
            return Dataset.from_generator(
                rows, cache_dir=str(cache), fingerprint=key, writer_batch_size=ROWS
            )
    except (OSError, NotImplementedError, DatasetGenerationError) as error:
        cause = error.__cause__ or error
        # NotImplementedError: no locks there
        if not isinstance(cause, OSError | NotImplementedError):
            raise cause from None
        reason = getattr(cause, "strerror", None) or cause
        raise RopepatchError(
            f"cannot cache the tokens of {source} in {cache}: {reason}",
            hint="free some space, or set ROPEPATCH_CACHE to a folder on another disk",
        ) from error


@contextmanager
def _no_bars() -> Iterator[None]:
    """Hide the progress bars of `datasets`."""
    from datasets import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


def _read(
    source: Texts, tokenizer: PreTrainedTokenizerBase, min_tokens: int, tokens: int
) -> Iterator[Tensor]:
    """Yield the token ids [T] of documents until they have ``tokens`` tokens, none of short documents."""
    documents = stream_documents(source.text, field=source.field, split=source.split)
    missing, read, longest = tokens, 0, 0
    # A token is rarely shorter than a character, so read at most one character per missing token.
    while batch := take(documents, min(CHARACTERS, missing)):
        for ids in tokenise(tokenizer, batch, first=first_token(tokenizer)):
            read, longest = read + 1, max(longest, len(ids))
            if len(ids) < min_tokens:
                continue
            yield ids
            missing -= len(ids)
            if missing <= 0:
                return
    if longest < min_tokens:
        raise RopepatchError(
            f"no document of {source.text} has {min_tokens} tokens: the longest of {read} has {longest}",
            hint="give longer documents, or a smaller min_tokens",
        )


def _identity(source: str) -> tuple[str, str | None]:
    """Return the name and the revision of a source; None if the Hub cannot be reached."""
    files = local_files(source)
    if files is not None:
        states = [
            (str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns)
            for file in files
        ]
        return str(Path(source).expanduser().resolve()), key_of(states)
    try:
        return source, HfApi().dataset_info(source.partition(":")[0], timeout=10).sha
    except Exception as error:  # e.g. offline: the latest entry may serve
        logger.debug("no revision of %s: %s", source, error)
        return source, None


def _entry(key: str, revision: str | None) -> str:
    """Return the key of a revision; if it is None, of the one that was cached last."""
    if revision is not None:
        return f"{key}-{revision[:24]}"
    # As `datasets` names them
    entries = (default_cache() / "generator").glob(f"*={key}-*/0.0.0")
    latest = max(entries, key=lambda folder: folder.stat().st_mtime, default=None)
    if latest is None:
        return f"{key}-unknown"
    logger.warning(
        "cannot check the revision on the Hub; using the cached one: %s", latest
    )
    return latest.parent.name.partition("=")[2]
