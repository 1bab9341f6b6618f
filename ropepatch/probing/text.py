"""The text of a fingerprint: drawn from a seed, the same on every machine, in a checkpoint's tokens."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ropepatch.data.tiny.grammar import SENTENCES
from ropepatch.errors import RopepatchError
from ropepatch.model.config import stock_code
from ropepatch.model.reading_file import FILE, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHORT = 8192  # tokens at most of a text whose ids are stored
# Share of unknown tokens above which the tokenizer does not fit the text
UNKNOWN = 0.05


def draw_source(
    tokenizer: PreTrainedTokenizerBase | None, vocabulary: int, length: int, seed: int
) -> Source:
    """Draw a text of ``length`` tokens: sentences, or random tokens if the tokenizer does not fit them."""
    ids = None if tokenizer is None else _tales(tokenizer, length, seed)
    if ids is None or max(ids) >= vocabulary:
        ids, kind = _tokens(vocabulary, length, seed), "tokens"
    else:
        kind = "tales"
    stored = {"ids": ids} if length <= SHORT else {}
    content = {"kind": kind, "seed": seed, "length": length, "sha256": digest(ids)}
    return Source.model_validate(content | stored)


def source_ids(
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None,
    vocabulary: int,
    name: str,
) -> list[int]:
    """Return the token ids of a text, and check them.

    Raises:
        RopepatchError: If the tokenizer is missing or is not the one that the fingerprint was made with.
    """
    if source.ids is not None:
        ids = source.ids
    elif source.kind == "tokens":
        ids = _tokens(vocabulary, source.length, source.seed)
    elif tokenizer is None:
        raise RopepatchError(
            f"{FILE} needs the tokenizer of {name}",
            hint="copy the tokenizer files into its folder",
        )
    else:
        ids = _tales(tokenizer, source.length, source.seed) or []
    if digest(ids) != source.sha256 or len(ids) != source.length:
        raise RopepatchError(
            f"{FILE} does not fit {name}: the tokenizer changed, or another version of ropepatch wrote it",
            hint="write it again with `ropepatch probe --save-reading`",
        )
    return ids


def digest(ids: Sequence[int]) -> str:
    """Return the sha256 of token ids."""
    return hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()


def _tokens(vocabulary: int, length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [int(draw.random() * vocabulary) for _ in range(length)]


def _tales(
    tokenizer: PreTrainedTokenizerBase, length: int, seed: int
) -> list[int] | None:
    """Return the first tokens of random sentences; None if the tokenizer does not know their words."""
    draw, sentences, ids = random.Random(seed), list[str](), list[int]()
    shares = [sentence.share for sentence in SENTENCES]
    while len(ids) < length:
        for _ in range(64 + length // 16):
            (sentence,) = draw.choices(SENTENCES, shares)
            value = draw.choice(sentence.values) if sentence.values else ""
            sentences.append(sentence.text.replace("{value}", value))
        # As servers tokenize a prompt, with the BOS token; verbose=False: no warning that it is long.
        try:
            with stock_code("tokenize the text of a fingerprint"):
                read = list(tokenizer(" ".join(sentences), verbose=False).input_ids)
        except RopepatchError:  # for instance, it lacks its own unknown token
            return None
        if len(read) <= len(ids):  # a tokenizer without a vocabulary
            return None
        ids = read
    unknown = tokenizer.unk_token_id
    text = ids[:length]
    return (
        None if unknown is not None and text.count(unknown) > UNKNOWN * length else text
    )
