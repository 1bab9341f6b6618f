"""Tokenised sources, cached on disk.

An entry of the cache is a folder. ``tokens.bin`` contains the concatenated token ids of all documents, int32
[N]. ``meta.json`` contains the length of each document, and how the source was read. An entry only grows at
its end, and ``tokens.bin`` is replaced first, so an older ``meta.json`` is valid for newer tokens.

Shapes: N tokens, D documents.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from filelock import FileLock
from huggingface_hub import HfApi
from torch import Tensor

from ropepatch.data.sources import local_files, stream_documents
from ropepatch.data.texts import CHARACTERS, Texts, first_token, take, tokenise
from ropepatch.errors import RopepatchError, printable
from ropepatch.files import whole_file, write_json
from ropepatch.settings import key_of, relative_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 2  # version of entries and of the tokenisation
TOKENS, META = "tokens.bin", "meta.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """How a source was read."""

    source: str  # a path or an id
    min_tokens: int  # shorter documents were dropped
    short: int  # number of dropped documents
    complete: bool  # whether the source was read to its end


@dataclass(frozen=True, eq=False)
class TokenStore:
    """The documents of an entry up to a number of tokens; pickling stores only the path and the number."""

    folder: Path
    tokens: Tensor  # of all documents, int32 [N], mapped from the file
    starts: Tensor  # of each document, and the end of the last, int64 [D + 1]
    reading: Reading

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the tokens and the lengths of the documents."""
        hashed = hashlib.sha256(self.tokens.numpy().data)
        hashed.update(self.starts.diff().int().numpy().data)
        return hashed.hexdigest()

    @property
    def report(self) -> str:
        """One line with the numbers of documents, tokens and dropped short documents."""
        there = f"{amount(len(self.starts) - 1)} documents, {amount(len(self.tokens))} tokens"
        if not self.reading.short:
            return there
        return f"{there}; {amount(self.reading.short)} shorter than {self.reading.min_tokens} tokens left out"

    def first(self, tokens: int) -> TokenStore:
        """Return the first documents that together have that many tokens, or all if there are fewer."""
        count = min(int(torch.searchsorted(self.starts, tokens)), len(self.starts) - 1)
        return replace(self, tokens=self.tokens[: self.starts[count]], starts=self.starts[: count + 1])

    def piece(self, begin: int, end: int) -> tuple[Tensor, tuple[int, ...]]:
        """Return token ids, int64 [end - begin], and the number of them from each document."""
        first, last = torch.searchsorted(self.starts, torch.tensor([begin + 1, end])).tolist()
        cuts = [begin, *self.starts[first:last].tolist(), end]
        lengths = tuple(after - before for before, after in pairwise(cuts))
        return self.tokens[begin:end].long(), lengths

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.folder, len(self))


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
) -> TokenStore:
    """Return the first documents of a source that together have ``tokens`` tokens, or all if there are fewer.

    The source is read no further. Texts are tokenised as in `cut_windows`: after the beginning-of-sequence
    token, else the end-of-sequence token, else nothing. Token ids stay unchanged. The cache key consists of
    the tokenizer, the settings of the source, and the sizes and times of its files or its revision on the
    Hub. If the Hub cannot be reached, the latest entry is used. An entry also serves requests for fewer
    tokens, with identical tokens. If several processes need an entry, one writes it and the others wait.
    `min_tokens` may be relative to the original context length, ``trained``; see also `default_cache`.
    """
    min_tokens = max(relative_length(source.min_tokens, trained), 1)
    name, revision = _identity(source.text)
    settings = (FORMAT, name, source.field, source.split, min_tokens)
    folder = _entry(cache, (*settings, tokenizer_digest(tokenizer), first_token(tokenizer)), revision)
    store = find(folder, tokens)
    if store is None:
        with writing(folder, source.text):
            store = find(folder, tokens) or write(  # another process may have been first
                folder,
                _read(source, tokenizer, min_tokens, vocabulary, tokens),
                source=source.text,
                min_tokens=min_tokens,
                tokens=tokens,
            )
    store = store.first(tokens)
    _check_vocabulary(store.tokens, vocabulary, source.text)
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


