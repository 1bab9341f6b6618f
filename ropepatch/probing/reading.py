"""The fingerprint `reading.json`: a model's predictions within and beyond its original context length.

Position n is the prediction after the first n tokens of a random text.
"""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ropepatch.data.tiny.grammar import SENTENCES
from ropepatch.errors import RopepatchError
from ropepatch.files import read_json, whole_file
from ropepatch.model.checkpoint import (
    READING,
    Number,
    Part,
    Text,
    Tokens,
    validated,
)
from ropepatch.model.config import stock_code

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
# Share of unknown tokens above which the tokenizer does not fit the text
UNKNOWN = 0.05

Token = Annotated[int, Field(ge=0)]
LogProb = Annotated[Number, Field(ge=-1e6, le=0)]  # nats
Divergence = Annotated[Number, Field(ge=0, le=1e6)]  # nats
Top = dict[int, float]  # log-probabilities in nats of the most probable tokens


class Reading(Part):
    """The fingerprint of an extended checkpoint, `reading.json`.

    Args:
        version: Version of this layout.
        weights: Checksum of the weights.
        window: The original context length, in tokens.
        target: The target length, in tokens.
        vocabulary: The size of the vocabulary.
        ids: The token ids of the text.
        positions: The compared positions, ascending.
        tops: The most probable next tokens at each position, with their log-probabilities in nats, by
            hypothesis: `right`, and each error that can be distinguished from it.
        alike: The errors that cannot be distinguished from `right` at these positions.
        rounded: The KL divergence of the right RoPE in 16 bits from `right` at each position, in nats.
    """

    version: Literal[1]
    weights: Text
    window: Tokens
    target: Tokens
    vocabulary: Tokens
    ids: list[Token]
    positions: list[Tokens]
    tops: dict[Text, list[dict[Token, LogProb]]]
    alike: list[Text]
    rounded: list[Divergence]

    @property
    def beyond(self) -> list[bool]:
        """Whether each position is beyond the original context length."""
        return [position > self.window for position in self.positions]

    def is_consistent(self) -> bool:
        """Return whether its lists fit each other."""
        rows = list(chain.from_iterable(self.tops.values()))
        counts = {*map(len, self.tops.values()), len(self.rounded)}
        return (
            RIGHT in self.tops
            and counts == {len(self.positions)}
            and self.positions == sorted({*self.positions})
            and self.positions[-1] <= len(self.ids) == self.target
            and all(rows)
            and max(chain(self.ids, *rows)) < self.vocabulary
        )


def exists(folder: Path) -> bool:
    """Return whether a folder has a fingerprint."""
    return (folder / READING).is_file()


def read(folder: Path) -> Reading:
    """Read and validate the fingerprint of a checkpoint's folder."""
    reading = validated(Reading, read_json(folder / READING), HINT, file=READING)
    if len(set(reading.beyond)) < 2 or not reading.is_consistent():
        raise RopepatchError(f"the lists of {READING} are inconsistent", hint=HINT)
    return reading


def write(folder: Path, reading: Reading) -> None:
    """Write a fingerprint into a folder, completely or not at all."""
    text = reading.model_dump_json()
    with whole_file(folder / READING) as partial:
        partial.write_text(f"{text}\n", encoding="utf-8")


def draw_ids(
    tokenizer: PreTrainedTokenizerBase | None, vocabulary: int, length: int
) -> list[int]:
    """Draw the token ids of a text: sentences, or random tokens if the tokenizer does not fit them."""
    ids = None if tokenizer is None else _tales(tokenizer, length)
    if ids is None or max(ids) >= vocabulary:
        draw = random.Random(0)
        ids = [int(draw.random() * vocabulary) for _ in range(length)]
    return ids


def _tales(tokenizer: PreTrainedTokenizerBase, length: int) -> list[int] | None:
    """Return the first tokens of random sentences; None if the tokenizer does not know their words."""
    draw = random.Random(0)
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
