"""The text of a reading: drawn from a seed, the same on every machine, in the tokens of a checkpoint."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ropepatch.data.tiny.grammar import SENTENCES
from ropepatch.errors import RopepatchError
from ropepatch.model.reading_file import FILE, Source
from ropepatch.model.stock import stock_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHORT = 8192  # tokens at most of a text whose ids are stored
UNKNOWN = 0.05  # share of unknown tokens from which on the tokenizer cannot write the text


def draw_source(tokenizer: PreTrainedTokenizerBase | None, vocabulary: int, length: int, seed: int) -> Source:
    """Draw a text of so many tokens: sentences, or random tokens where the tokenizer cannot write them."""
    ids = None if tokenizer is None else _tales(tokenizer, length, seed)
    if ids is None or max(ids) >= vocabulary:
        ids, kind = _tokens(vocabulary, length, seed), "tokens"
    else:
        kind = "tales"
    stored = {"ids": ids} if length <= SHORT else {}
    content = {"kind": kind, "seed": seed, "length": length, "sha256": digest(ids)}
    return Source.model_validate(content | stored)


def source_ids(
    source: Source, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int, name: str
) -> list[int]:
    """The token ids of a text."""
    if source.ids is not None:
        ids = source.ids
    elif source.kind == "tokens":
        ids = _tokens(vocabulary, source.length, source.seed)
    elif tokenizer is None:
        raise RopepatchError(f"the text of {FILE} needs the tokenizer of {name}", hint="put it beside it")
    else:
        ids = _tales(tokenizer, source.length, source.seed) or []
    if digest(ids) != source.sha256 or len(ids) != source.length:
        raise RopepatchError(
            f"the text of {FILE} cannot be drawn again: {name} has another tokenizer by now, or {FILE} was "
            "written by another version of ropepatch",
            hint="`ropepatch probe --save-reading` writes it again",
        )
    return ids


def digest(ids: Sequence[int]) -> str:
    """The sha256 of token ids."""
    return hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()


def _tokens(vocabulary: int, length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [int(draw.random() * vocabulary) for _ in range(length)]


def _tales(tokenizer: PreTrainedTokenizerBase, length: int, seed: int) -> list[int] | None:
    """The first tokens of endless sentences; None for a tokenizer that does not know their words."""
    draw, sentences, ids = random.Random(seed), list[str](), list[int]()
    shares = [sentence.share for sentence in SENTENCES]
    while len(ids) < length:
        for _ in range(64 + length // 16):
            (sentence,) = draw.choices(SENTENCES, shares)
            value = draw.choice(sentence.values) if sentence.values else ""
            sentences.append(sentence.text.replace("{value}", value))
        # As servers split a prompt: with what the tokenizer adds in front; verbose=False: it may be long.
        try:
            with stock_code("split the text of a reading"):
                read = list(tokenizer(" ".join(sentences), verbose=False).input_ids)
        except RopepatchError:  # it lacks its own unknown token, for instance
            return None
        if len(read) <= len(ids):  # a tokenizer without a vocabulary
            return None
        ids = read
    unknown = tokenizer.unk_token_id
    text = ids[:length]
    return None if unknown is not None and text.count(unknown) > UNKNOWN * length else text
