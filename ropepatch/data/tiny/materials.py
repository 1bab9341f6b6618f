"""Training sequences for the bundled checkpoint, each drawn from its own seed.

Shapes: T tokens of a training sequence.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from ropepatch.data.texts import IGNORED
from ropepatch.data.tiny.grammar import BOS, EOS
from ropepatch.data.tiny.passkey import passkey_prompt
from ropepatch.data.tiny.tales import Narrator, Tale

SHORTEST_COPY = 4  # tokens of the repeated string
# Tokens: intro, two or three filler sentences, needle, question and answer
SHORTEST_PASSKEY = 80

Row = tuple[Tensor, Tensor]  # ids and labels, [T] each


def copies(narrator: Narrator, length: int, seed: int) -> Row:
    """Return concatenated random strings of varying length, each followed by its repetition."""
    draw = random.Random(seed)
    longest = (length - 3) // 2
    ids: list[int] = []
    while len(ids) < length:
        half = draw.randint(SHORTEST_COPY, longest)
        ids += copied(half, len(narrator.tokenizer), draw.getrandbits(64))
    return all_trained(torch.tensor(ids[:length]))


def passkey(narrator: Narrator, length: int, seed: int) -> Row:
    """Return a passkey prompt with its answer; half of them are shorter and followed by a story."""
    draw = random.Random(seed)
    shorter = draw.random() < 0.5
    shortest = min(SHORTEST_PASSKEY, length)
    tokens = draw.randint(shortest, length) if shorter else length
    prompt = passkey_prompt(narrator.tokenizer, tokens, draw.getrandbits(64))
    return all_trained(
        torch.cat([prompt, narrator.tale(length, draw.getrandbits(64)).ids])[:length]
    )


def tales(narrator: Narrator, length: int, seed: int) -> Row:
    """Return the beginning of a synthetic story."""
    return all_trained(narrator.tale(length, seed).ids)


def retold(narrator: Narrator, length: int, seed: int) -> Row:
    """Return the beginning of a story, with labels only for repeated values."""
    return told_before(narrator.tale(length, seed))


MATERIALS: dict[str, Callable[[Narrator, int, int], Row]] = {
    "copies": copies,
    "passkey": passkey,
    "tales": tales,
    "retold": retold,
}


def copied(length: int, vocab_size: int, seed: int) -> list[int]:
    """Return BOS, ``length`` random ordinary tokens, EOS, the same tokens again, EOS."""
    draw = random.Random(seed)
    sequence = [draw.randrange(EOS + 1, vocab_size) for _ in range(length)]
    return [BOS, *sequence, EOS, *sequence, EOS]


def told_before(tale: Tale) -> Row:
    """Return a story with labels only for tokens that repeat a value."""
    return tale.ids, tale.ids.masked_fill(tale.distance == 0, IGNORED)


def all_trained(ids: Tensor) -> Row:
    """Return token ids as ids and labels."""
    return ids, ids.clone()
