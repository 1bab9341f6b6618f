"""Text files to documents, documents to token ids and to windows of them."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

SEPARATOR = "<|endoftext|>"


def read_documents(path: Path) -> list[str]:
    """The documents of a text file, or of every ``*.txt`` below a folder in sorted order.

    A file is split at every ``<|endoftext|>``; white space around documents and empty documents are dropped.

    Raises:
        RopepatchError: Nothing at ``path``, a file that is not UTF-8, or no text at all.
    """
    expected = "give a text file or a folder of *.txt files"
    if not path.exists():
        raise RopepatchError(f"no such file or folder: {path}", hint=expected)
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    parts = [part.strip() for file in files for part in _read(file).split(SEPARATOR)]
    if not any(parts):
        raise RopepatchError(f"no text in {path}: all of {len(files)} text files are empty", hint=expected)
    return [part for part in parts if part]


def token_ids(
    tokenizer: PreTrainedTokenizerBase | None, documents: Sequence[str | Sequence[int] | Tensor]
) -> list[Tensor]:
    """Token ids [T] of each document, on the CPU.

    A text is split without special tokens and preceded by the tokenizer's beginning-of-sequence token, if
    any; token ids are taken as they are.

    Raises:
        RopepatchError: A bare text in place of documents, or a text without a tokenizer.
    """
    if isinstance(documents, str):
        raise RopepatchError("documents must be a list of documents, got one text", hint="pass [text]")
    texts = [document for document in documents if isinstance(document, str)]
    if texts and tokenizer is None:
        raise RopepatchError("documents are text, but tokenizer is None", hint="pass the model's tokenizer")
    encoded = iter(_encode(tokenizer, texts) if tokenizer else ())
    bos = tokenizer.bos_token_id if tokenizer else None
    prefix = [] if bos is None else [bos]
    return [
        torch.tensor(prefix + next(encoded)) if isinstance(document, str) else torch.as_tensor(document).cpu()
        for document in documents
    ]


def windows(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], *, length: int, count: int | None
) -> list[list[int]]:
    """Windows of exactly ``length`` tokens cut from the documents joined into one stream.

    Each document is preceded by the tokenizer's beginning-of-sequence token, or by its end-of-sequence token
    if it has no other, or by nothing. Windows begin and end anywhere; the rest of the stream is dropped.

    Args:
        tokenizer: Splits the texts; adds no special tokens of its own and truncates nothing.
        documents: Texts, in the order in which they are joined.
        length: Tokens per window.
        count: At most so many windows, spread evenly over the stream; None for all of them.

    Raises:
        RopepatchError: The texts have fewer than ``length`` tokens.
    """
    if length < 1 or (count is not None and count < 1):
        raise RopepatchError(f"length and count must be at least 1, got length {length}, count {count}")
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    prefix = [] if first is None else [first]
    stream = list(chain.from_iterable(prefix + ids for ids in _encode(tokenizer, documents)))
    available = len(stream) // length
    if not available:
        raise RopepatchError(
            f"the text is too short for a window of {length} tokens: it has {len(stream)}",
            hint="give more text, or shorter lengths",
        )
    wanted = min(count or available, available)
    begins = [index * available // wanted * length for index in range(wanted)]
    return [stream[begin : begin + length] for begin in begins]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    if not texts:
        return []
    # verbose=False: no warning about texts longer than model_max_length, which are what we are here for.
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [list(ids) for ids in encoded["input_ids"]]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise RopepatchError(
            f"{file} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset {error.start}",
            hint=f"convert it, e.g. iconv -f latin1 -t utf-8 {file.name}",
        ) from error
