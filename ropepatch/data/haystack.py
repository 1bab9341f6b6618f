"""Haystacks: long texts with many needles, processed once and queried at several lengths.

Attention is causal, so the first l tokens of a haystack are a haystack of l tokens. One haystack serves all
lengths. At each length it has questions of every kind, spread evenly over the depth.

Shapes: N tokens of a haystack, Q of a question, A of an answer.
"""

from __future__ import annotations

import json
import random
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ropepatch.data.texts import encode
from ropepatch.data.tiny.passkey import PASSKEY
from ropepatch.errors import RopepatchError
from ropepatch.settings import refuse_unknown, seed_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INTRO = (
    "Some sentences of this text are worth remembering. You will be asked about them."
)
SENTENCE = re.compile(r"(?<=[.!?。！？])\s*(?=\S)")
LONGEST = 600  # characters of a sentence of the user's text; a longer one is split
CHARACTERS = 12  # of the user's text per token of a haystack, at most

WORDS = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))


def things(words: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a thing for every object and quality."""
    return [
        f"the {quality} {thing}"
        for thing in words["objects"]
        for quality in words["qualities"]
    ]


THINGS = things(WORDS)
PEOPLE: list[str] = WORDS["people"]
# A sentence about a person, and a question it answers without sharing a word
FACTS: list[list[str]] = WORDS["facts"]
DEFAULT = ("number", "sentence", "chain", "fact")  # the kinds used by default
IN_TEXT = ("quote", "number", "sentence")  # the same, in the user's text
QUOTE = "quote"
GIVEN, QUOTED = 16, 32  # tokens of a passage in the prompt, and after it


class Item(NamedTuple):
    """A fact that a haystack states somewhere, and a question about it."""

    needles: tuple[str, ...]  # sentences; the answer follows from all of them
    question: str
    stem: str  # the beginning of the answer
    answer: str  # the end of the answer, which is scored


class Kind(NamedTuple):
    """A kind of question."""

    # Returns distinct items, given their number
    draw: Callable[[random.Random, int], list[Item]]
    most: int  # the largest number of items
    title: str  # what the answer is


class Numbers(NamedTuple):
    """A kind of question whose answers are numbers.

    ``{thing}`` and ``{key}`` stand for a thing and its number.
    """

    needle: str
    question: str
    stem: str
    things: Sequence[str] = ()  # none for a single question
    digits: int = PASSKEY.digits
    title: str = ""  # what the answer is

    @property
    def most(self) -> int:
        """The largest number of items."""
        return max(1, len(self.things))

    def draw(self, draw: random.Random, count: int) -> list[Item]:
        """Return items about different things, with different numbers."""
        things = draw.sample(self.things, count) if self.things else [""]
        keys = _numbers(draw, count, self.digits)
        items = []
        for thing, key in zip(things, keys, strict=True):
            needle = self.needle.format(thing=thing, key=key)
            question = self.question.format(thing=thing)
            items.append(Item((needle,), question, self.stem.format(thing=thing), key))
        return items


def _numbers(
    draw: random.Random, count: int, digits: int = PASSKEY.digits
) -> list[str]:
    return [f"{number:0{digits}}" for number in draw.sample(range(10**digits), count)]


def _chain(draw: random.Random, count: int) -> list[Item]:
    items = []
    things = iter(draw.sample(THINGS, 2 * count))
    for one, other, key in zip(things, things, _numbers(draw, count), strict=True):
        needles = (
            f"The code of {one} is {key}.",
            f"For {other}, take the code of {one}.",
        )
        question = f"Which code does {other} need?"
        items.append(Item(needles, question, f"The code for {other} is", key))
    return items


def _fact(draw: random.Random, count: int) -> list[Item]:
    facts = draw.sample(FACTS, count)
    people = draw.sample(PEOPLE, count)
    stem = "The name of this person is"
    return [
        Item((sentence.replace("{name}", name),), question, stem, name)
        for (sentence, question), name in zip(facts, people, strict=True)
    ]


def _quotes(draw: random.Random, count: int) -> list[Item]:
    """Return nothing to write: passages are chosen where the text stands."""
    return [Item((), "", "", "")] * count


KINDS: Mapping[str, Kind | Numbers] = {
    "passkey": Numbers(
        PASSKEY.needle, *PASSKEY.question, title="the one number of the text"
    ),
    "number": Numbers(
        "The number of {thing} is {key}.",
        "What is the number of {thing}?",
        "The number of {thing} is",
        THINGS,
        title="a number by the name of a thing",
    ),
    "sentence": Numbers(
        "{thing} {key}.",
        "One of these sentences again.",
        "{thing}",
        WORDS["beginnings"],
        title="a number by the sentence that it ends",
    ),
    "chain": Kind(
        _chain,
        len(THINGS) // 2,
        "a number by two sentences, the second of which names the first",
    ),
    "fact": Kind(
        _fact,
        len(FACTS),
        "a person, by a question that shares no word with the sentence",
    ),
    QUOTE: Kind(
        _quotes,
        10**6,
        f"the next {QUOTED} tokens of a passage of the text, by its first {GIVEN}; each token counts",
    ),
}


@dataclass(eq=False)
class Question:
    """A question in tokens."""

    kind: str  # a name from `KINDS`
    ids: Tensor  # [Q], the question and the beginning of its answer
    answer: Tensor  # [A], the rest of the answer, which is scored
    end: int = (
        0  # the position in the haystack after the last needle that the answer needs
    )

    def __len__(self) -> int:
        return len(self.ids) + len(self.answer)


@dataclass(frozen=True, eq=False)
class Haystack:
    """A long text in tokens, with its questions.

    Attributes:
        ids: Token ids [N], with the beginning-of-sequence token and without questions.
        stops: By prompt length, the number of haystack tokens before a question. With the longest question
            and its answer the prompt has exactly that length.
        asked: The questions by length.
    """

    ids: Tensor
    stops: Mapping[int, int]
    asked: Mapping[int, Sequence[Question]]


@dataclass(frozen=True, kw_only=True)
class Haystacks:
    """Settings of haystacks.

    Attributes:
        lengths: Lengths of the prompts in tokens, including the answer.
        count: Number of haystacks.
        keys: Questions of each kind at every length; with 1 each haystack hides a single key.
        kinds: Names from `KINDS`.
        seed: Seed of all draws.
        texts: Texts around the needles; None for the built-in filler.
        pool: The kinds by their names: `KINDS`, or others, which have no intro.
        chat: Text of a chat template before a user's message, and between the message and the answer.
    """

    lengths: Sequence[int]
    count: int
    keys: int
    kinds: Sequence[str]
    seed: int = 0
    texts: Sequence[str] | None = None
    pool: Mapping[str, Kind | Numbers] = field(default_factory=lambda: KINDS)
    chat: tuple[str, str] = ("", " ")

    def __post_init__(self) -> None:
        refuse_unknown(self.kinds, self.pool, "kind")
        lengths = sorted(set(self.lengths))
        amounts = [*lengths[:1], self.count, self.keys, len(self.kinds)]
        if not lengths or min(amounts) < 1:
            raise RopepatchError(
                "need at least one length, haystack, key and kind, each at least 1, got "
                f"lengths {lengths}, haystacks {self.count}, keys {self.keys}, kinds {list(self.kinds)}",
                hint="e.g. lengths=[4096, 8192], haystacks=10, keys=8",
            )
        if isinstance(self.texts, str):
            raise RopepatchError(
                "texts is one text, expected a list of texts", hint="pass [text]"
            )
        if self.texts is not None and not any(text.strip() for text in self.texts):
            raise RopepatchError(
                "the texts hold no text",
                hint="give some, or drop texts to use the built-in filler",
            )
        object.__setattr__(self, "lengths", lengths)
        needed = sum(self.new)
        for kind in self.kinds:
            most = self.pool[kind].most
            if needed > most:
                raise RopepatchError(
                    f"{self.keys} keys of the kind {kind} take {needed} at these lengths, there are {most}",
                    hint="ask for fewer keys or lengths, or another kind",
                )

    @classmethod
    def by_default(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        within: int,
        among: Sequence[str] | None = None,
        **settings: Any,
    ) -> tuple[Haystacks, dict[str, str]]:
        """Return haystacks with the possible default kinds, and the reason for each other kind.

        The default is `IN_TEXT` with texts, else `DEFAULT`.

        Args:
            tokenizer: The tokenizer of the model.
            within: The length in tokens into which all kinds must fit.
            among: Other kinds than the default.
            **settings: All settings except the kinds.

        Raises:
            RopepatchError: If no kind is possible.
        """
        kinds: list[str] = []
        errors: dict[str, RopepatchError] = {}
        defaults = among or (IN_TEXT if settings.get("texts") else DEFAULT)
        for kind in defaults:
            try:
                plan = cls(**settings, kinds=(*kinds, kind))
                list(plan.at([within]).make(tokenizer))
                kinds.append(kind)
            except RopepatchError as error:
                errors[kind] = error
        if not kinds:
            raise errors[defaults[0]]
        reasons = {kind: str(error) for kind, error in errors.items()}
        return cls(**settings, kinds=tuple(kinds)), reasons

    @property
    def new(self) -> list[int]:
        """New keys of each kind at each length, so that depths are even at every length."""
        if self.keys == 1:
            return [1]
        shorter = [0, *self.lengths]
        shares = [
            1 - before / length
            for before, length in zip(shorter, self.lengths, strict=False)
        ]
        return [max(1, round(self.keys * share)) for share in shares]

    def make(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[Haystack]:
        """Yield the haystacks, the same for the same arguments.

        With one key, each haystack has one length and uncut filler, as in the classic passkey prompt, and
        there are `count` for every length.
        """
        writer = Writer(tokenizer)
        plans = [self]
        if self.keys == 1:
            plans = [self.at([length]) for length in self.lengths]
        for plan in plans:
            for index in range(self.count):
                yield plan.haystack(index, writer)

    def haystack(self, index: int, writer: Writer) -> Haystack:
        """Return the haystack with an index from 0, for all lengths."""
        return _Page(self, writer, index).haystack()

    def at(self, lengths: Sequence[int]) -> Haystacks:
        """Return the same settings with other lengths."""
        return replace(self, lengths=lengths)

    def feasible(
        self, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[list[int], list[Haystack], RopepatchError | None]:
        """Return the lengths with room in all haystacks, these, and the error for the longest of the others."""
        reason = None
        for number in range(len(self.lengths)):
            roomy = self.at(self.lengths[number:])
            try:
                return list(roomy.lengths), list(roomy.make(tokenizer)), reason
            except RopepatchError as error:
                reason = error
        return [], [], reason


class Writer:
    """Tokenises texts as parts of a longer text."""

    ANCHOR = "a"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        (self._anchor,) = encode(tokenizer, [self.ANCHOR])
        self._known: dict[str, list[int]] = {}

    def begin(self, text: str) -> list[int]:
        """Return the tokens of the beginning of a text, after the beginning-of-sequence token if any."""
        (ids,) = encode(self._tokenizer, [text])
        first = self._tokenizer.bos_token_id
        return ids if first is None or ids[:1] == [first] else [first, *ids]

    def follow(self, text: str) -> list[int]:
        """Return the tokens of a text that follows other text."""
        if text not in self._known:
            (ids,) = encode(self._tokenizer, [self.ANCHOR + text])
            size = len(self._anchor)
            if ids[:size] != self._anchor:
                raise RopepatchError(
                    f"the tokenizer joins {text[:40]!r} to the text before it"
                )
            self._known[text] = ids[size:]
        return self._known[text]

    def ask(self, kind: str, text: str, answer: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a question and of its answer."""
        question, whole = self.follow(text), self.follow(f"{text} {answer}")
        tokens = whole[len(question) :]
        is_apart = whole[: len(question)] == question
        written = str(self._tokenizer.decode(tokens)).replace(" ", "")
        is_written = written.casefold() == answer.casefold()
        if not is_apart or not is_written or self._tokenizer.unk_token_id in whole:
            raise RopepatchError(
                f"the tokenizer cannot write a question of the kind {kind}, or its answer {answer!r} apart",
                hint="choose another kind",
            )
        return question, tokens


class _Key(NamedTuple):
    """A fact of a haystack under construction."""

    question: Question  # its end is set when the last needle is written
    stretch: int  # the part beyond the next shorter length
    depths: tuple[float, float]  # of its needles in the stretch, from 0 to 1
    needles: tuple[str, ...]


class _Page:
    """Builder of one haystack."""

    def __init__(self, plan: Haystacks, writer: Writer, index: int) -> None:
        self._plan, self._writer, self._index = plan, writer, index
        seed = seed_of("haystack", plan.seed, plan.lengths[-1], index)
        self._draw = random.Random(seed)
        self._ids: list[int] = []
        self._quotable: list[bool] = []  # whether each token may be part of a quote

    def haystack(self) -> Haystack:
        plan, keys = self._plan, self._keys()
        intro = {"passkey": PASSKEY.intro, QUOTE: ""}.get("".join(plan.kinds), INTRO)
        if plan.pool is not KINDS:
            intro = ""
        self._ids = self._writer.begin(plan.chat[0] + intro)
        room = max(len(key.question) for key in keys)
        stops = {length: length - room for length in plan.lengths}
        text = self._sentences(plan.texts or [])
        self._quotable = [False] * len(self._ids)
        places = [len(self._ids), *stops.values()]
        for stretch, (length, stop) in enumerate(stops.items()):
            own = [key for key in keys if key.stretch == stretch]
            self._fill(length, stop, own, text if plan.texts else self._filler())
        for key in keys:
            if key.question.kind == QUOTE:
                self._quote(key, *places[key.stretch : key.stretch + 2])
        return Haystack(torch.tensor(self._ids), stops, self._asked(keys))

    def _keys(self) -> list[_Key]:
        """Draw the keys of each kind."""
        places = {kind: list(self._places()) for kind in self._plan.kinds}
        keys = []
        for kind, of_kind in places.items():
            items = self._plan.pool[kind].draw(self._draw, len(of_kind))
            for place, item in zip(of_kind, items, strict=True):
                ids, answer = map(torch.tensor, self._asked_of(kind, item))
                keys.append(_Key(Question(kind, ids, answer), *place, item.needles))
        return keys

    def _asked_of(self, kind: str, item: Item) -> tuple[list[int], list[int]]:
        """Return the tokens of a question and of its answer; of a quote as many, which are chosen later."""
        between = self._plan.chat[1]
        if kind != QUOTE:
            text = f" {item.question}{between}{item.stem}"
            return self._writer.ask(kind, text, item.answer)
        before = self._writer.follow(between) if between.strip() else []
        return [*before, *[0] * GIVEN], [0] * QUOTED

    def _quote(self, key: _Key, begin: int, end: int) -> None:
        """Choose the passage of a key between two places: the nearest to its depth that can be quoted.

        It is text alone, its first tokens stand nowhere else in the haystack, and no other quote overlaps it.
        """
        size = GIVEN + QUOTED
        first = begin + round(key.depths[0] * (end - size - begin))
        places = sorted(
            range(begin, end - size + 1), key=lambda place: abs(place - first)
        )
        ids, question = torch.tensor(self._ids), key.question
        for place in places:
            if not all(self._quotable[place : place + size]):
                continue
            same = (ids.unfold(0, GIVEN, 1) == ids[place : place + GIVEN]).all(1)
            if int(same.sum()) == 1:
                middle = place + GIVEN
                question.ids[-GIVEN:] = ids[place:middle]
                question.answer = ids[middle : place + size].clone()
                question.end = place + size
                self._quotable[place : place + size] = [False] * size
                return
        raise RopepatchError(
            f"a haystack of {len(ids)} tokens has no further passage of {size} tokens that begins as no other",
            hint=f"ask for fewer keys, give a text, or leave out the kind {QUOTE}",
        )

    def _places(self) -> Iterator[tuple[int, tuple[float, float]]]:
        """Spread the keys of a kind evenly over each stretch, or a single key over all haystacks."""
        plan, draw = self._plan, self._draw.random
        if plan.keys == 1:
            yield 0, ((self._index + draw()) / plan.count, draw())
            return
        for stretch, new in enumerate(plan.new):
            for number in range(new):
                yield stretch, ((number + draw()) / new, draw())

    def _fill(
        self, length: int, stop: int, keys: Sequence[_Key], filler: Iterator[list[int]]
    ) -> None:
        """Append needles and filler up to a stop, where a sentence ends.

        The first filler sentences lose their beginning. The built-in filler is taken in reverse order.
        """
        needles = []
        for key in keys:
            for depth, text in zip(key.depths, key.needles, strict=False):
                needles.append((depth, key, self._writer.follow(f" {text}")))
        needles.sort(key=lambda needle: needle[0])
        room = stop - len(self._ids) - sum(len(ids) for _, _, ids in needles)
        if room < 1:
            raise RopepatchError(
                f"a haystack of {length} tokens has no room for {len(needles)} more needles and a question",
                hint=f"it takes {length - room + 1} tokens at least; ask for fewer keys or kinds",
            )
        fill: list[list[int]] = []
        surplus = -room
        while surplus < 0:
            fill.append(next(filler))
            surplus += len(fill[-1])
        # So that its last sentence precedes every question
        if self._plan.texts is None:
            fill.reverse()
        waiting = deque(needles)
        for number, sentence in enumerate([*fill, []]):
            while waiting and round(waiting[0][0] * len(fill)) <= number:
                _, key, ids = waiting.popleft()
                self._ids += ids
                self._quotable += [False] * len(ids)
                key.question.end = len(self._ids)
            cut = min(surplus, len(sentence))
            self._ids += sentence[cut:]
            self._quotable += [True] * (len(sentence) - cut)
            surplus -= cut

    def _asked(self, keys: Sequence[_Key]) -> dict[int, Sequence[Question]]:
        """Return the questions by length: `keys` of each kind, at even depths."""
        asked: dict[int, Sequence[Question]] = {}
        before: dict[str, list[Question]] = {kind: [] for kind in self._plan.kinds}
        for stretch, length in enumerate(self._plan.lengths):
            for kind, old in before.items():
                new = [
                    key.question
                    for key in keys
                    if (key.question.kind, key.stretch) == (kind, stretch)
                ]
                wanted = min(len(old), self._plan.keys - len(new))
                shift = self._draw.random()  # so that many haystacks cover every depth
                places = [int((at + shift) * len(old) / wanted) for at in range(wanted)]
                kept = [old[place] for place in places]
                before[kind] = sorted(kept + new, key=lambda question: question.end)
            asked[length] = list(chain.from_iterable(before.values()))
        return asked

    def _filler(self) -> Iterator[list[int]]:
        """Yield the tokenised sentences of the built-in filler endlessly, the last one first."""
        sentences = [f" {sentence}" for sentence in reversed(PASSKEY.filler)]
        return cycle([self._writer.follow(sentence) for sentence in sentences])

    def _sentences(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Yield tokenised sentences of the user's texts endlessly."""
        wanted = CHARACTERS * self._plan.lengths[-1]
        for number in count(self._index):
            text = texts[number % len(texts)]
            begin = self._draw.randrange(max(1, len(text) - wanted))
            for sentence in sentences(text[begin : begin + wanted]):
                yield self._writer.follow(f" {sentence}")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text, each on one line, very long ones in pieces."""
    for sentence in SENTENCE.split(text):
        line = " ".join(sentence.split())
        yield from (
            line[at : at + LONGEST].strip() for at in range(0, len(line), LONGEST)
        )
