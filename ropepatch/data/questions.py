"""What the retrieval tasks say and ask, in our own words: each kind is a function that draws a question.

Five kinds carry the name of a task of RULER (arXiv:2404.06654) that asks for the same; their docstrings say
what differs. All of them differ in this: filler and words are ours, keys have five digits, and a prompt has
its length in the model's own tokens.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ropepatch.data.prompts import Needle, Page, draw_needles
from ropepatch.data.question_words import FACTS, LISTED, PEOPLE, TEMPLATES, Template
from ropepatch.data.templates import PasskeyTemplate
from ropepatch.settings import seed_of

OTHERS = 3  # needles that are not asked for
VALUES = 3  # keys of one name
QUERIES = 3  # names that are asked for at once
CHAINS, HOPS = 3, 2  # chains of names in a text, and how many steps from the last name to the key
FREQUENT = 3  # words that are asked for
EVERY = 48  # tokens of the prompt for each time that a frequent word stands in it
DIGITS = r"\d+"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a prompt says, what it asks, and what counts as an answer.

    Attributes:
        intro: Says what to look for.
        filler: Sentences that are repeated, as many as fill the length.
        needles: The text and the depth of each.
        text: The question.
        answers: How each answer begins, and the answer.
        wanted: What is to be said; each counts.
        parse: A regular expression that finds in an answer what may be wanted.
    """

    intro: str
    filler: Sequence[str]
    needles: Sequence[tuple[str, float]]
    text: str
    answers: Sequence[tuple[str, str]]
    wanted: Sequence[str]
    parse: str

    def page(self, title: str, before: str = "", between: str = " ") -> Page:
        """The prompt, with what a chat template puts before it, and between question and answer."""
        (begin, answer), *others = self.answers
        return Page(
            intro=before + self.intro,
            filler=self.filler,
            needles=self.needles,
            asked=[(f"{self.text}{between}{begin}", answer), *others],
            title=title,
        )

    def found(self, text: str) -> int:
        """How many of the wanted are among as many different ones that the parser finds first."""
        said = dict.fromkeys(match[0] for match in re.finditer(self.parse, text))
        return len({*[*said][: len(self.wanted)]} & {*self.wanted})


class Place(NamedTuple):
    """Where the needle stands that is asked for, and what else a question is drawn from."""

    depth: float
    length: int
    seed: int


class Kind(NamedTuple):
    """One kind of question.

    Args:
        draw: Draws one.
        chance: The share that is found by who says, without reading what is asked, things that stand in the
            text and may be wanted; of a text with one key alone, any number of five digits.
        wanted: How many things are to be said.
        forced: Whether there is one right answer, which is read by teacher forcing; else one is generated.
        placed: Whether the depth says where the needle stands.
        title: What is asked, in a few words.
    """

    draw: Callable[[Template, Place], Question]
    chance: float
    wanted: int
    forced: bool
    placed: bool
    title: str


def _single(words: Template, place: Place) -> Question:
    """One key: the prompt of `ropepatch.passkey`, as RULER's niah_single.

    RULER generates the answer; here it is forced, which finds the same.
    """
    return _keys(words.passkey(named=False), words, place, others=0)


def _multikey(words: Template, place: Place) -> Question:
    """One of several keys by its name: `ropepatch.passkey` with distractors, as RULER's niah_multikey_1."""
    return _keys(words.passkey(named=True), words, place, others=OTHERS)


def _keys(passkey: PasskeyTemplate, words: Template, place: Place, others: int) -> Question:
    needles = draw_needles(passkey, place.depth, others, place.seed)
    of = f" of {needles[0].name}" if others else ""
    return _asked(
        passkey.intro,
        words,
        [(passkey.say(needle.key, needle.name), needle.depth) for needle in needles],
        f"What is the {words.noun}{of}?",
        [(f"The {words.noun}{of} is", needles[0].key)],
    )


def _multiquery(words: Template, place: Place) -> Question:
    """Several keys, asked for by their names in one question, as RULER's niah_multiquery.

    RULER counts the keys in an answer that is generated; here the order is said, and each is forced after the
    true ones before it.
    """
    needles = draw_needles(words.passkey(named=True), place.depth, OTHERS, place.seed)
    asked = needles[:QUERIES]
    return _asked(
        f"Somewhere on this page there are {words.noun}s. Read on, you will need some.",
        words,
        [(f"The {words.noun} of {needle.name} is {needle.key}.", needle.depth) for needle in needles],
        f"What are the {words.noun}s of {_listed([needle.name for needle in asked])}?",
        [
            (f"{'and the' if at else 'The'} {words.noun} of {needle.name} is", needle.key)
            for at, needle in enumerate(asked)
        ],
    )


def _multivalue(words: Template, place: Place) -> Question:
    """Several keys of one name, in any order, beside the keys of others, as RULER's niah_multivalue.

    RULER has no others here, and counts a key wherever the answer says it; here as many as are asked for
    count.
    """
    needles = draw_needles(words.passkey(named=True), place.depth, VALUES - 1 + OTHERS, place.seed)
    name, mine = needles[0].name, needles[:VALUES]
    named = [Needle(needle.key, needle.depth, name) for needle in mine] + needles[VALUES:]
    keys = [needle.key for needle in mine]
    return _asked(
        f"Somewhere on this page there are {words.noun}s. Read on, you will need some.",
        words,
        [(f"A {words.noun} of {needle.name} is {needle.key}.", needle.depth) for needle in named],
        f"What are all the {words.noun}s of {name}?",
        [(f"The {words.noun}s of {name} are", _listed(keys))],
        wanted=keys,
    )


