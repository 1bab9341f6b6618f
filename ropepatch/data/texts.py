"""Tokenise documents, cut them into windows, and hash their tokens.

Shapes: T tokens of a document.
"""

from __future__ import annotations

import hashlib
import logging
import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor

from ropepatch.data.sources import check_document, stream_documents
from ropepatch.errors import RopepatchError
from ropepatch.settings import Amount, Length, Settings, Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS = 2**20  # of texts per call of the tokenizer, which splits them in parallel
PIECE = 2**18  # characters of a long text per call; each takes some hundred bytes
# Where to cut a long text
LINE, WORD = (re.compile(r"(?<=\S\n)(?=\S)"), re.compile(r"(?<=\S)(?= \S)"))
# The label of a token without a loss, as in torch and transformers
IGNORED = -100
ANCHOR = "\n"  # precedes a piece, and absorbs the space that some tokenizers insert before a text

Bos = Literal["window", "document", "none"]  # where beginning-of-sequence tokens stand
TextOrIds = str | Sequence[int] | Tensor
AnyDocument = TypeVar("AnyDocument", bound=TextOrIds)

logger = logging.getLogger(__name__)


class Texts(Settings):
    """A source of documents.

    Args:
        text: A file, a folder, a `datasets` id or a saved dataset.
        field: The column or key of a document's text, or of its token ids.
        split: The split of a `datasets` id or a saved dataset.
        min_tokens: Shorter documents are skipped.
        weight: Share of the batches, relative to the other sources.
    """

    text: Text
    field: Text = "text"
    split: Text = "train"
    min_tokens: Length = 1
    weight: Amount = 1.0


def stream_texts(
    source: str | Path, *, field: str = "text", split: str = "test"
) -> Iterator[str]:
    """Stream the texts of a source; see `stream_documents`."""
    for document in stream_documents(source, field=field, split=split):
        if not isinstance(document, str):
            raise RopepatchError(
                f"{source} holds token ids, expected texts", hint="give a text file"
            )
        yield document


def token_ids(
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Iterable[TextOrIds],
    *,
    bos: bool = True,
    length: int | None = None,
) -> list[Tensor]:
    """Return the token ids [T] of each document, on the CPU.

    A text is tokenised without special tokens; with ``bos``, the tokenizer's beginning-of-sequence token
    precedes it, if there is one. Token ids stay unchanged. A long text is cut at line breaks, so a few tokens
    around the cuts may differ from those of the uncut text. With ``length``, tokenisation stops after that
    many tokens.
    """
    first = _bos(tokenizer) if bos else None
    return list(tokenise(tokenizer, documents, first=first, length=length))


def first_documents(
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Iterable[TextOrIds],
    *,
    length: int,
    count: int,
    bos: bool = True,
) -> list[Tensor]:
    """Return the first ``count`` documents that are long enough, each cut to its first ``length`` tokens.

    Reads no document after the last one returned. Logs a warning if there are fewer than ``count``. The other
    arguments are those of `token_ids`.
    """
    longest, read, taken = 0, 0, list[Tensor]()
    first = _bos(tokenizer) if bos else None
    for ids in tokenise(tokenizer, documents, first=first, characters=1, length=length):
        longest, read = max(longest, len(ids)), read + 1
        if len(ids) >= length:
            taken.append(ids[:length].clone())  # a view would keep the whole document
        if len(taken) == count:
            return taken
    if not taken:
        raise RopepatchError(
            f"no document has {length} tokens: the longest of {read} has {longest}",
            hint="give longer documents, or shorter lengths",
        )
    logger.warning(
        "only %d of %d documents have %d tokens, wanted %d",
        len(taken),
        read,
        length,
        count,
    )
    return taken


