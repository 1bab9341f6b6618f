"""The rows that the bundled checkpoint is trained on, each drawn from a seed of its own.

Shapes: T tokens of a row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropepatch.data.documents import BOS, EOS, GeneratedDocument, copying
from ropepatch.data.prompts import Page, Prompt, draw_needles, needle_prompt, page_prompt
from ropepatch.data.question_words import TEMPLATES
from ropepatch.data.questions import CHAINS, HOPS, OTHERS, draw_chains
from ropepatch.data.templates import NAMED
from ropepatch.data.tiny.corpus import Narrator
from ropepatch.data.tiny.grammar import SENTENCES, Sentence
from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # the label of a token that is not trained on
FEW, CASTS = 6, 64  # subjects of the tales that train recall, and how many sets of them
SHORTEST_COPY = 4  # tokens of the sequence
SHORTEST_KEY = 5  # tokens of a sentence that tells one
SHORT = 32  # tokens of a row of links for each way to say it, and for each digit of a key
PAIRS = 4, 8  # how many
MOST = 12  # names of a row of links
TOLD = (0.5, 0.75, 1.0)  # how often another is told of where one may be asked
LINKED = 0.66  # how often another has the key of one before
LINKS = ("{name} has {other}", "{name} has {other}", "{name} has the pass key of {other}")  # of each saying
SAYINGS = ("{name}", "{name} is", "the pass key of {name} is")  # what stands before a key
SHORTEST_PASSKEY = 80  # tokens: intro, two or three filler sentences, needle, question and answer

Row = tuple[Tensor, Tensor]  # ids and labels, [T] each


@dataclass(frozen=True, eq=False)
class Stock:
    """What rows are made from.

    Attributes:
        vocab_size: How many tokens the tokenizer has.
        narrator: Tells of all subjects.
        casts: Narrators of a few subjects each.
        stories: The texts in tokens, one after the other, each after a beginning-of-sequence token.
    """

    vocab_size: int
    narrator: Narrator
    casts: Sequence[Narrator]
    stories: Tensor

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Stock:
        """The stock in the tokens of a tokenizer."""
        # verbose=False: no warning about texts longer than model_max_length.
        encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids if texts else []
        return cls(
            vocab_size=len(tokenizer),
            narrator=Narrator(tokenizer),
            casts=[Narrator(tokenizer, _about(FEW, seed)) for seed in range(CASTS)],
            stories=torch.tensor([token for ids in encoded for token in (BOS, *ids)], dtype=torch.long),
        )


def strings(stock: Stock, length: int, seed: int) -> Row:
    """One random string, then the same again; trained on the second and on what ends it."""
    half = (length - 2) // 2
    ids = copying(half, stock.vocab_size, seed).ids[:length]
    return ids, torch.cat([torch.full((half + 2,), IGNORED), ids[half + 2 :]])


def copies(stock: Stock, length: int, seed: int) -> Row:
    """Random strings of any length, each with its repetition, on end."""
    draw = random.Random(seed)
    longest = (length - 3) // 2
    if longest < SHORTEST_COPY:
        raise RopepatchError(f"a row of copies takes {2 * SHORTEST_COPY + 3} tokens, got {length}")
    documents: list[Tensor] = []
    while sum(map(len, documents)) < length:
        half = draw.randint(SHORTEST_COPY, longest)
        documents.append(copying(half, stock.vocab_size, draw.getrandbits(64)).ids)
    return _all(torch.cat(documents)[:length])


def passkey(stock: Stock, length: int, seed: int) -> Row:
    """A passkey prompt with its answer; every other one is shorter than the row and followed by a tale."""
    if length < SHORTEST_PASSKEY:
        raise RopepatchError(f"a row of passkey takes {SHORTEST_PASSKEY} tokens, got {length}")
    draw = random.Random(seed)
    shorter = draw.random() < 0.5
    tokens = draw.randint(SHORTEST_PASSKEY, length) if shorter else length
    prompt = stock.narrator.passkey(tokens, draw.getrandbits(64)).ids
    return _all(torch.cat([prompt, stock.narrator.tale(length, draw.getrandbits(64)).ids])[:length])


def pairs(stock: Stock, length: int, seed: int) -> Row:
    """Random tokens, each with a digit of its own, again and again; trained on those that stood before."""
    draw = random.Random(seed)
    digits = [tokens[-1] for tokens in stock.narrator.encode([f" {digit}" for digit in range(10)])]
    names = draw.sample(range(EOS + 1, stock.vocab_size), draw.randint(*PAIRS))
    held: dict[int, int] = {}
    ids, labels = [BOS], [IGNORED]
    while len(ids) < length:
        name = draw.choice(names)
        labels += [IGNORED, held.get(name, IGNORED)]
        ids += [name, held.setdefault(name, draw.choice(digits))]
    return torch.tensor(ids[:length]), torch.tensor(labels[:length])


def links(stock: Stock, length: int, seed: int) -> Row:
    """Keys, names that have the key of one before, and questions for them; trained on the answers alone.

    A short row has few names, and short keys, in few words: where words stand between the name and the key,
    no model of this size learned to find the key by the name; learned without, it carries over. Each name is
    asked for once as a rule, so that its key stands elsewhere.
    """
    draw = random.Random(seed)
    ways = max(1, length // SHORT)
    form, digits = draw.randrange(min(len(SAYINGS), ways)), draw.randint(1, min(NAMED.digits, ways))
    told, deepest = draw.choice(TOLD), draw.choice((0, *range(1, HOPS + 1), HOPS))
    names = draw.sample(NAMED.names, draw.randint(3, min(MOST, max(4, length // 12))))
    held: dict[str, str] = {}
    hops: dict[str, int] = {}
    waiting: list[str] = []  # to be asked for
    pieces, known = [], []
    for _ in range(length // SHORTEST_KEY + 1):
        asked = not names or (len(held) >= 2 and bool(waiting) and draw.random() >= told)
        if asked:
            pool = waiting or list(held)
            (name,) = draw.choices(pool, [1 + 2 * hops[other] for other in pool])
            if name in waiting:
                waiting.remove(name)
        else:
            name = names.pop()
            before = [other for other in waiting or held if hops[other] < deepest]
            waiting.append(name)
            if len(held) >= 2 and before and draw.random() < LINKED:
                other = max(draw.sample(before, min(2, len(before))), key=hops.__getitem__)
                held[name], hops[name] = held[other], hops[other] + 1
                link = LINKS[form].replace("{name}", name).replace("{other}", other)
                pieces.append(f" {link[0].upper()}{link[1:]}.")
                known.append(False)
                continue
            held[name], hops[name] = "".join(draw.choices("0123456789", k=digits)), 0
        pieces += [f" {SAYINGS[form].replace('{name}', name).capitalize()}", f" {held[name]}", "."]
        known += [False, asked, False]
    return _answers(stock, pieces, known, length)


def named(stock: Stock, length: int, seed: int) -> Row:
    """A prompt of the evaluation with named keys, which asks for one or more; trained on answers, alone."""
    draw = random.Random(seed)
    needles = draw_needles(NAMED, draw.random(), OTHERS, draw.getrandbits(64))

    def ask(count: int) -> Prompt:
        return needle_prompt(
            stock.narrator.tokenizer, length=length, needles=needles, queries=count, template=NAMED
        )

    return _asked(ask, draw.randint(1, OTHERS))


def chains(stock: Stock, length: int, seed: int) -> Row:
    """A prompt of the evaluation with chains, which asks for one name or more; trained on answers, alone."""
    draw = random.Random(seed)
    drawn, told = draw_chains(TEMPLATES["village"], draw.random(), draw.getrandbits(64))
    of = [(name, chain.key) for chain in drawn for name in chain.names]
    ends = [(chain.names[-1], chain.key) for chain in drawn]
    first = draw.choice(ends)
    others = draw.sample([one for one in of if one != first], CHAINS)
    asked = [(NAMED.question.replace("{name}", name), key) for name, key in (first, *others)]

    def ask(count: int) -> Prompt:
        page = Page(intro=NAMED.intro, filler=NAMED.filler, needles=told, asked=asked[:count])
        return page_prompt(stock.narrator.tokenizer, page, length=length)

    return _asked(ask, draw.randint(1, len(asked)))


def tales(stock: Stock, length: int, seed: int) -> Row:
    """The beginning of a tale."""
    return _all(stock.narrator.tale(length, seed).ids)


def recalls(stock: Stock, length: int, seed: int) -> Row:
    """The beginning of a tale of few subjects; trained on values that have been told before, alone."""
    return _told_before(stock.casts[seed % CASTS].tale(length, seed))


def retold(stock: Stock, length: int, seed: int) -> Row:
    """The beginning of a tale of all subjects; trained on values that have been told before, alone."""
    return _told_before(stock.narrator.tale(length, seed))


def stories(stock: Stock, length: int, seed: int) -> Row:
    """A stretch of the texts that begins anywhere."""
    if len(stock.stories) <= length:
        raise RopepatchError(
            f"the texts have {len(stock.stories)} tokens, too few for a row of {length}",
            hint="name more texts, or leave stories out of the mixtures",
        )
    begin = random.Random(seed).randrange(len(stock.stories) - length)
    return _all(stock.stories[begin : begin + length])


MATERIALS: dict[str, Callable[[Stock, int, int], Row]] = {
    "strings": strings,
    "copies": copies,
    "passkey": passkey,
    "pairs": pairs,
    "links": links,
    "named": named,
    "chains": chains,
    "tales": tales,
    "recalls": recalls,
    "retold": retold,
    "stories": stories,
}


def _about(count: int, seed: int) -> list[Sentence]:
    """The sentences about so many of the subjects that have a value."""
    subjects = sorted({sentence.subject for sentence in SENTENCES if sentence.subject is not None})
    chosen = random.Random(seed).sample(subjects, count)
    return [sentence for sentence in SENTENCES if sentence.subject in chosen]


def _answers(stock: Stock, pieces: Sequence[str], known: Sequence[bool], length: int) -> Row:
    """The pieces in tokens; trained on those that are known, alone."""
    ids, labels = [BOS], [IGNORED]
    for tokens, trained in zip(stock.narrator.encode(pieces), known, strict=True):
        ids += tokens
        labels += tokens if trained else [IGNORED] * len(tokens)
    return torch.tensor(ids[:length]), torch.tensor(labels[:length])


def _asked(ask: Callable[[int], Prompt], count: int) -> Row:
    """A prompt with so many questions, or with as many as it has room for; trained on the answers, alone."""
    while True:
        try:
            prompt = ask(count)
            break
        except RopepatchError:
            if count == 1:
                raise
            count -= 1
    labels = torch.full_like(prompt.ids, IGNORED)
    for begin, end in prompt.answers:
        labels[begin:end] = prompt.ids[begin:end]
    return prompt.ids, labels


def _told_before(tale: GeneratedDocument) -> Row:
    return tale.ids, tale.ids.masked_fill(tale.distance == 0, IGNORED)


def _all(ids: Tensor) -> Row:
    return ids, ids.clone()
