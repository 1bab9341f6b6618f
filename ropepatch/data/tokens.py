"""The tokens of a source: its documents are read and split once, and kept on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from filelock import FileLock
from huggingface_hub import HfApi
from torch import Tensor

from ropepatch.data.sources import local_files, stream_documents
from ropepatch.data.texts import Texts, first_token, token_ids
from ropepatch.data.token_store import CHUNK, Reading, TokenStore, find, write
from ropepatch.errors import RopepatchError
from ropepatch.settings import relative_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


FORMAT = 1  # of an entry, and of how documents become tokens
CHARACTERS = 2**20  # of the texts that the tokenizer is given at one time; it splits them in parallel

logger = logging.getLogger(__name__)


def default_cache() -> Path:
    """``$ROPEPATCH_CACHE/tokens``, or else `tokens` in the user's cache folder, ``~/.cache/ropepatch``."""
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
    progress: Callable[[int], None] | None = None,
) -> TokenStore:
    """The first documents of a source that together have ``tokens`` tokens, or all if there are fewer.

    The source is read no further than that. A text becomes tokens as in `ropepatch.data.texts.windows`:
    after the beginning-of-sequence token, or the end-of-sequence token if there is no other, or nothing;
    token ids are taken as they are. What is read is kept. It serves again as long as the same are the
    tokenizer, the settings of the source, and the files, by their sizes and times, or the revision on the
    Hub; if the Hub does not say which it has, what was kept last serves. It serves who wants fewer tokens,
    too, and gives what reading anew would. Of several processes one reads, and the others wait for it.

    Args:
        source: The source; of its settings only the weight does not matter.
        tokenizer: The model's tokenizer.
        trained: The trained context of the model, in tokens, for a `min_tokens` relative to it.
        vocabulary: How many tokens the model knows.
        tokens: How many are wanted.
        cache: The folder of all entries; see `default_cache`.
        progress: Is told how many tokens have been read.

    Raises:
        RopepatchError: The source cannot be read, or all its rows are bad; no document is long enough; a
            token id is beyond the vocabulary; the disk does not take the tokens.
    """
    min_tokens = max(relative_length(source.min_tokens, trained), 1)
    name, revision = _identity(source.text)
    settings = (FORMAT, name, source.field, source.split, min_tokens)
    file = _entry(cache, (*settings, tokenizer_digest(tokenizer), first_token(tokenizer)), revision)
    store = find(file, tokens)
    if store is None:
        reading = Reading(source=source.text, revision=revision, min_tokens=min_tokens)
        documents = _read(source, tokenizer, vocabulary, tokens, progress, reading)
        with keeping(source.text, cache):
            store = _keep(file, documents, reading, tokens)
    _check_vocabulary(store, vocabulary)
    return store


