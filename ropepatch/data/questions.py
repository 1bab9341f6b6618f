"""Rows that ask for what stands far before: keys in a text, and behind it a question whose answer is known.

Shapes: T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ropepatch.data.haystack import KINDS, Haystacks, Writer
from ropepatch.settings import seed_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TAUGHT = ("passkey", "number", "sentence")  # the kinds of questions that are learned; others only measure
ANSWERS = 0.5  # the weight of the mean loss of an answer beside the mean loss of its row
KEYS = 4  # in a row, one of which is asked for; a passkey is alone
ROUND = 64  # rows whose questions are spread evenly over the depth
STRIDE = 37  # between two of them that follow each other, so that depths do not come in order


class QuestionRow(NamedTuple):
    """A row that ends with a question and its answer, but for the first few tokens again behind it."""

    ids: Tensor  # [T] int64
    answers: Tensor  # [T] float32, what the loss of each token of the answer weighs; 0 for all others


@dataclass(frozen=True, eq=False)
class Questions:
    """Rows of some kinds of questions in turn, in texts; each follows from its number and the seed.

    Args:
        tokenizer: Of the model.
        texts: Around the keys.
        kinds: Names from `KINDS`.
        seed: Of all draws.
    """

    tokenizer: PreTrainedTokenizerBase
    texts: Sequence[str]
    kinds: Sequence[str]
    seed: int

    def row(self, number: int, length: int) -> QuestionRow:
        """The row of a number from 0, in T = ``length`` tokens.

        Raises:
            RopepatchError: It has no room, or the tokenizer cannot write it.
        """
        number, kind = number // len(self.kinds), self.kinds[number % len(self.kinds)]
        lap, place = divmod(number, ROUND)
        keys = min(KEYS, KINDS[kind].most)
        plan = Haystacks(
            lengths=[length],
            count=ROUND,
            keys=keys,
            kinds=[kind],
            seed=seed_of("questions", self.seed, kind, lap),
            texts=self.texts,
        )
        haystack = plan.haystack(place * STRIDE % ROUND, Writer(self.tokenizer))
        question = haystack.asked[length][number % keys]
        before = haystack.ids[: haystack.stops[length]]
        ids = torch.cat([before, question.ids, question.answer, haystack.ids])[:length]
        answers, begin = torch.zeros(length), len(before) + len(question.ids)
        answers[begin : begin + len(question.answer)] = ANSWERS * length / len(question.answer)
        return QuestionRow(ids, answers)
