"""Training sequences for retrieval: a text that contains keys, then a question about a key and its answer.

Shapes: T tokens of a training sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ropepatch.data.haystack import WORDS, Haystacks, Numbers, Writer, things
from ropepatch.settings import key_of, seed_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Kinds of questions for training. No template, name or form of a number is one of `KINDS`, which eval asks.
TAUGHT = {
    "passkey": Numbers(
        "This pass key is {key}. Guard it: {key} is this pass key.",
        "Which pass key is this?",
        "This pass key is",
        digits=4,
    ),
    "number": Numbers(
        "Under {thing} the label says {key}.",
        "What does the label say under {thing}?",
        "Under {thing} the label says",
        things(WORDS["training"]),
        digits=4,
    ),
    "sentence": Numbers(
        "{thing} {key}.",
        "Finish a line that stands above.",
        "{thing}",
        WORDS["training"]["beginnings"],
        digits=6,
    ),
}
VERSION = key_of(TAUGHT)  # of the questions
ANSWERS = 0.5  # weight of an answer's mean loss, relative to that of its sequence
KEYS = 4  # per sequence, with a question on one of them; a passkey is the only key
ROUND = 64  # sequences whose questions are spread evenly over the depth
STRIDE = 37  # between two consecutive ones, so that depths are not in order


class QuestionRow(NamedTuple):
    """A sequence with a question and its answer near the end, padded with its first tokens."""

    ids: Tensor  # [T] int64
    answers: Tensor  # [T] float32, the loss weight of each token of the answer; 0 for all others


@dataclass(frozen=True, eq=False)
class Questions:
    """Training sequences with questions of each kind in turn, determined by their number and the seed.

    Args:
        tokenizer: The tokenizer of the model.
        texts: The texts around the keys.
        kinds: Names from `TAUGHT`.
        seed: The seed of all draws.
    """

    tokenizer: PreTrainedTokenizerBase
    texts: Sequence[str]
    kinds: Sequence[str]
    seed: int

    def row(self, number: int, length: int) -> QuestionRow:
        """Return the sequence with a number from 0, of T = ``length`` tokens.

        Raises:
            RopepatchError: If it does not fit, or the tokenizer cannot represent it.
        """
        number, kind = number // len(self.kinds), self.kinds[number % len(self.kinds)]
        lap, place = divmod(number, ROUND)
        keys = min(KEYS, TAUGHT[kind].most)
        plan = Haystacks(
            lengths=[length],
            count=ROUND,
            keys=keys,
            kinds=[kind],
            seed=seed_of("questions", self.seed, kind, lap),
            texts=self.texts,
            pool=TAUGHT,
        )
        haystack = plan.haystack(place * STRIDE % ROUND, Writer(self.tokenizer))
        question = haystack.asked[length][number % keys]
        before = haystack.ids[: haystack.stops[length]]
        ids = torch.cat([before, question.ids, question.answer, haystack.ids])[:length]
        answers, begin = torch.zeros(length), len(before) + len(question.ids)
        answers[begin : begin + len(question.answer)] = (
            ANSWERS * length / len(question.answer)
        )
        return QuestionRow(ids, answers)