def _chain(words: Template, place: Place) -> Question:
    """The key at the end of a chain of names, as RULER's vt: b has the key of a, c that of b; c is asked for.

    RULER asks for all names that have the key of one chain; here the key of the last name is asked for, so
    that there is one answer, and the other chains have keys of their own.
    """
    chains, told = draw_chains(words, place.depth, place.seed)
    last = chains[0].names[-1]
    return _asked(
        f"Somewhere on this page there are {words.noun}s. Read on, you will need one.",
        words,
        told,
        f"What is the {words.noun} of {last}?",
        [(f"The {words.noun} of {last} is", chains[0].key)],
    )


def _frequent(words: Template, place: Place) -> Question:
    """The words that stand most often in a list, as RULER's fwe.

    RULER has made-up words whose frequencies fall off by a power; here three words stand equally often and
    about seven times as often as each of the others. Their places are drawn, so the depth says nothing.
    """
    draw = random.Random(place.seed)
    listed = draw.sample(LISTED, len(LISTED))
    frequent, others = listed[:FREQUENT], listed[FREQUENT:]
    times = max(4, place.length // EVERY)
    return Question(
        intro="Here is a long list of words. Some stand in it far more often than all others:",
        filler=[f"{word}," for word in others],
        needles=[(f"{word},", draw.random()) for word in frequent for _ in range(times)],
        text="Which three words stand most often in this list?",
        answers=[("The three most frequent words are", _listed(frequent))],
        wanted=frequent,
        parse=_any_of(LISTED),
    )


def _fact(words: Template, place: Place) -> Question:
    """Who it is, of several people, when no word of the question stands in the sentence that tells it.

    The idea is NoLiMa's (arXiv:2502.05167); its facts, questions and books are others.
    """
    draw = random.Random(place.seed)
    facts, people = draw.sample(FACTS, 1 + OTHERS), draw.sample(PEOPLE, 1 + OTHERS)
    depths = [place.depth, *(draw.random() for _ in range(OTHERS))]
    told = [fact.sentence.replace("{name}", name) for fact, name in zip(facts, people, strict=True)]
    return Question(
        intro="Some people live in these lines. Read on, one of them will be asked about.",
        filler=words.filler,
        needles=list(zip(told, depths, strict=True)),
        text=facts[0].question,
        answers=[("The name of this person is", people[0])],
        wanted=people[:1],
        parse=_any_of(PEOPLE),
    )


class Chain(NamedTuple):
    """Names of which each has the key of the one before it, and that of the first."""

    names: Sequence[str]
    key: str


def draw_chains(words: Template, depth: float, seed: int) -> tuple[list[Chain], list[tuple[str, float]]]:
    """Chains of names, the first of which begins at a depth, and the sentences that tell them."""
    draw = random.Random(seed)
    keys = [needle.key for needle in draw_needles(words.passkey(named=True), 0, CHAINS - 1, seed)]
    names = draw.sample(words.names, CHAINS * (HOPS + 1))
    chains: list[Chain] = []
    told: list[tuple[str, float]] = []
    for at, key in enumerate(keys):
        own = names[at * (HOPS + 1) : (at + 1) * (HOPS + 1)]
        begin = draw.random() if at else depth
        depths = sorted((begin + (1 - begin) * draw.random() for _ in range(HOPS)), reverse=True)
        links = [f"{_capital(c)} has the {words.noun} of {b}." for b, c in pairwise(own)]
        told += zip(links[::-1], depths, strict=True)  # of those at one place, the last comes first
        told.append((f"The {words.noun} of {own[0]} is {key}.", begin))
        chains.append(Chain(own, key))
    return chains, told


KINDS: Mapping[str, Kind] = {
    "niah_single": Kind(_single, 1e-5, 1, True, True, "one key"),
    "niah_multikey": Kind(_multikey, 1 / (1 + OTHERS), 1, True, True, "one of several keys, by its name"),
    "niah_multivalue": Kind(
        _multivalue, VALUES / (VALUES + OTHERS), VALUES, False, True, "all keys of one name, in any order"
    ),
    "niah_multiquery": Kind(_multiquery, 1 / (1 + OTHERS), QUERIES, True, True, "the keys of several names"),
    "vt": Kind(_chain, 1 / CHAINS, 1, True, True, "the key at the end of a chain of names"),
    "fwe": Kind(
        _frequent, FREQUENT / len(LISTED), FREQUENT, False, False, "the most frequent words of a list"
    ),
    "fact": Kind(_fact, 1 / (1 + OTHERS), 1, True, True, "a fact that shares no word with the question"),
}


def draw_question(kind: str, template: str, *, length: int, depth: float, trial: int, seed: int) -> Question:
    """The question of one trial, which follows from these alone.

    Those of niah_single are the keys of `ropepatch.passkey`.
    """
    label = "passkey" if kind == "niah_single" else kind
    place = Place(depth, length, seed_of(label, seed, length, depth, trial))
    return KINDS[kind].draw(TEMPLATES[template], place)


def _asked(
    intro: str,
    words: Template,
    needles: Sequence[tuple[str, float]],
    text: str,
    answers: Sequence[tuple[str, str]],
    wanted: Sequence[str] | None = None,
) -> Question:
    """A question for keys."""
    return Question(
        intro=intro,
        filler=words.filler,
        needles=needles,
        text=text,
        answers=answers,
        wanted=[answer for _, answer in answers] if wanted is None else wanted,
        parse=DIGITS,
    )


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _any_of(words: Sequence[str]) -> str:
    return rf"\b({'|'.join(words)})\b"