def cut_windows(
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Iterable[TextOrIds],
    *,
    length: int,
    count: int | None,
    bos: Bos = "document",
) -> list[tuple[int, list[int]]]:
    """Cut windows of exactly ``length`` tokens from the documents joined into one stream.

    The tokenizer's beginning-of-sequence token precedes each text, or else its end-of-sequence token, if it
    has either. Token ids stay unchanged. Windows begin and end anywhere; the rest of the stream is dropped.
    All documents are read, and their token ids kept in memory at 8 bytes each, to spread windows evenly.
    `first_documents` stops as soon as it has enough.

    Args:
        tokenizer: None if all documents are token ids.
        documents: Texts or token ids, in the order in which they are joined.
        length: Tokens per window.
        count: The largest number of windows, spread evenly over the stream; None for all.
        bos: `window` also begins every window with the beginning-of-sequence token, see `begun`; `none` puts
            no such token anywhere, but an end-of-sequence token between documents.

    Returns:
        For each window, the index of the document in which it begins, and its token ids.
    """
    stream, ends = array("q"), array("q")
    for ids in tokenise(tokenizer, documents, first=first_token(tokenizer, bos)):
        stream.frombytes(ids.long().numpy().tobytes())
        ends.append(len(stream))
    available = len(stream) // length
    if not available:
        raise RopepatchError(
            f"the text is too short for a window of {length} tokens: it has {len(stream)}",
            hint="give more text, or shorter lengths",
        )
    wanted = min(count or available, available)
    begins = [index * available // wanted * length for index in range(wanted)]
    first = _bos(tokenizer) if bos == "window" else None
    cut = []
    for begin in begins:
        ids = begun(torch.tensor(stream[begin : begin + length]), first)
        cut.append((bisect_right(ends, begin), ids.tolist()))
    return cut


def begun(ids: Tensor, first: int | None) -> Tensor:
    """Return a window [T] that begins with the token ``first``, else put it there and drop the last token."""
    if first is None or int(ids[0]) == first:
        return ids
    return torch.cat([ids.new_tensor([first]), ids[:-1]])


def text_digest(texts: Iterable[str]) -> str:
    """Return the SHA-256 of texts in their order, in hexadecimal."""
    hashed = hashlib.sha256()
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        hashed.update(struct.pack("<q", len(content)))
        hashed.update(content)
    return hashed.hexdigest()


def digest(documents: Iterable[Sequence[int] | Tensor]) -> str:
    """Return the SHA-256 of the token ids of documents in their order, in hexadecimal.

    It hashes each document's length and then its token ids as little-endian 64-bit integers.
    """
    hashed = hashlib.sha256()
    for document in documents:
        ids = torch.as_tensor(document).tolist()
        hashed.update(struct.pack(f"<{len(ids) + 1}q", len(ids), *ids))
    return hashed.hexdigest()


def first_token(
    tokenizer: PreTrainedTokenizerBase | None, bos: Bos = "document"
) -> int | None:
    """Return the token before each text of a stream: beginning of sequence, else end, else None."""
    if tokenizer is None:
        return None
    first: int | None = tokenizer.bos_token_id
    end: int | None = tokenizer.eos_token_id
    if bos == "none":
        return None if end == first else end
    return end if first is None else first


def tokenise(
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Iterable[TextOrIds],
    *,
    first: int | None,
    characters: int = CHARACTERS,
    length: int | None = None,
) -> Iterator[Tensor]:
    """Yield the token ids [T] of documents as `token_ids` does, after the token ``first``.

    Texts are tokenised in parallel, in batches of ``characters`` characters.
    """
    if isinstance(documents, str):
        raise RopepatchError(
            "documents must be a list of documents, got one text", hint="pass [text]"
        )
    checked = (
        check_document(document, index) for index, document in enumerate(documents)
    )
    while batch := take(checked, characters):
        short = [text for text in batch if isinstance(text, str) and len(text) <= PIECE]
        encoded = iter(encode(tokenizer, short))
        for document in batch:
            if isinstance(document, Tensor):
                yield document
                continue
            is_long = len(document) > PIECE
            pieces = _long(tokenizer, document) if is_long else [next(encoded)]
            ids = array("q", [] if first is None else [first])
            for piece in pieces:
                ids.extend(piece)
                if length is not None and len(ids) >= length:
                    break
            yield torch.tensor(ids, dtype=torch.long)


def take(documents: Iterator[AnyDocument], characters: int) -> list[AnyDocument]:
    """Take documents until they have that many characters or token ids, plus one each."""
    taken: list[AnyDocument] = []
    while characters > 0 and (document := next(documents, None)) is not None:
        taken.append(document)
        characters -= 1 + len(document)
    return taken


def _long(tokenizer: PreTrainedTokenizerBase | None, text: str) -> Iterator[list[int]]:
    """Yield token ids of a long text piece by piece, without the space that some tokenizers insert."""
    (anchor,) = encode(tokenizer, [ANCHOR])
    begin = 0
    while begin < len(text):
        near, far = begin + PIECE, begin + 2 * PIECE
        cut = LINE.search(text, near, far) or WORD.search(text, near, far)
        end = cut.start() if cut else far
        piece = text[begin:end]
        (ids,) = encode(tokenizer, [ANCHOR + piece if begin else piece])
        if begin and ids[: len(anchor)] == anchor:
            ids = ids[len(anchor) :]
        elif begin:
            (ids,) = encode(tokenizer, [piece])
        yield ids
        begin = end


def encode(
    tokenizer: PreTrainedTokenizerBase | None, texts: list[str]
) -> list[list[int]]:
    """Return the token ids of each text, without special tokens."""
    if not texts:
        return []
    if tokenizer is None:
        raise RopepatchError(
            "documents are text, but tokenizer is None",
            hint="pass the model's tokenizer",
        )
    try:  # verbose=False: no warning about texts longer than model_max_length
        encoded = tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
    except Exception as error:  # a custom tokenizer may raise anything
        reason = shorten(f"{type(error).__name__}: {error}", 300)
        raise RopepatchError(
            f"the tokenizer cannot split a text: {reason}",
            hint="copy the tokenizer's files again",
        ) from error
    return [list(ids) for ids in encoded["input_ids"]]


def _bos(tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    return tokenizer.bos_token_id if tokenizer is not None else None