@contextmanager
def keeping(source: str, cache: Path) -> Iterator[None]:
    """Say in one line that the disk does not take the tokens of a source.

    Raises:
        RopepatchError: It does not.
    """
    try:
        yield
    except (OSError, NotImplementedError) as error:  # the latter where files cannot be locked
        reason = getattr(error, "strerror", None) or error
        raise RopepatchError(
            f"cannot keep the tokens of {source} in {cache}: {reason}",
            hint="free some space, or set ROPEPATCH_CACHE to a folder on another disk",
        ) from error


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of all that decides how a tokenizer splits a text."""
    hashed = hashlib.sha256(type(tokenizer).__qualname__.encode())
    hashed.update(repr(getattr(tokenizer, "split_special_tokens", None)).encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        content |= {"truncation": None, "padding": None}  # what the last call has left there
        hashed.update(json.dumps(content, sort_keys=True).encode())
        return hashed.hexdigest()
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            hashed.update(file.name.encode() + file.read_bytes())
    return hashed.hexdigest()


def _read(
    source: Texts,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
    tokens: int,
    progress: Callable[[int], None] | None,
    reading: Reading,
) -> Iterator[Tensor]:
    """The token ids [T], int32, of one document after the other, until they are enough."""
    taken = count = longest = 0
    first = first_token(tokenizer)
    prefix = torch.tensor([] if first is None else [first], dtype=torch.long)
    documents = stream_documents(
        source.text, field=source.field, split=source.split, on_bad=reading.leave_out
    )
    # A token is seldom less than a character: no more characters are read than tokens are to go.
    while batch := _batch(documents, min(CHARACTERS, tokens - taken)):
        for document, ids in zip(batch, token_ids(tokenizer, batch, bos=False), strict=True):
            ids = torch.cat([prefix, ids]) if isinstance(document, str) else ids
            longest = max(longest, len(ids))
            if len(ids) < reading.min_tokens:
                reading.short += 1
                continue
            if ids.max() >= vocabulary:
                raise _beyond(source.text, count, int(ids[ids >= vocabulary][0]), vocabulary)
            yield ids.int()
            taken, count = taken + len(ids), count + 1
            if taken >= tokens:
                break
        if progress is not None:
            progress(taken)
    reading.complete = taken < tokens
    if not count:
        raise RopepatchError(
            f"no document of {source.text} has {reading.min_tokens} tokens: the longest of {reading.short} "
            f"has {longest}",
            hint="give longer documents, or a smaller min_tokens",
        )


def _batch(documents: Iterator[str | list[int]], size: int) -> list[str | list[int]]:
    """Documents until they have so many characters or tokens, the first token of each text included."""
    batch: list[str | list[int]] = []
    while size > 0 and (document := next(documents, None)) is not None:
        batch.append(document)
        size -= 1 + len(document)
    return batch


def _beyond(source: str, document: int, token: int, vocabulary: int) -> RopepatchError:
    return RopepatchError(
        f"{source}: document {document} of those taken holds token id {token}, expected 0 to "
        f"{vocabulary - 1}",
        hint="use the tokenizer, or the tokenised set, that belongs to the model",
    )


def _identity(source: str) -> tuple[str, str | None]:
    """What names a source, and what changes when the source does; None if the Hub does not say."""
    files = local_files(source)
    if files is not None:
        states = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return str(Path(source).expanduser().resolve()), hashlib.sha256(repr(states).encode()).hexdigest()
    try:
        return source, HfApi().dataset_info(source.partition(":")[0], timeout=10).sha
    except Exception as error:  # of httpx and of the Hub, or that we are offline: the latest entry may serve
        logger.debug("no revision of %s: %s", source, error)
        return source, None


def _entry(cache: Path, decisive: tuple[object, ...], revision: str | None) -> Path:
    key = hashlib.sha256(repr(decisive).encode()).hexdigest()[:24]
    if revision is not None:
        return cache / f"{key}-{revision[:24]}.safetensors"
    earlier = max(cache.glob(f"{key}-*.safetensors"), key=lambda file: file.stat().st_mtime, default=None)
    if earlier is None:
        return cache / f"{key}-unknown.safetensors"
    logger.warning("the Hub does not say which revision it has; using what was read before: %s", earlier)
    return earlier


def _keep(file: Path, documents: Iterator[Tensor], reading: Reading, tokens: int) -> TokenStore:
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_name(f".{file.name}.lock")):
        if store := find(file, tokens):  # another process was first
            return store
        for dead in file.parent.glob(f".{file.name}.*.partial"):
            dead.unlink()
        write(file, documents, reading)
        store = find(file, tokens)
    if store is None:
        raise RopepatchError(f"{file} does not hold what was just written to it", hint="check the disk")
    return store


def _check_vocabulary(store: TokenStore, vocabulary: int) -> None:
    for number, chunk in enumerate(torch.split(store.tokens, CHUNK)):
        if chunk.max() >= vocabulary:
            place = number * CHUNK + int((chunk >= vocabulary).nonzero()[0])
            document = int(torch.searchsorted(store.starts, place, right=True)) - 1
            raise _beyond(store.reading.source, document, int(store.tokens[place]), vocabulary)
