"""Documents to token ids, to windows of them, and to a hash that says which they were."""

from __future__ import annotations

import hashlib
import logging
import reprlib
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropepatch.data.pieces import Divider
from ropepatch.data.sources import HALF_A_PAIR, stream_documents
from ropepatch.errors import RopepatchError
from ropepatch.settings import Amount, Length, Settings, Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AT_ONCE = 64  # texts that the tokenizer is given at one time; it splits them in parallel
CHARACTERS = 2**20  # of these texts
LONGEST_PATH = 4096

TextOrIds = str | Sequence[int] | Tensor
Part = tuple[int, str | Tensor | None, bool]  # of which document, what, and whether it is its first text

logger = logging.getLogger(__name__)


class Texts(Settings):
    """A source of documents.

    Args:
        text: A file, a folder, a `datasets` id or a saved set.
        field: The column or key of a document's text, or of its token ids.
        split: The split of a `datasets` id or a saved set.
        min_tokens: Documents with fewer are left out.
        weight: Its share of the batches, relative to the other sources.
    """

    text: Text
    field: Text = "text"
    split: Text = "train"
    min_tokens: Length = 1
    weight: Amount = 1.0


def read_documents(path: Path) -> list[str]:
    """All texts of a file or folder, in memory; see `stream_documents`.

    Raises:
        RopepatchError: Nothing at ``path``, no text at all, bytes that are not UTF-8, or token ids.
    """
    documents = list(stream_documents(path))
    texts = [document for document in documents if isinstance(document, str)]
    if len(texts) < len(documents):
        raise RopepatchError(f"{path} holds token ids, expected texts", hint="give a text file")
    return texts


def token_ids(
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Iterable[TextOrIds],
    *,
    bos: bool = True,
    length: int | None = None,
) -> list[Tensor]:
    """Token ids [T] of each document, on the CPU.

    A text is split without special tokens and, with ``bos``, preceded by the tokenizer's
    beginning-of-sequence token, if it has one; token ids are taken as they are. A long text is split in
    pieces, which give the same tokens, and with ``length`` not much farther than to so many of them.

    Raises:
        RopepatchError: A bare text in place of documents, a text without a tokenizer, one that has no Unicode
            form, or one so long without a space that it cannot be split in pieces.
    """
    return list(_split(tokenizer, documents, _bos(tokenizer) if bos else None, AT_ONCE, length))


def first_documents(
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Iterable[TextOrIds],
    *,
    length: int,
    count: int | None,
    bos: bool = True,
) -> list[Tensor]:
    """The first documents that are long enough, each cut to its first ``length`` tokens.

    Reads no document beyond the last that it takes. Fewer than ``count`` are logged as a warning.

    Args:
        tokenizer: Splits texts, as in `token_ids`; None if all documents are token ids.
        documents: Texts or token ids; may be a stream.
        length: Tokens of each, the beginning-of-sequence token included.
        count: At most so many; None for all that are long enough.
        bos: Whether a text is preceded by the beginning-of-sequence token.

    Raises:
        RopepatchError: No document is long enough.
    """
    _check_cut(length, count)
    longest, read, taken = 0, 0, list[Tensor]()
    for ids in _split(tokenizer, documents, _bos(tokenizer) if bos else None, 1, length):
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
    if count is not None:
        logger.warning("only %d of %d documents have %d tokens, wanted %d", len(taken), read, length, count)
    return taken


def windows(
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Iterable[TextOrIds],
    *,
    length: int,
    count: int | None,
) -> list[list[int]]:
    """Windows of exactly ``length`` tokens of the documents, joined into one stream; see `cut_windows`."""
    return [ids for _, ids in cut_windows(tokenizer, documents, length=length, count=count)]


