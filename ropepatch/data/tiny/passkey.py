"""The passkey prompt of the bundled checkpoint's training."""

from __future__ import annotations

import random
from itertools import chain, cycle
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Words(NamedTuple):
    """The parts of a prompt: intro, filler with the needle before one of its sentences, question, key.

    Attributes:
        intro: The first sentences.
        filler: Sentences that are repeated in this order to fill the length.
        needle: The sentence with ``{key}``.
        question: The question, and the answer before the key, without a space.
        digits: Number of digits of a key, drawn independently, so that keys may begin with 0.
    """

    intro: str
    filler: tuple[str, ...]
    needle: str
    question: tuple[str, str]
    digits: int


PASSKEY = Words(
    intro="Somewhere on this page there is a pass key. Read on, you will need it.",
    filler=(
        "The mill wheel turns and turns.",
        "Bread cools on the sill.",
        "Smoke climbs from every roof.",
        "A cart rolls by without haste.",
        "Nobody asks for the time.",
    ),
    needle="The pass key is {key}. Keep it well: {key} is the pass key.",
    question=("What is the pass key?", "The pass key is"),
    digits=5,
)


def passkey_prompt(
    tokenizer: PreTrainedTokenizerBase, length: int, seed: int
) -> Tensor:
    """Return token ids [length] of a prompt with its answer; needle position and key are drawn uniformly.

    The first filler sentence loses its first tokens if it does not fit.
    """
    draw = random.Random(seed)
    key = "".join(draw.choices("0123456789", k=PASSKEY.digits))
    parts = (
        *PASSKEY.filler,
        PASSKEY.needle.replace("{key}", key),
        " ".join([*PASSKEY.question, key]),
    )
    texts = [PASSKEY.intro, *(f" {text}" for text in parts)]
    intro, *filler, needle, end = tokenizer(texts, add_special_tokens=False).input_ids
    begin = [tokenizer.bos_token_id, *intro]
    room = length - len(begin) - len(needle) - len(end)
    if room < len(filler[-1]):
        raise RopepatchError(
            f"a passkey prompt of {length} tokens has no room for its filler",
            hint=f"the shortest takes {length - room + len(filler[-1])} tokens with this tokenizer",
        )
    sentences: list[list[int]] = []
    for sentence in cycle(reversed(filler)):
        sentences.insert(0, sentence[-room:])
        room -= len(sentences[0])
        if room == 0:
            break
    sentences.insert(draw.randrange(len(sentences) + 1), needle)
    return torch.tensor([*begin, *chain(*sentences), *end])
