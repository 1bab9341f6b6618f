"""Documents of any length whose every token has a known probability: tales and passkey prompts.

narrator = Narrator(tokenizer)
document = narrator.tale(2048, seed=1)
floor = -document.log_probs()             # the loss, in nats, that no model beats
nearby = -document.log_probs(window=256)  # what is left for one that sees 256 tokens
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, cycle, pairwise
from typing import TYPE_CHECKING

from ropepatch.data.documents import GeneratedDocument
from ropepatch.data.tiny.grammar import SENTENCES, Sentence
from ropepatch.data.tiny.passkey import PASSKEY
from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = tuple[int, ...]


class Choice:
    """One of several token sequences, none the beginning of another; and what each of its tokens says."""

    def __init__(self, options: Iterable[tuple[Tokens, float]]) -> None:
        self._weights: dict[Tokens, float] = defaultdict(float)  # of all options that begin so
        for tokens, weight in options:
            for end in range(len(tokens) + 1):
                self._weights[tokens[:end]] += weight

    def log_probs(self, tokens: Tokens) -> list[float]:
        """The log-probability of each token given those before it."""
        weights = [self._weights[tokens[:end]] for end in range(len(tokens) + 1)]
        return [math.log(after / before) for before, after in pairwise(weights)]


@dataclass(frozen=True, eq=False)
class _Form:
    """A sentence in tokens: head, value, middle, value, tail; of one without a fact the head is all."""

    subject: str | None
    head: Tokens
    middle: Tokens
    tail: Tokens
    values: Sequence[Tokens]
    choice: Choice  # of the value

    def tokens(self, value: Tokens) -> Tokens:
        return self.head + value + self.middle + value + self.tail


class Narrator:
    """Tells tales in the tokens of one tokenizer.

    Sentences are drawn independently of each other; what they state is not: a subject has one value for a
    whole document, drawn uniformly when it is first told. So a value is certain to whoever has seen it in
    this document, and as probable as any other to whoever has not; a part of a value, where the window
    begins in the middle of one, tells nothing about its other tokens.

    Raises:
        RopepatchError: The tokenizer does not mark the beginning of a text, or does not split these
            sentences into words and digits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sentences: Sequence[Sentence] = SENTENCES) -> None:
        self.tokenizer = tokenizer
        pools = {sentence.values for sentence in sentences}
        values = {pool: self.encode([f" {value}" for value in pool]) for pool in pools}
        choices = {pool: Choice((tokens, 1.0) for tokens in values[pool]) for pool in pools}
        heads, middles, tails = map(self.encode, zip(*map(_parts, sentences), strict=True))
        self._forms = [
            _Form(sentence.subject, head, middle, tail, values[sentence.values], choices[sentence.values])
            for sentence, head, middle, tail in zip(sentences, heads, middles, tails, strict=True)
        ]
        self._shares = [sentence.share for sentence in sentences]
        self._heads = Choice(
            (form.head, share) for form, share in zip(self._forms, self._shares, strict=True)
        )
        self._longest = max(len(form.tokens(form.values[0] if form.values else ())) for form in self._forms)
        self._check(sentences, values)

    def _check(self, sentences: Sequence[Sentence], values: Mapping[tuple[str, ...], list[Tokens]]) -> None:
        """Refuse sentences in whose tokens the probabilities would be others than stated."""
        hint = "use a tokenizer with a beginning-of-sequence token, names in one token and digits one by one"
        if self.tokenizer.bos_token_id is None:
            raise RopepatchError("the tokenizer has no beginning-of-sequence token for a tale", hint=hint)
        for sentence, form in zip(sentences, self._forms, strict=True):
            value, tokens = (sentence.values[0], form.values[0]) if sentence.values else ("", ())
            text = f" {sentence.text}".replace("{value}", value)
            if self.encode([text]) != [form.tokens(tokens)]:
                raise RopepatchError(f"the tokenizer does not split {text!r} into its words", hint=hint)
        for pool, split in values.items():
            if not _independent(split):
                longest = max(zip(map(len, split), pool, strict=True))[1]
                raise RopepatchError(
                    f"the tokenizer splits {longest!r} so that one part tells something about the other",
                    hint=hint,
                )
        for head, following in pairwise(sorted(form.head for form in self._forms)):
            if following[: len(head)] == head:
                beginning = self.tokenizer.decode(list(head))
                raise RopepatchError(f"two sentences begin with {beginning!r}", hint="let them differ there")

    def tale(self, length: int, seed: int) -> GeneratedDocument:
        """The first ``length`` tokens of an endless tale, the beginning-of-sequence token included."""
        draw = random.Random(seed)
        ids, prior, distance = [self.tokenizer.bos_token_id], [0.0], [0]
        values: dict[str, tuple[Tokens, int]] = {}  # of a subject its value, and where that was last said
        while len(ids) < length:
            (form,) = draw.choices(self._forms, self._shares)
            ids += form.head
            prior += self._heads.log_probs(form.head)
            distance += [0] * len(form.head)
            if form.subject is None:
                continue
            here = len(ids)
            value, last = values.get(form.subject) or (draw.choice(form.values), here)
            values[form.subject] = value, here + len(value) + len(form.middle)
            rest = form.middle + value + form.tail
            ids += value + rest
            prior += form.choice.log_probs(value) + [0.0] * len(rest)
            distance += [here - last] * len(value) + [0] * len(rest)
        return GeneratedDocument.of(ids[:length], prior[:length], distance[:length], reach=self._longest)

    def passkey(self, length: int, seed: int) -> GeneratedDocument:
        """A passkey prompt with its answer; the needle's place and the key are drawn uniformly.

        Raises:
            RopepatchError: The length has no room for the prompt, or the tokenizer does not split it into
                words and digits.
        """
        draw = random.Random(seed)
        key = "".join(draw.choices("0123456789", k=PASSKEY.digits))
        hidden, question = PASSKEY.needle.replace("{key}", key), f"{PASSKEY.question} {key}"
        pieces = [PASSKEY.intro, *(f" {text}" for text in (*PASSKEY.filler, hidden, question))]
        *split, whole, digits = self.encode([*pieces, "".join(pieces), key])
        if whole != tuple(chain(*split)) or len(digits) != len(key):
            raise RopepatchError(
                "the probabilities of a passkey are not known",
                hint="use a tokenizer that splits a text into words, and digits one by one",
            )
        intro, *filler, needle, end = split
        first = (self.tokenizer.bos_token_id, *intro)
        room = length - len(first) - len(needle) - len(end)
        if room < len(filler[-1]):
            raise RopepatchError(
                f"a passkey prompt of {length} tokens has no room for its filler",
                hint=f"the shortest takes {length - room + len(filler[-1])} tokens with this tokenizer",
            )
        told: list[Tokens] = []  # filler, of which the first sentence may have lost its first tokens
        for sentence in cycle(reversed(filler)):
            told.insert(0, sentence[-room:])
            room -= len(told[0])
            if room == 0:
                break
        gaps = list(accumulate(map(len, told), initial=len(first)))  # where the needle may stand
        without = (*first, *chain(*told), *end)
        places = len(gaps)
        place = draw.randrange(places)
        begin = gaps[place]
        ids = (*without[:begin], *needle, *without[begin:])

        prior, distance = [0.0] * length, [0] * length
        for passed, gap in enumerate(gaps[: place + 1]):  # up to the needle the prompt is as without it
            chance = 1 / (places - passed)  # that the needle stands here, if not before
            decided = gap + _common(needle, without[gap:])
            prior[decided] += math.log(chance if passed == place else 1 - chance)
        mentions = [at for at in range(begin, begin + len(needle)) if ids[at : at + len(digits)] == digits]
        for digit in range(len(digits)):
            answer = length - len(digits) + digit
            prior[mentions[0] + digit] -= math.log(10)
            prior[answer] -= math.log(10)
            distance[answer] = answer - (mentions[-1] + digit)
        # Whether the needle has been, where it is out of sight, shows in which filler stands where: it has
        # moved that by its own length. After one round of filler nothing new can come.
        reach = len(needle) + _alike(needle, without, gaps[: len(filler) + 1], gaps[-1])
        return GeneratedDocument.of(ids, prior, distance, reach=reach)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Texts in tokens, none with a beginning-of-sequence token."""
        encoded = self.tokenizer(list(texts), add_special_tokens=False).input_ids if texts else []
        return list(map(tuple, encoded))


def _parts(sentence: Sentence) -> tuple[str, str, str]:
    """What stands before, between and after the two mentions of the value, which bring their own space."""
    before, middle, after = (
        f" {sentence.text}".split(" {value}") if sentence.values else (f" {sentence.text}", "", "")
    )
    return before, middle, after


def _independent(values: Sequence[Tokens]) -> bool:
    """Whether no token of a value tells anything about the others: every combination is one of them."""
    columns = [set(column) for column in zip(*values, strict=False)]
    alike = all(len(value) == len(columns) for value in values)
    return not values or (alike and math.prod(map(len, columns)) == len(set(values)) == len(values))


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    return next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b))


def _alike(needle: Tokens, without: Tokens, gaps: Sequence[int], last: int) -> int:
    """The longest run of filler that does not tell whether the needle stood in one of the gaps before it."""
    longest = 0
    for gap in gaps:
        run = 0
        for moved, still in zip(needle + without[gap:], without[gap:last], strict=False):
            run = run + 1 if moved == still else 0
            longest = max(longest, run)
    return longest
