"""The fingerprint `reading.json`: a model's predictions within and beyond its original context length.

Position n is the prediction after the first n tokens of a text, which is drawn from a seed.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StrictInt

from ropepatch.data.tiny.grammar import SENTENCES
from ropepatch.errors import RopepatchError
from ropepatch.files import read_json, whole_file
from ropepatch.model.checkpoint import (
    READING,
    Number,
    Part,
    Text,
    Tokens,
    Whole,
    validated,
)
from ropepatch.model.config import stock_code
from ropepatch.scaling.rope import LONGEST

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Hypotheses: what stock transformers computes, and the most common errors of engines
RIGHT = "right"
UNSCALED = "unscaled"
TWICE = "applied twice"
FACTORLESS = "without attention factor"
DOUBLED = "factor doubled"
MISREAD = "original length misread"

HINT = "write it again with `ropepatch probe --save-reading`"
SHORT = 8192  # tokens at most of a text whose ids are stored
# Share of unknown tokens above which the tokenizer does not fit the text
UNKNOWN = 0.05

Token = Annotated[StrictInt, Field(ge=0, lt=2**32)]
LogProb = Annotated[Number, Field(ge=-1e6, le=0)]  # nats
Divergence = Annotated[Number, Field(ge=0, le=1e6)]  # nats
Top = dict[int, float]  # log-probabilities in nats of the most probable tokens


class Source(Part):
    """The text of a fingerprint.

    Args:
        kind: `tales` for sentences, `tokens` for random tokens.
        seed: The seed of the text.
        length: The number of tokens.
        sha256: The sha256 of the token ids, as little-endian integers of 4 bytes.
        ids: The token ids, stored for a short text only.
    """

    kind: Literal["tales", "tokens"]
    seed: Whole
    length: Annotated[Tokens, Field(le=LONGEST)]
    sha256: Text
    ids: list[Token] | None = None


class Tops(Part):
    """The most probable next tokens at every position, under one hypothesis.

    Args:
        ids: The token ids at each position, most probable first.
        log_probs: Their log-probabilities, in nats.
    """

    ids: list[list[Token]]
    log_probs: list[list[LogProb]]

    def rows(self) -> list[Top]:
        """Return the log-probabilities by token, at each position."""
        pairs = zip(self.ids, self.log_probs, strict=True)
        return [dict(zip(ids, map(float, logs), strict=True)) for ids, logs in pairs]


class Reading(Part):
    """The fingerprint of an extended checkpoint, `reading.json`.

    Args:
        version: Version of this layout.
        weights: Checksum of the weights.
        window: The original context length, in tokens.
        target: The target length, in tokens.
        vocabulary: The size of the vocabulary.
        dtype: The precision of the computation.
        source: The text.
        positions: The compared positions, ascending.
        tops: The predictions by hypothesis: `right`, and each error that can be distinguished from it.
        alike: The errors that cannot be distinguished from `right` at these positions.
        rounded: The KL divergence of the right RoPE in 16 bits from `right` at each position, in nats.
        versions: Versions of the libraries that computed it.
    """

    version: Literal[1]
    weights: Text
    window: Tokens
    target: Tokens
    vocabulary: Tokens
    dtype: Text
    source: Source
    positions: list[Tokens]
    tops: dict[Text, Tops]
    alike: list[Text] = Field(default_factory=list)
    rounded: list[Divergence]
    versions: dict[Text, Text]

    @property
    def beyond(self) -> list[bool]:
        """Whether each position is beyond the original context length."""
        return [position > self.window for position in self.positions]

    def rows(self) -> dict[str, list[Top]]:
        """Return the predictions at each position, by hypothesis."""
        return {name: tops.rows() for name, tops in self.tops.items()}

    def is_consistent(self) -> bool:
        """Return whether its lists fit each other."""
        try:
            by_name = self.rows()
        except ValueError:  # of zip: two lists differ in length
            return False
        rows = list(chain.from_iterable(by_name.values()))
        counts = {*map(len, by_name.values()), len(self.rounded)}
        return (
            RIGHT in by_name
            and counts == {len(self.positions)}
            and self.positions == sorted({*self.positions})
            and self.positions[-1] <= self.source.length == self.target
            and all(rows)
            and max(chain(self.source.ids or [], *rows)) < self.vocabulary
        )


def exists(folder: Path) -> bool:
    """Return whether a folder has a fingerprint."""
    return (folder / READING).is_file()


def read(folder: Path) -> Reading:
    """Read the fingerprint of a checkpoint's folder."""
    return parse(read_json(folder / READING))


def parse(content: dict[str, Any]) -> Reading:
    """Parse and validate the content of a fingerprint."""
    reading = validated(Reading, content, HINT, file=READING)
    if len(set(reading.beyond)) < 2 or not reading.is_consistent():
        raise RopepatchError(f"the lists of {READING} are inconsistent", hint=HINT)
    return reading


def write(folder: Path, reading: Reading) -> None:
    """Write a fingerprint into a folder, completely or not at all."""
    text = reading.model_dump_json(exclude_unset=True)
    with whole_file(folder / READING) as partial:
        partial.write_text(f"{text}\n", encoding="utf-8")


# Its text: the same on every machine, in a checkpoint's tokens


def draw_source(
    tokenizer: PreTrainedTokenizerBase | None, vocabulary: int, length: int, seed: int
) -> tuple[Source, list[int]]:
    """Draw a text and its token ids: sentences, or random tokens if the tokenizer does not fit them."""
    kind = "tales"
    ids = None if tokenizer is None else _tales(tokenizer, length, seed)
    if ids is None or max(ids) >= vocabulary:
        kind, ids = "tokens", _tokens(vocabulary, length, seed)
    content = {"kind": kind, "seed": seed, "length": length, "sha256": _digest(ids)}
    if length <= SHORT:
        content["ids"] = ids
    return Source.model_validate(content), ids


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
            f"{READING} needs the tokenizer of {name}",
            hint="copy the tokenizer files into its folder",
        )
    else:
        ids = _tales(tokenizer, source.length, source.seed) or []
    if _digest(ids) != source.sha256 or len(ids) != source.length:
        raise RopepatchError(
            f"{READING} does not fit {name}: the tokenizer changed, or another version of ropepatch wrote it",
            hint=HINT,
        )
    return ids


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()


def _tokens(vocabulary: int, length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [int(draw.random() * vocabulary) for _ in range(length)]


def _tales(
    tokenizer: PreTrainedTokenizerBase, length: int, seed: int
) -> list[int] | None:
    """Return the first tokens of random sentences; None if the tokenizer does not know their words."""
    draw = random.Random(seed)
    shares = [sentence.share for sentence in SENTENCES]
    sentences: list[str] = []
    ids: list[int] = []
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
    ids = ids[:length]
    unknown = tokenizer.unk_token_id
    if unknown is not None and ids.count(unknown) > UNKNOWN * length:
        return None
    return ids