@contextmanager
def writing(folder: Path, source: str) -> Iterator[None]:
    """Hold the lock of an entry."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            yield
    except (OSError, NotImplementedError) as error:  # NotImplementedError if files cannot be locked
        reason = getattr(error, "strerror", None) or error
        raise RopepatchError(
            f"cannot cache the tokens of {source} in {folder.parent}: {reason}",
            hint="free some space, or set ROPEPATCH_CACHE to a folder on another disk",
        ) from error


def write(
    folder: Path,
    documents: Iterable[Tensor],
    *,
    source: str,
    min_tokens: int = 1,
    tokens: int | None = None,
) -> TokenStore:
    """Stream documents into an entry, up to ``tokens`` tokens; if interrupted, the earlier entry stays.

    The caller holds the lock of its folder. Documents shorter than ``min_tokens`` are dropped.
    """
    lengths, taken, short, longest = array("i"), 0, 0, 0
    with whole_file(folder / TOKENS) as partial, partial.open("wb") as out:
        for ids in documents:
            if len(ids) < min_tokens:
                short, longest = short + 1, max(longest, len(ids))
                continue
            out.write(ids.int().numpy().data)
            lengths.append(len(ids))
            taken += len(ids)
            if tokens is not None and taken >= tokens:
                break
        if not lengths:
            raise RopepatchError(
                f"no document of {source} has {min_tokens} tokens: the longest of {short} has {longest}",
                hint="give longer documents, or a smaller min_tokens",
            )
    complete = tokens is None or taken < tokens
    reading = Reading(source, min_tokens, short, complete)
    with whole_file(folder / META) as partial:
        write_json(partial, asdict(reading) | {"lengths": lengths.tolist()}, indent=None)
    return _mapped(folder)


def append(folder: Path, documents: Sequence[Tensor], *, source: str) -> TokenStore:
    """Add documents to an entry, or start one; if interrupted, the earlier entry stays.

    The caller holds the lock of its folder.
    """
    before = find(folder, 1)
    lengths = [] if before is None else before.starts.diff().tolist()
    with (folder / TOKENS).open("ab") as out:
        out.truncate(4 * sum(lengths))  # drop what an interrupted call added
        out.write(torch.cat([ids.int() for ids in documents]).numpy().data)
    reading = Reading(source, min_tokens=1, short=0, complete=False)
    with whole_file(folder / META) as partial:
        write_json(partial, asdict(reading) | {"lengths": lengths + list(map(len, documents))}, indent=None)
    return _mapped(folder)


def find(folder: Path, tokens: int) -> TokenStore | None:
    """Return an entry if it has that many tokens, or all of its source.

    None if the entry is missing, has too few tokens, or is damaged, which logs a warning.
    """
    if not (folder / META).exists():
        return None
    try:
        store = _mapped(folder)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        logger.warning("%s is damaged (%s); tokenising its source again", printable(str(folder)), error)
        return None
    return store if len(store) >= tokens or store.reading.complete else None


def amount(count: int) -> str:
    """Format a count: 5.1 M, or 1,204."""
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count:,}"


def _mapped(folder: Path) -> TokenStore:
    meta = dict(json.loads((folder / META).read_text(encoding="utf-8")))
    ends = torch.tensor(meta.pop("lengths"), dtype=torch.long).cumsum(0)
    # Copy on write only because torch warns about read-only memory.
    tokens = np.memmap(folder / TOKENS, dtype=np.int32, mode="c", shape=(int(ends[-1]),))
    starts = torch.cat([torch.zeros(1, dtype=torch.long), ends])
    return TokenStore(folder, torch.from_numpy(tokens), starts, Reading(**meta))


def _reopened(folder: Path, tokens: int) -> TokenStore:
    return _mapped(folder).first(tokens)


def _read(
    source: Texts, tokenizer: PreTrainedTokenizerBase, min_tokens: int, vocabulary: int, tokens: int
) -> Iterator[Tensor]:
    """Yield the token ids [T] of documents until those that are long enough have ``tokens`` tokens."""
    documents, taken = stream_documents(source.text, field=source.field, split=source.split), 0
    # A token is rarely shorter than a character, so read at most one character per missing token.
    while batch := take(documents, min(CHARACTERS, tokens - taken)):
        for ids in tokenise(tokenizer, batch, first=first_token(tokenizer)):
            if len(ids) >= min_tokens:
                _check_vocabulary(ids, vocabulary, source.text)
                taken += len(ids)
            yield ids


def _check_vocabulary(ids: Tensor, vocabulary: int, source: str) -> None:
    if ids.max() >= vocabulary:
        raise RopepatchError(
            f"{source} holds token id {int(ids.max())}, expected 0 to {vocabulary - 1}",
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


def _entry(cache: Path, decisive: tuple[object, ...], revision: str | None) -> Path:
    key = key_of(decisive)[:24]
    if revision is not None:
        return cache / f"{key}-{revision[:24]}"
    earlier = max(cache.glob(f"{key}-*/{META}"), key=lambda file: file.stat().st_mtime, default=None)
    if earlier is None:
        return cache / f"{key}-unknown"
    logger.warning("cannot check the revision on the Hub; using the cached one: %s", earlier)
    return earlier.parent
