"""The training sequences of the bundled checkpoint, each drawn from its own seed.

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

from ropepatch.data.texts import IGNORED
from ropepatch.data.tiny import materials
from ropepatch.data.tiny.grammar import BOS, SENTENCES, Sentence
from ropepatch.data.tiny.materials import Row, all_trained, copied, told_before
from ropepatch.data.tiny.tales import Narrator
from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEW, CASTS = (
    6,
    64,
)  # subjects per story for recall, and the number of such sets of subjects


@dataclass(frozen=True, eq=False)
class Stock:
    """The material of the rows.

    Attributes:
        narrator: Generates stories about all subjects.
        casts: Narrators of a few subjects each.
        stories: The concatenated tokens of the texts, each after a beginning-of-sequence token.
    """

    narrator: Narrator
    casts: Sequence[Narrator]
    stories: Tensor

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Stock:
        """Tokenise the texts, and make the narrators."""
        # verbose=False: no warning about texts longer than model_max_length.
        encoded = (
            tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids
            if texts
            else []
        )
        return cls(
            narrator=Narrator(tokenizer),
            casts=[Narrator(tokenizer, _about(FEW, seed)) for seed in range(CASTS)],
            stories=torch.tensor(
                [token for ids in encoded for token in (BOS, *ids)], dtype=torch.long
            ),
        )


def strings(stock: Stock, length: int, seed: int) -> Row:
    """Draw a random string twice; trained on the second one and its end."""
    half = (length - 2) // 2
    ids = torch.tensor(copied(half, len(stock.narrator.tokenizer), seed)[:length])
    return ids, torch.cat([torch.full((half + 2,), IGNORED), ids[half + 2 :]])


def recalls(stock: Stock, length: int, seed: int) -> Row:
    """Draw the beginning of a story about few subjects; trained only on values that it has stated before."""
    return told_before(stock.casts[seed % CASTS].tale(length, seed))


def stories(stock: Stock, length: int, seed: int) -> Row:
    """Draw a piece of the texts from a random position."""
    if len(stock.stories) <= length:
        raise RopepatchError(
            f"the texts have {len(stock.stories)} tokens, too few for a row of {length}",
            hint="name more texts, or leave stories out of the mixtures",
        )
    begin = random.Random(seed).randrange(len(stock.stories) - length)
    return all_trained(stock.stories[begin : begin + length])


def _of_all_subjects(
    draw: Callable[[Narrator, int, int], Row], stock: Stock, length: int, seed: int
) -> Row:
    return draw(stock.narrator, length, seed)


MATERIALS: dict[str, Callable[[Stock, int, int], Row]] = {
    **{
        name: partial(_of_all_subjects, draw)
        for name, draw in materials.MATERIALS.items()
    },
    "strings": strings,
    "recalls": recalls,
    "stories": stories,
}


def tell(count: int, seed: int) -> str:
    """Generate sentences of one story as text, by the process of `Narrator.tale` with other draws."""
    draw = random.Random(seed)
    facts: dict[str, str] = {}
    texts = []
    for sentence in draw.choices(
        SENTENCES, [sentence.share for sentence in SENTENCES], k=count
    ):
        text = sentence.text
        if sentence.subject is not None:
            if sentence.subject not in facts:
                facts[sentence.subject] = draw.choice(sentence.values)
            text = text.replace("{value}", facts[sentence.subject])
        texts.append(text)
    return " ".join(texts)


def _about(count: int, seed: int) -> list[Sentence]:
    """Draw subjects that have a value, and return the sentences about them."""
    subjects = sorted(
        {sentence.subject for sentence in SENTENCES if sentence.subject is not None}
    )
    chosen = random.Random(seed).sample(subjects, count)
    return [sentence for sentence in SENTENCES if sentence.subject in chosen]
