"""The rows that the bundled checkpoint is trained on, each drawn from a seed of its own.

Shapes: T tokens of a row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropepatch.data.documents import BOS, GeneratedDocument, copying
from ropepatch.data.tiny.corpus import Narrator
from ropepatch.data.tiny.grammar import SENTENCES, Sentence
from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # the label of a token that is not trained on
FEW, CASTS = 6, 64  # subjects of the tales that train recall, and how many sets of them
SHORTEST_COPY = 4  # tokens of the sequence
SHORTEST_PASSKEY = 80  # tokens: intro, two or three filler sentences, needle, question and answer

Row = tuple[Tensor, Tensor]  # ids and labels, [T] each


@dataclass(frozen=True, eq=False)
class Stock:
    """What rows are made from.

    Attributes:
        vocab_size: How many tokens the tokenizer has.
        narrator: Tells of all subjects.
        casts: Narrators of a few subjects each.
        stories: The texts in tokens, one after the other, each after a beginning-of-sequence token.
    """

    vocab_size: int
    narrator: Narrator
    casts: Sequence[Narrator]
    stories: Tensor

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Stock:
        """The stock in the tokens of a tokenizer."""
        # verbose=False: no warning about texts longer than model_max_length.
        encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids if texts else []
        return cls(
            vocab_size=len(tokenizer),
            narrator=Narrator(tokenizer),
            casts=[Narrator(tokenizer, _about(FEW, seed)) for seed in range(CASTS)],
            stories=torch.tensor([token for ids in encoded for token in (BOS, *ids)], dtype=torch.long),
        )


def strings(stock: Stock, length: int, seed: int) -> Row:
    """One random string, then the same again; trained on the second and on what ends it."""
    half = (length - 2) // 2
    ids = copying(half, stock.vocab_size, seed).ids[:length]
    return ids, torch.cat([torch.full((half + 2,), IGNORED), ids[half + 2 :]])


def copies(stock: Stock, length: int, seed: int) -> Row:
    """Random strings of any length, each with its repetition, on end."""
    draw = random.Random(seed)
    longest = (length - 3) // 2
    if longest < SHORTEST_COPY:
        raise RopepatchError(f"a row of copies takes {2 * SHORTEST_COPY + 3} tokens, got {length}")
    documents: list[Tensor] = []
    while sum(map(len, documents)) < length:
        half = draw.randint(SHORTEST_COPY, longest)
        documents.append(copying(half, stock.vocab_size, draw.getrandbits(64)).ids)
    return _all(torch.cat(documents)[:length])


def passkey(stock: Stock, length: int, seed: int) -> Row:
    """A passkey prompt with its answer; every other one is shorter than the row and followed by a tale."""
    if length < SHORTEST_PASSKEY:
        raise RopepatchError(f"a row of passkey takes {SHORTEST_PASSKEY} tokens, got {length}")
    draw = random.Random(seed)
    shorter = draw.random() < 0.5
    tokens = draw.randint(SHORTEST_PASSKEY, length) if shorter else length
    prompt = stock.narrator.passkey(tokens, draw.getrandbits(64)).ids
    return _all(torch.cat([prompt, stock.narrator.tale(length, draw.getrandbits(64)).ids])[:length])


def tales(stock: Stock, length: int, seed: int) -> Row:
    """The beginning of a tale."""
    return _all(stock.narrator.tale(length, seed).ids)


def recalls(stock: Stock, length: int, seed: int) -> Row:
    """The beginning of a tale of few subjects; trained on values that have been told before, alone."""
    return _told_before(stock.casts[seed % CASTS].tale(length, seed))


def retold(stock: Stock, length: int, seed: int) -> Row:
    """The beginning of a tale of all subjects; trained on values that have been told before, alone."""
    return _told_before(stock.narrator.tale(length, seed))


def stories(stock: Stock, length: int, seed: int) -> Row:
    """A stretch of the texts that begins anywhere."""
    if len(stock.stories) <= length:
        raise RopepatchError(
            f"the texts have {len(stock.stories)} tokens, too few for a row of {length}",
            hint="name more texts, or leave stories out of the mixtures",
        )
    begin = random.Random(seed).randrange(len(stock.stories) - length)
    return _all(stock.stories[begin : begin + length])


MATERIALS: dict[str, Callable[[Stock, int, int], Row]] = {
    "strings": strings,
    "copies": copies,
    "passkey": passkey,
    "tales": tales,
    "recalls": recalls,
    "retold": retold,
    "stories": stories,
}


def _about(count: int, seed: int) -> list[Sentence]:
    """The sentences about so many of the subjects that have a value."""
    subjects = sorted({sentence.subject for sentence in SENTENCES if sentence.subject is not None})
    chosen = random.Random(seed).sample(subjects, count)
    return [sentence for sentence in SENTENCES if sentence.subject in chosen]


def _told_before(tale: GeneratedDocument) -> Row:
    return tale.ids, tale.ids.masked_fill(tale.distance == 0, IGNORED)


def _all(ids: Tensor) -> Row:
    return ids, ids.clone()