def cut_windows(
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Iterable[TextOrIds],
    *,
    length: int,
    count: int | None,
) -> list[tuple[int, list[int]]]:
    """Windows of exactly ``length`` tokens cut from the documents joined into one stream.

    Each text is preceded by the tokenizer's beginning-of-sequence token, or by its end-of-sequence token if
    it has no other, or by nothing; token ids are taken as they are. Windows begin and end anywhere; the rest
    of the stream is dropped. To spread windows takes the length of the stream: all documents are read, and
    their token ids, 8 bytes each, are held in memory. `first_documents` stops as soon as it has enough.

    Args:
        tokenizer: Splits the texts; adds no special tokens of its own and truncates nothing. None if all
            documents are token ids.
        documents: Texts or token ids, in the order in which they are joined.
        length: Tokens per window.
        count: At most so many windows, spread evenly over the stream; None for all of them.

    Returns:
        Of each window the index of the document in which it begins, and its token ids.

    Raises:
        RopepatchError: The documents have fewer than ``length`` tokens.
    """
    _check_cut(length, count)
    stream, ends = array("q"), array("q")
    for ids in _parts(tokenizer, documents, first_token(tokenizer), AT_ONCE):
        if ids is None:
            ends.append(len(stream))
        else:
            stream.extend(ids.tolist())
    available = len(stream) // length
    if not available:
        raise RopepatchError(
            f"the text is too short for a window of {length} tokens: it has {len(stream)}",
            hint="give more text, or shorter lengths",
        )
    wanted = min(count or available, available)
    begins = [index * available // wanted * length for index in range(wanted)]
    return [(bisect_right(ends, begin), stream[begin : begin + length].tolist()) for begin in begins]


def digest(documents: Iterable[Sequence[int] | Tensor]) -> str:
    """SHA-256 over the token ids of documents in their order, as a hexadecimal number.

    Hashed are, as little-endian 64-bit integers, each document's length and then its token ids.
    """
    hashed = hashlib.sha256()
    for document in documents:
        ids = torch.as_tensor(document).tolist()
        hashed.update(struct.pack(f"<{len(ids) + 1}q", len(ids), *ids))
    return hashed.hexdigest()


def _check_cut(length: int, count: int | None) -> None:
    if length < 1 or (count is not None and count < 1):
        raise RopepatchError(f"length and count must be at least 1, got length {length}, count {count}")


def first_token(tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """The token before each text of a stream: beginning of sequence, else end of sequence, else none."""
    first = _bos(tokenizer)
    return tokenizer.eos_token_id if tokenizer is not None and first is None else first


def _bos(tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    return tokenizer.bos_token_id if tokenizer is not None else None


def _split(
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Iterable[TextOrIds],
    first: int | None,
    at_once: int,
    length: int | None = None,
) -> Iterator[Tensor]:
    """Token ids of each document; of a text after the token ``first``."""
    parts = []
    for part in _parts(tokenizer, documents, first, at_once, length):
        if part is not None:
            parts.append(part)
        else:
            yield parts[0] if len(parts) == 1 else torch.cat(parts)
            parts = []


def _parts(
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Iterable[TextOrIds],
    first: int | None,
    at_once: int,
    length: int | None = None,
) -> Iterator[Tensor | None]:
    """Token ids, some at a time, and None at the end of each document.

    Holds ``at_once`` documents, or `CHARACTERS` of texts. A text with ``length`` tokens is read no farther.
    """
    if isinstance(documents, str):
        raise RopepatchError("documents must be a list of documents, got one text", hint="pass [text]")
    divider = None if tokenizer is None else Divider(tokenizer)
    latest, tokens = -1, 0  # of the document that was split last

    def texts() -> Iterator[Part]:
        for index, document in enumerate(documents):
            if not isinstance(document, str):
                yield index, _given_ids(document, index), False
            elif divider is None:
                what = "documents are text, but tokenizer is None"
                raise RopepatchError(what, hint="pass the model's tokenizer")
            else:
                _check_text(document, index)
                for number, piece in enumerate(divider.pieces(document)):
                    if number and latest == index and length is not None and tokens >= length:
                        break
                    yield index, piece, number == 0
            yield index, None, False

    remaining = texts()
    while batch := _batch(remaining, at_once):
        encoded = _encode(tokenizer, [piece for _, piece, _ in batch if isinstance(piece, str)])
        for index, piece, begins in batch:
            if not isinstance(piece, str):
                yield piece
                continue
            ids = ([first] if begins and first is not None else []) + next(encoded)
            latest, tokens = index, len(ids) + (tokens if index == latest else 0)
            yield torch.tensor(ids, dtype=torch.long)


def _check_text(text: str, index: int) -> None:
    """Refuse what is no text that a tokenizer takes, and the name of a file in the place of the first.

    Any later one is a line of the text, whatever files are here.
    """
    if half := HALF_A_PAIR.search(text):
        raise RopepatchError(
            f"documents[{index}] holds half a character, {half[0]!r}, at {half.start()}",
            hint="read it as UTF-8; .encode(errors='replace') finds a stand-in",
        )
    if index == 0 and len(text) < LONGEST_PATH and "\n" not in text:
        with suppress(OSError, ValueError):  # too long for a name, or with a NUL
            if Path(text).is_file():
                raise RopepatchError(
                    f"documents[{index}] is the name of a file, {text!r}: documents are texts",
                    hint="pass what it holds: [Path(name).read_text()]",
                )


def _given_ids(document: Sequence[int] | Tensor, index: int) -> Tensor:
    try:
        return torch.as_tensor(document).cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RopepatchError(
            f"documents[{index}] must be a text or a list of token ids, got {reprlib.repr(document)}",
            hint="leave out what is empty",
        ) from error


def _batch(texts: Iterator[Part], documents: int) -> list[Part]:
    """So many documents to their ends, or texts of `CHARACTERS`."""
    batch, size = list[Part](), 0
    while documents > 0 and size < CHARACTERS and (text := next(texts, None)) is not None:
        batch.append(text)
        size += len(text[1]) if isinstance(text[1], str) else 0
        documents -= text[1] is None
    return batch


def _encode(tokenizer: PreTrainedTokenizerBase | None, texts: list[str]) -> Iterator[list[int]]:
    if tokenizer is None or not texts:
        return iter(())
    # verbose=False: no warning about texts longer than model_max_length, which are what we are here for.
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return map(list, encoded["input_ids"])
