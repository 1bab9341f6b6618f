"""The rows that the bundled checkpoint was trained on, each drawn from a seed of its own.

Shapes: T tokens of a row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropepatch.data.tiny import materials
from ropepatch.data.tiny.grammar import BOS, SENTENCES, Sentence
from ropepatch.data.tiny.materials import IGNORED, Row, all_trained, copied, told_before
from ropepatch.data.tiny.tales import Narrator
from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEW, CASTS = 6, 64  # subjects of the tales that train recall, and how many sets of them


@dataclass(frozen=True, eq=False)
class Stock:
    """What rows are made from.

    Attributes:
        narrator: Tells of all subjects.
        casts: Narrators of a few subjects each.
        stories: The texts in tokens, one after the other, each after a beginning-of-sequence token.
    """

    narrator: Narrator
    casts: Sequence[Narrator]
    stories: Tensor

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Stock:
        """The stock in the tokens of a tokenizer."""
        # verbose=False: no warning about texts longer than model_max_length.
        encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids if texts else []
        return cls(
            narrator=Narrator(tokenizer),
            casts=[Narrator(tokenizer, _about(FEW, seed)) for seed in range(CASTS)],
            stories=torch.tensor([token for ids in encoded for token in (BOS, *ids)], dtype=torch.long),
        )


def strings(stock: Stock, length: int, seed: int) -> Row:
    """One random string, then the same again; trained on the second and on what ends it."""
    half = (length - 2) // 2
    ids = torch.tensor(copied(half, len(stock.narrator.tokenizer), seed)[:length])
    return ids, torch.cat([torch.full((half + 2,), IGNORED), ids[half + 2 :]])


def recalls(stock: Stock, length: int, seed: int) -> Row:
    """The beginning of a tale of few subjects; trained on values that have been told before, alone."""
    return told_before(stock.casts[seed % CASTS].tale(length, seed))


def stories(stock: Stock, length: int, seed: int) -> Row:
    """A stretch of the texts that begins anywhere."""
    if len(stock.stories) <= length:
        raise RopepatchError(
            f"the texts have {len(stock.stories)} tokens, too few for a row of {length}",
            hint="name more texts, or leave stories out of the mixtures",
        )
    begin = random.Random(seed).randrange(len(stock.stories) - length)
    return all_trained(stock.stories[begin : begin + length])


def _of_all_subjects(draw: Callable[[Narrator, int, int], Row], stock: Stock, length: int, seed: int) -> Row:
    return draw(stock.narrator, length, seed)


MATERIALS: dict[str, Callable[[Stock, int, int], Row]] = {
    **{name: partial(_of_all_subjects, draw) for name, draw in materials.MATERIALS.items()},
    "strings": strings,
    "recalls": recalls,
    "stories": stories,
}


def tell(count: int, seed: int) -> str:
    """So many sentences of one tale, as text; the same process as `Narrator.tale`, not the same draws."""
    draw = random.Random(seed)
    facts: dict[str, str] = {}
    texts = []
    for sentence in draw.choices(SENTENCES, [sentence.share for sentence in SENTENCES], k=count):
        text = sentence.text
        if sentence.subject is not None:
            if sentence.subject not in facts:
                facts[sentence.subject] = draw.choice(sentence.values)
            text = text.replace("{value}", facts[sentence.subject])
        texts.append(text)
    return " ".join(texts)


def _about(count: int, seed: int) -> list[Sentence]:
    """The sentences about so many of the subjects that have a value."""
    subjects = sorted({sentence.subject for sentence in SENTENCES if sentence.subject is not None})
    chosen = random.Random(seed).sample(subjects, count)
    return [sentence for sentence in SENTENCES if sentence.subject in chosen]
