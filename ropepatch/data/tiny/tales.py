"""Synthetic stories of any length in which every token has a known probability.

narrator = Narrator(tokenizer)
tale = narrator.tale(2048, seed=1)
floor = -tale.log_probs()  # the lowest possible expected loss, in nats

Shapes: T tokens of a story. Log-probabilities are natural logarithms, float64.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropepatch.data.texts import encode
from ropepatch.data.tiny.grammar import SENTENCES, Sentence
from ropepatch.errors import RopepatchError
from ropepatch.settings import seed_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Tale:
    """Token ids and their exact probabilities under the process that drew them.

    The ideal model knows the process, the story's length and the position. A token is certain if it repeats
    one in the context; otherwise it has the probability with which it was first drawn.

    Attributes:
        ids: Token ids [T]; the first is the beginning-of-sequence token.
        prior: The log-probability [T] of each token without the earlier value that it repeats.
        distance: The distance [T] to that value in tokens; 0 if the token repeats nothing.
    """

    ids: Tensor
    prior: Tensor
    distance: Tensor

    def log_probs(self) -> Tensor:
        """Return the log-probability [T] of every token given all tokens before it.

        Its negative mean is the lowest loss that a model can expect.
        """
        return self.prior.masked_fill(self.distance > 0, 0.0)


def held_out_tales(
    tokenizer: PreTrainedTokenizerBase, *, length: int, count: int
) -> list[Tale]:
    """Return ``count`` stories of ``length`` tokens on which the bundled checkpoint was not trained.

    They are always the same; shorter stories are prefixes of longer ones.
    """
    narrator = Narrator(tokenizer)
    return [narrator.tale(length, seed_of("held out", index)) for index in range(count)]


class Narrator:
    """Draws synthetic stories in the tokens of one tokenizer.

    Sentences are drawn independently, but a subject keeps one value for a whole story, drawn uniformly at its
    first mention. So a value is certain if it is in the context, and otherwise as probable as any other. If a
    context begins within a value, the visible part gives no information about its other tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sentences: Sequence[Sentence] = SENTENCES,
    ) -> None:
        self.tokenizer = tokenizer
        pools = {sentence.values for sentence in sentences}
        values = {pool: self._encode([f" {value}" for value in pool]) for pool in pools}
        self._choices = {
            pool: _Choice((tokens, 1.0) for tokens in values[pool]) for pool in pools
        }
        self._forms = []
        for sentence in sentences:
            head, middle, tail = self._encode(_parts(sentence))
            form = _Form(sentence, head, middle, tail, values[sentence.values])
            self._check(form)
            self._forms.append(form)
        self._shares = [sentence.share for sentence in sentences]
        heads = [form.head for form in self._forms]
        self._heads = _Choice(zip(heads, self._shares, strict=True))

    def tale(self, length: int, seed: int) -> Tale:
        """Return the first ``length`` tokens of an endless story, with the beginning-of-sequence token."""
        draw = random.Random(seed)
        ids, prior, distance = [self.tokenizer.bos_token_id], [0.0], [0]
        # By subject: the value and its last position
        values: dict[str, tuple[Tokens, int]] = {}
        while len(ids) < length:
            (form,) = draw.choices(self._forms, self._shares)
            ids += form.head
            prior += self._heads.log_probs(form.head)
            distance += [0] * len(form.head)
            subject = form.sentence.subject
            if subject is None:
                continue
            here = len(ids)
            value, last = values.get(subject) or (draw.choice(form.values), here)
            values[subject] = value, here + len(value) + len(form.middle)
            rest = form.middle + value + form.tail
            ids += value + rest
            prior += self._choices[form.sentence.values].log_probs(value) + [0.0] * len(
                rest
            )
            distance += [here - last] * len(value) + [0] * len(rest)
        return Tale(
            torch.tensor(ids[:length]),
            torch.tensor(prior[:length], dtype=torch.float64),
            torch.tensor(distance[:length]),
        )

    def _encode(self, texts: Sequence[str]) -> list[Tokens]:
        return list(map(tuple, encode(self.tokenizer, list(texts))))

    def _check(self, form: _Form) -> None:
        """Raise an error if the tokenizer does not split a sentence into its parts."""
        value, tokens = "", form.head
        if form.values:
            value = form.sentence.values[0]
            tokens += form.values[0] + form.middle + form.values[0] + form.tail
        text = f" {form.sentence.text}".replace("{value}", value)
        if self._encode([text]) != [tokens] or self.tokenizer.bos_token_id is None:
            raise RopepatchError(
                f"the tokenizer does not split {text!r} into its words, after a beginning-of-sequence token",
                hint="stories and their probabilities are for tiny; give a text",
            )


class _Choice:
    """A choice between token sequences, none of which is a prefix of another."""

    def __init__(self, options: Iterable[tuple[Tokens, float]]) -> None:
        # By prefix, the total of its options
        self._weights: dict[Tokens, float] = defaultdict(float)
        for tokens, weight in options:
            for end in range(len(tokens) + 1):
                self._weights[tokens[:end]] += weight

    def log_probs(self, tokens: Tokens) -> list[float]:
        """Return the log-probability of each token given the previous ones."""
        weights = [self._weights[tokens[:end]] for end in range(len(tokens) + 1)]
        return [math.log(after / before) for before, after in pairwise(weights)]


@dataclass(frozen=True, eq=False)
class _Form:
    """A sentence in tokens: head, value, middle, value, tail; only the head if it states no fact."""

    sentence: Sentence
    head: Tokens
    middle: Tokens
    tail: Tokens
    values: Sequence[Tokens]


def _parts(sentence: Sentence) -> list[str]:
    """Return the text before, between and after the two values, without the space before each."""
    parts = f" {sentence.text}".split(" {value}")
    return parts if sentence.values else [*parts, "", ""]
