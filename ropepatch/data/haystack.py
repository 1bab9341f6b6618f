"""Haystacks: long texts with many needles, processed once and queried at several lengths.

Attention is causal, so the first l tokens of a haystack are a haystack of l tokens. One haystack serves all
lengths. At each length it has questions of every kind, spread evenly over the depth.

Shapes: N tokens of a haystack, Q of a question, A of an answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle, product
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

THINGS = tuple(
    f"the {quality} {thing}"
    for thing, quality in product(
        (
            "kettle",
            "gate",
            "ferry",
            "lamp",
            "bridge",
            "ledger",
            "tower",
            "wagon",
            "clock",
            "barn",
        ),
        (
            "blue",
            "copper",
            "northern",
            "old",
            "glass",
            "iron",
            "silver",
            "garden",
            "paper",
            "oak",
        ),
    )
)
STEMS = (
    "The safe behind the mirror opens with",
    "Her first telephone number was",
    "The parcel from Lisbon is marked",
    "On the back of the photograph somebody wrote",
    "The night train to Vienna carries the number",
    "Grandmother's piano was sold for",
    "The lottery ticket that won bears the number",
    "In the census of that year the town had people to the number of",
    "The captain's cabin is insured as item",
    "To call the lighthouse, dial",
    "The museum lists the broken vase as",
    "His library card ends in",
    "The observatory counted stars, in all",
    "The winning horse wore a tag with",
    "The recipe is filed in the archive under",
    "The swimming bath gave out lockers up to",
    "The engine of the tractor is stamped",
    "For the wedding the bakery made rolls, altogether",
    "The meteorite weighs, in grams,",
    "The patent on the umbrella has the number",
    "The pharmacist keeps the poison in jar",
    "The choir's visa application was",
    "The bicycle was registered as",
    "The depth of the mine, in inches, is",
    "The manuscript was returned with the stamp",
    "The satellite is catalogued as",
    "The dentist's invoice came to",
    "The seed bank stores the rarest barley in tray",
    "The theatre sold tickets for the premiere:",
    "The gravestone of the unknown soldier shows",
    "The beekeeper estimated bees in the hive:",
    "The code for the laundry room is",
    "The atlas marks the lost village with",
    "The referee's whistle has the serial number",
    "The bottle thrown overboard held a note that said only",
    "The elevator was last inspected under permit",
    "The violin in the window costs",
    "The prisoner in the tale is called only",
    "The old calculator still shows",
    "The volcano's last eruption threw stones, counted by a monk:",
    "The bridge toll for an elephant was fixed at",
    "The cookbook gives the oven's setting as",
    "The diver read on the anchor the figure",
    "In the hotel the lost umbrella is kept under",
    "The glacier moved, in millimetres,",
    "The chess champion's membership card says",
    "The rainfall of that April, in buckets, was",
    "The weaver needed threads for the tapestry:",
    "The postman's route through the valley takes steps, namely",
    "The radio play was broadcast on channel",
    "The oldest oak in the park wears the plate",
    "The magician's trunk was shipped as freight",
)
PEOPLE = (
    "Agnes",
    "Bruno",
    "Clara",
    "Doris",
    "Edgar",
    "Flora",
    "Greta",
    "Hugo",
    "Ivan",
    "Jonas",
    "Karin",
    "Laura",
    "Martin",
    "Nora",
    "Oscar",
    "Paula",
    "Robert",
    "Simon",
    "Tessa",
    "Walter",
    "Alice",
    "Anton",
    "Beate",
    "Boris",
    "Carla",
    "Conrad",
    "Daniel",
    "Diana",
    "Elena",
    "Esther",
    "Felix",
    "Fiona",
    "Frank",
    "George",
    "Gloria",
    "Hannah",
    "Harold",
    "Henry",
    "Jacob",
    "Julia",
    "Kevin",
    "Linda",
    "Lucas",
    "Ludwig",
    "Maria",
    "Marta",
    "Miriam",
    "Nathan",
    "Olivia",
    "Peter",
    "Petra",
    "Rachel",
    "Ralph",
    "Sarah",
    "Sophie",
    "Stefan",
    "Theresa",
    "Thomas",
    "Ursula",
    "Victor",
    "Wanda",
    "William",
    "Yvonne",
    "Zelda",
)
FACTS = (  # a sentence about a person, and a question it answers without sharing a word
    ("{name} keeps three hives behind the barn.", "Who could sell honey?"),
    ("{name} sleeps by day and guards the gate until dawn.", "Who works at night?"),
    ("{name} was born in a house beside the Eiffel Tower.", "Who comes from Paris?"),
    ("{name} pulls aching teeth for a few coins.", "Who is the dentist?"),
    ("{name} has never eaten meat or fish.", "Who is a vegetarian?"),
    ("{name} needs a white cane to cross the street.", "Who cannot see?"),
    ("{name} crossed the finish line before all other runners.", "Who won the race?"),
    (
        "{name} spent last summer among the pyramids by the Nile.",
        "Who has been to Egypt?",
    ),
    ("{name} sings the lowest part in the choir.", "Whose voice is a bass?"),
    ("{name} buried a husband two winters ago.", "Who is a widow?"),
    ("{name} shoes every horse in the valley.", "Who is the blacksmith?"),
    ("{name} sneezes whenever a cat is near.", "Who has an allergy to pets?"),
    ("{name} bakes loaves and rolls before sunrise.", "Who supplies bread?"),
    ("{name} cuts and combs the hair of half the village.", "Who is the barber?"),
    ("{name} mends boots with a hammer and wax thread.", "Who is the cobbler?"),
    ("{name} chalks sums on the wall for thirty children.", "Who is the teacher?"),
    ("{name} hands out parcels and stamps letters.", "Who runs the post office?"),
    ("{name} put on a gold ring and left church arm in arm.", "Who got married?"),
    ("{name} rocks a newborn in the cradle.", "Who is a young parent?"),
    ("{name} steers a ship across the ocean.", "Who is the captain?"),
    ("{name} rises at five to milk the herd.", "Who owns cows?"),
    ("{name} argues for the accused in court.", "Who is the lawyer?"),
    ("{name} wears a badge and arrests thieves.", "Who serves in the police?"),
    ("{name} climbs ladders with a hose when a roof burns.", "Who fights fires?"),
    ("{name} paints portraits in oil.", "Who is an artist?"),
    ("{name} writes verses that rhyme.", "Who is a poet?"),
    ("{name} was crowned in the cathedral.", "Who is the monarch?"),
    ("{name} moves the queen and says checkmate.", "Who plays chess?"),
    ("{name} lost every strand on the head years ago.", "Who is bald?"),
    ("{name} turned a hundred in May.", "Who has lived for a century?"),
    ("{name} bends at every doorway so as not to bump.", "Who is very tall?"),
    ("{name} reads lips, for all is silent.", "Who is deaf?"),
    ("{name} walks with crutches since the fall.", "Who broke a leg?"),
    ("{name} lies awake from dusk till morning.", "Who suffers from insomnia?"),
    ("{name} owes money to each bank in town.", "Who is in debt?"),
    ("{name} has more mansions than fingers.", "Who is rich?"),
    ("{name} begs for pennies on the bridge.", "Who is poor?"),
    ("{name} flies a plane over the Alps.", "Who is a pilot?"),
    ("{name} floated weightless in orbit.", "Who is an astronaut?"),
    ("{name} heats sand until it is glass.", "Who makes bottles?"),
    ("{name} weaves cloth upon a loom.", "Who produces fabric?"),
    ("{name} grinds grain between two stones.", "Who is the miller?"),
    ("{name} digs coal far below the surface.", "Who is the miner?"),
    ("{name} fells pines with an axe.", "Who is a lumberjack?"),
    ("{name} casts nets from a small boat.", "Who catches herring?"),
    ("{name} speaks only Mandarin.", "Who is from China?"),
    ("{name} grew up in the shadow of Mount Fuji.", "Who is Japanese?"),
    ("{name} waltzes better than anyone in the ballroom.", "Who can dance?"),
    ("{name} strokes a bow over four strings.", "Who is a violinist?"),
    ("{name} pounds eighty-eight keys of ivory.", "Who is a pianist?"),
    ("{name} develops films in a red darkroom.", "Who uses a camera?"),
    ("{name} sorts thousands of books on shelves.", "Who is the librarian?"),
    ("{name} mixes pills and syrups at the counter.", "Who is the pharmacist?"),
    ("{name} nailed the beams of our new stable.", "Who is a carpenter?"),
    ("{name} plants tulips and trims hedges.", "Who is the gardener?"),
    ("{name} stole the silver and sits in a cell.", "Who is a prisoner?"),
    ("{name} translates Latin and Greek.", "Who knows old languages?"),
    ("{name} fixes leaking pipes.", "Who is the plumber?"),
    ("{name} swam the Channel in eleven hours.", "Who is an athlete in water?"),
    ("{name} trembles whenever a spider is near.", "Who has a phobia of insects?"),
    ("{name} adds sugar to everything.", "Who likes sweets?"),
    ("{name} forecasts rain and storms.", "Who studies the weather?"),
    ("{name} measures stars through a telescope.", "Who is an astronomer?"),
    ("{name} pours wine for the guests of the inn.", "Who is the waiter?"),
)
DEFAULT = ("number", "sentence", "chain", "fact")  # the kinds used by default


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


def _numbers(draw: random.Random, count: int) -> list[str]:
    return [f"{number:05}" for number in draw.sample(range(10**PASSKEY.digits), count)]


def _passkey(draw: random.Random, count: int) -> list[Item]:
    question, _, stem = PASSKEY.question.partition("? ")
    return [
        Item((PASSKEY.needle.replace("{key}", key),), f"{question}?", stem, key)
        for key in _numbers(draw, count)
    ]


def _named(draw: random.Random, count: int) -> list[Item]:
    return [
        Item(
            (f"The number of {thing} is {key}.",),
            f"What is the number of {thing}?",
            stem,
            key,
        )
        for thing, key in zip(
            draw.sample(THINGS, count), _numbers(draw, count), strict=True
        )
        for stem in (f"The number of {thing} is",)
    ]


def _sentence(draw: random.Random, count: int) -> list[Item]:
    return [
        Item((f"{stem} {key}.",), "One of these sentences again.", stem, key)
        for stem, key in zip(
            draw.sample(STEMS, count), _numbers(draw, count), strict=True
        )
    ]


def _chain(draw: random.Random, count: int) -> list[Item]:
    things = draw.sample(THINGS, 2 * count)
    return [
        Item(
            (f"The code of {one} is {key}.", f"For {other}, take the code of {one}."),
            f"Which code does {other} need?",
            f"The code for {other} is",
            key,
        )
        for one, other, key in zip(
            things[::2], things[1::2], _numbers(draw, count), strict=True
        )
    ]


def _fact(draw: random.Random, count: int) -> list[Item]:
    return [
        Item(
            (sentence.replace("{name}", name),),
            question,
            "The name of this person is",
            name,
        )
        for (sentence, question), name in zip(
            draw.sample(FACTS, count), draw.sample(PEOPLE, count), strict=True
        )
    ]


KINDS: Mapping[str, Kind] = {
    "passkey": Kind(_passkey, 1, "the one number of the text"),
    "number": Kind(_named, len(THINGS), "a number by the name of a thing"),
    "sentence": Kind(_sentence, len(STEMS), "a number by the sentence that it ends"),
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
}


@dataclass(frozen=True, eq=False)
class Question:
    """A question in tokens."""

    kind: str  # a name from `KINDS`
    ids: Tensor  # [Q], the question and the beginning of its answer
    answer: Tensor  # [A], the rest of the answer, which is scored
    end: int  # the position in the haystack after the last needle that the answer needs

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
        chat: Text of a chat template before a user's message, and between the message and the answer.
    """

    lengths: Sequence[int]
    count: int
    keys: int
    kinds: Sequence[str]
    seed: int = 0
    texts: Sequence[str] | None = None
    chat: tuple[str, str] = ("", " ")

    def __post_init__(self) -> None:
        refuse_unknown(self.kinds, KINDS, "kind")
        lengths = sorted(set(self.lengths))
        if (
            not lengths
            or lengths[0] < 1
            or self.count < 1
            or self.keys < 1
            or not self.kinds
        ):
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
        for kind in self.kinds:
            if (needed := sum(self.new)) > (most := KINDS[kind].most):
                raise RopepatchError(
                    f"{self.keys} keys of the kind {kind} take {needed} at these lengths, there are {most}",
                    hint="ask for fewer keys or lengths, or another kind",
                )

    @classmethod
    def by_default(
        cls, tokenizer: PreTrainedTokenizerBase, within: int, **settings: Any
    ) -> tuple[Haystacks, dict[str, str]]:
        """Return haystacks with the possible kinds of `DEFAULT`, and the reason for each other kind.

        Args:
            tokenizer: The tokenizer of the model.
            within: The length in tokens into which all kinds must fit.
            **settings: All settings except the kinds.

        Raises:
            RopepatchError: If no kind is possible.
        """
        kinds: list[str] = []
        reasons: dict[str, RopepatchError] = {}
        for kind in DEFAULT:
            try:
                plan = cls(**settings | {"texts": None}, kinds=(*kinds, kind))
                for _ in plan.at([within]).make(tokenizer):
                    pass
                kinds.append(kind)
            except RopepatchError as error:
                reasons[kind] = error
        if not kinds:
            raise reasons[DEFAULT[0]]
        return cls(**settings, kinds=tuple(kinds)), {
            kind: str(error) for kind, error in reasons.items()
        }

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
        plans = (
            [self.at([length]) for length in self.lengths] if self.keys == 1 else [self]
        )
        for plan in plans:
            seeds = [
                seed_of("haystack", plan.seed, plan.lengths[-1], index)
                for index in range(self.count)
            ]
            pages = [_Page(plan, writer, *seed) for seed in enumerate(seeds)]
            writer.follow([text for page in pages for text in page.texts])
            for page in pages:
                yield page.haystack

    def haystack(self, index: int, writer: Writer) -> Haystack:
        """Return the haystack with an index from 0, for all lengths."""
        seed = seed_of("haystack", self.seed, self.lengths[-1], index)
        return _Page(self, writer, index, seed).haystack

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
        self._begun: dict[str, list[int]] = {}

    def begin(self, text: str) -> list[int]:
        """Return the tokens of the beginning of a text, after the beginning-of-sequence token if any."""
        if text not in self._begun:
            (self._begun[text],) = encode(self._tokenizer, [text])
        ids, first = [*self._begun[text]], self._tokenizer.bos_token_id
        return ids if first is None or ids[:1] == [first] else [first, *ids]

    def follow(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts that follow other text."""
        unknown = [text for text in dict.fromkeys(texts) if text not in self._known]
        anchored = [self.ANCHOR + text for text in unknown]
        encoded = encode(self._tokenizer, anchored) if unknown else []
        for text, ids in zip(unknown, encoded, strict=True):
            if ids[: len(self._anchor)] != self._anchor:
                raise RopepatchError(
                    f"the tokenizer joins {text[:40]!r} to the text before it"
                )
            self._known[text] = ids[len(self._anchor) :]
        return [self._known[text] for text in texts]

    def ask(self, kind: str, text: str, answer: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a question and of its answer."""
        (question, whole) = self.follow([text, f"{text} {answer}"])
        if whole[: len(question)] != question:
            raise RopepatchError(
                f"the tokenizer joins a question of the kind {kind} to its answer",
                hint="choose another kind",
            )
        tokens = whole[len(question) :]
        written = str(self._tokenizer.decode(tokens)).replace(" ", "")
        if (
            self._tokenizer.unk_token_id in whole
            or written.casefold() != answer.casefold()
        ):
            raise RopepatchError(
                f"the tokenizer cannot write a question of the kind {kind}, or its answer {answer!r}",
                hint="choose another kind",
            )
        return question, tokens


@dataclass(eq=False)
class _Key:
    """A fact and its position in a haystack under construction."""

    kind: str
    stretch: int  # the part beyond the next shorter length
    depths: tuple[float, float]  # of its needles in the stretch, from 0 to 1
    item: Item
    text: str  # of the question, with the beginning of the answer
    end: int = 0  # of its last needle, set when it is written


class _Page:
    """Builder of one haystack."""

    def __init__(self, plan: Haystacks, writer: Writer, index: int, seed: int) -> None:
        self._plan, self._writer, self._index = plan, writer, index
        self._draw = random.Random(seed)
        self._ids: list[int] = []
        self._keys = self._drawn()

    @property
    def texts(self) -> Iterator[str]:
        """All texts that it tokenises, except the text around the needles."""
        for key in self._keys:
            yield from (f" {needle}" for needle in key.item.needles)
            yield from (key.text, f"{key.text} {key.item.answer}")

    @property
    def haystack(self) -> Haystack:
        plan, writer, keys = self._plan, self._writer, self._keys
        asked = {key: writer.ask(key.kind, key.text, key.item.answer) for key in keys}
        before = plan.chat[0]
        self._ids = writer.begin(
            before + (PASSKEY.intro if tuple(plan.kinds) == ("passkey",) else INTRO)
        )
        room = max(len(text) + len(answer) for text, answer in asked.values())
        stops = {length: length - room for length in plan.lengths}
        text = self._sentences(plan.texts or [])
        for stretch, length in enumerate(plan.lengths):
            ours = cycle(writer.follow([f" {one}" for one in reversed(PASSKEY.filler)]))
            own = [key for key in keys if key.stretch == stretch]
            self._fill(length, stops[length], own, text if plan.texts else ours)
        questions = {
            key: Question(key.kind, torch.tensor(text), torch.tensor(answer), key.end)
            for key, (text, answer) in asked.items()
        }
        return Haystack(torch.tensor(self._ids), stops, self._asked(questions))

    def _drawn(self) -> list[_Key]:
        """Spread the keys of each kind evenly over each stretch, or a single key over all haystacks."""
        plan, between = self._plan, self._plan.chat[1]
        single = plan.keys == 1
        places: dict[str, list[tuple[int, tuple[float, float]]]] = {
            kind: [] for kind in plan.kinds
        }
        for of_kind in places.values():
            for stretch, new in enumerate(plan.new):
                for number in range(new):
                    first, parts = (
                        (self._index, plan.count) if single else (number, new)
                    )
                    depths = (first + self._draw.random()) / parts, self._draw.random()
                    of_kind.append((stretch, depths))
        items = {
            kind: KINDS[kind].draw(self._draw, len(of_kind))
            for kind, of_kind in places.items()
        }
        return [
            _Key(kind, *place, item, f" {item.question}{between}{item.stem}")
            for kind, of_kind in places.items()
            for place, item in zip(of_kind, items[kind], strict=True)
        ]

    def _fill(
        self, length: int, stop: int, keys: Sequence[_Key], filler: Iterator[list[int]]
    ) -> None:
        """Append needles and filler up to a stop, where a sentence ends.

        The first filler sentences lose their beginning. The built-in filler is taken in reverse order.
        """
        pairs = (
            (d, key, text)
            for key in keys
            for d, text in zip(key.depths, key.item.needles, strict=False)
        )
        needles = sorted(pairs, key=lambda needle: needle[0])
        written = self._writer.follow([f" {text}" for _, _, text in needles])
        room = stop - len(self._ids) - sum(map(len, written))
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
        waiting = list(zip(needles, written, strict=True))
        for number, sentence in enumerate([*fill, []]):
            while waiting and (
                round(waiting[0][0][0] * len(fill)) <= number or number == len(fill)
            ):
                (_, key, _), tokens = waiting.pop(0)
                self._ids += tokens
                key.end = len(self._ids)
            cut = min(surplus, len(sentence))
            self._ids += sentence[cut:]
            surplus -= cut

    def _asked(
        self, questions: Mapping[_Key, Question]
    ) -> dict[int, Sequence[Question]]:
        """Return the questions by length: `keys` of each kind, at even depths."""
        asked: dict[int, Sequence[Question]] = {}
        before: dict[str, list[Question]] = {kind: [] for kind in self._plan.kinds}
        for stretch, length in enumerate(self._plan.lengths):
            for kind, old in before.items():
                new = [
                    q
                    for key, q in questions.items()
                    if (key.kind, key.stretch) == (kind, stretch)
                ]
                wanted = min(len(old), self._plan.keys - len(new))
                shift = self._draw.random()  # so that many haystacks cover every depth
                kept = [
                    old[int((at + shift) * len(old) / wanted)] for at in range(wanted)
                ]
                before[kind] = sorted(kept + new, key=lambda question: question.end)
            asked[length] = [
                question for of_kind in before.values() for question in of_kind
            ]
        return asked

    def _sentences(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Yield tokenised sentences of the user's texts endlessly."""
        wanted = CHARACTERS * self._plan.lengths[-1]
        for number in count(self._index):
            text = texts[number % len(texts)]
            begin = self._draw.randrange(max(1, len(text) - wanted))
            for sentence in sentences(text[begin : begin + wanted]):
                yield self._writer.follow([f" {sentence}"])[0]


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text, each on one line, very long ones in pieces."""
    for sentence in SENTENCE.split(text):
        line = " ".join(sentence.split())
        yield from (
            line[at : at + LONGEST].strip() for at in range(0, len(line), LONGEST)
        )
