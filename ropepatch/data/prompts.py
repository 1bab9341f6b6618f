"""Needles in filler, in prompts of an exact length in tokens.

Shapes: N tokens of a prompt.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, islice, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropepatch.data.templates import PasskeyTemplate
from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Needle",
    "Page",
    "PasskeyTemplate",
    "Prompt",
    "draw_needles",
    "needle_prompt",
    "page_prompt",
    "passkey_prompt",
]

Span = tuple[int, int]  # where tokens begin and end


@dataclass(frozen=True)
class Needle:
    """A key that is hidden in the filler, from depth 0, before all of it, to 1, after it."""

    key: str
    depth: float
    name: str = ""


def draw_needles(words: PasskeyTemplate, depth: float, distractors: int, seed: int) -> list[Needle]:
    """The needle at the depth, and distractors anywhere; no two with the same key or name."""
    draw = random.Random(seed)
    keys = [words.draw_key(draw)]
    names = draw.sample(words.names, distractors + 1) if "{name}" in words.question else [""]
    while len(keys) <= distractors:
        if (key := words.draw_key(draw)) not in keys:
            keys.append(key)
    depths = [depth, *(draw.random() for _ in range(distractors))]
    return [Needle(*needle) for needle in zip(keys, depths, names, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that a prompt says: needles in filler, then questions with their answers.

    Attributes:
        intro: Says what to look for.
        filler: Sentences that are repeated in this order, as many as fill the length.
        needles: The text and the depth of each.
        asked: What stands before each answer, and the answer.
        separator: A space or a line break; see `PasskeyTemplate`.
        title: What errors call the prompt.
    """

    intro: str
    filler: Sequence[str]
    needles: Sequence[tuple[str, float]]
    asked: Sequence[tuple[str, str]]
    separator: str = " "
    title: str = "passkey prompt"


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt and its answers as one row of tokens.

    Attributes:
        ids: Token ids [N], answers included.
        keys: The answers as text, in the order in which they are asked for.
        answers: Where the tokens of each are; the last ends the prompt.
        needles: Where the tokens of each needle are, in the order in which they were given.
        sentences: Where the filler sentences begin and, last, the question: a needle stands before one.
    """

    ids: Tensor
    keys: tuple[str, ...]
    answers: tuple[Span, ...]
    needles: tuple[Span, ...]
    sentences: tuple[int, ...]

    @property
    def answer(self) -> int:
        """How many tokens at the end are the last answer."""
        return self.answers[-1][1] - self.answers[-1][0]

    @property
    def needle(self) -> Span:
        """Where the tokens of the first needle are."""
        return self.needles[0]


def passkey_prompt(
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    depth: float,
    key: str,
    template: PasskeyTemplate | None = None,
) -> Prompt:
    """A prompt of exactly ``length`` tokens with one needle, see `needle_prompt`.

    Raises:
        RopepatchError: As `needle_prompt`, or the template asks for a name.
    """
    words = template or PasskeyTemplate()
    if "{name}" in words.question:
        raise RopepatchError(
            f"the question needs a name: {words.question!r}", hint="give needles with names to needle_prompt"
        )
    return needle_prompt(tokenizer, length=length, needles=[Needle(key, depth)], template=words)


def needle_prompt(
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    needles: Sequence[Needle],
    queries: int = 1,
    template: PasskeyTemplate | None = None,
) -> Prompt:
    """A prompt of exactly ``length`` tokens, see `page_prompt`; the first ``queries`` needles are asked for.

    Raises:
        RopepatchError: As `page_prompt`; or queries are fewer than 1 or more than the needles.
    """
    words = template or PasskeyTemplate()
    if not 1 <= queries <= len(needles):
        raise RopepatchError(
            f"queries must be from 1 to the number of needles, {len(needles)}, got {queries}",
            hint="each asks for a needle of its own; the other needles are distractors",
        )
    page = Page(
        intro=words.intro,
        filler=words.filler,
        needles=tuple((words.say(needle.key, needle.name), needle.depth) for needle in needles),
        asked=tuple(
            (words.question.replace("{name}", needle.name), needle.key) for needle in needles[:queries]
        ),
        separator=words.separator,
    )
    return page_prompt(tokenizer, page, length=length)


def page_prompt(tokenizer: PreTrainedTokenizerBase, page: Page, *, length: int) -> Prompt:
    """A prompt of exactly ``length`` tokens, the beginning-of-sequence token and the answers included.

    A needle stands before the filler sentence nearest to the share ``depth`` of all; the questions follow,
    one after the other. Whole sentences seldom make up a length: the first one loses its first tokens.

    Raises:
        RopepatchError: The length has no room for a filler sentence beside intro, needles, questions and
            answers, a depth is not within 0 to 1, or the tokenizer gives no character offsets, joins an
            answer to its question or cannot write it.
    """
    for _, depth in page.needles:
        if not 0 <= depth <= 1:
            raise RopepatchError(
                f"depth must be from 0 to 1, got {depth}", hint="0 is before all filler, 1 after it"
            )
    if not getattr(tokenizer, "is_fast", False):  # transformers' backend for mistral-common has no is_fast
        raise RopepatchError(
            f"{type(tokenizer).__name__} gives no character offsets",
            hint="use a tokenizer with a tokenizer.json",
        )
    first = replace(page, needles=tuple((text, 0.0) for text, _ in page.needles))
    sample, _ = _whole(tokenizer, first, len(page.filler))
    sizes = [end - begin for begin, end in pairwise(sample.sentences)]
    if not any(sizes):
        raise RopepatchError("the tokenizer has no tokens for the filler", hint="choose another template")
    beside = len(sample.ids) - sum(sizes)  # tokens of all that is not filler
    if length < beside + sizes[-1]:
        raise RopepatchError(
            f"a {page.title} of {length} tokens has no room for its filler",
            hint=f"the shortest takes {beside + sizes[-1]} tokens with this tokenizer",
        )
    totals = accumulate(cycle(reversed(sizes)), initial=beside)
    count = next(count for count, total in enumerate(totals) if total >= length)
    prompt, breaks = _whole(tokenizer, page, count)
    while len(prompt.ids) < length:  # tokens that span sentences make the sum inexact
        count += 1
        prompt, breaks = _whole(tokenizer, page, count)
    return _shortened(prompt, breaks, len(prompt.ids) - length)


def _whole(tokenizer: PreTrainedTokenizerBase, page: Page, count: int) -> tuple[Prompt, list[int]]:
    """The prompt with ``count`` whole filler sentences, ending with the last of the page's.

    And its tokens that hold a line break, alone or with what stands beside it.
    """
    kinds, pieces, places = _pieces(page, count)
    gaps = [
        " " if after == "key" or before == after == "filler" else page.separator
        for before, after in pairwise(kinds)
    ]
    text = "".join(piece + gap for piece, gap in zip(pieces, [*gaps, ""], strict=True))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    begun = tokenizer.bos_token_id is None or encoded["input_ids"][:1] == [tokenizer.bos_token_id]
    prefix = [] if begun else [tokenizer.bos_token_id]
    ids = prefix + encoded["input_ids"]
    spans = [(0, 0)] * len(prefix) + encoded["offset_mapping"]  # of each token, in characters
    piece_ends = [end - 1 for end in accumulate(len(piece) + 1 for piece in pieces)]
    # A token belongs to the piece in which it ends, as a space goes with the word after it; to the needle
    # belongs each that has a letter of it.
    token_begins, token_ends = zip(*spans, strict=True)
    starts = [0, *(bisect_right(token_ends, end) for end in piece_ends)]
    answers = [at for at, kind in enumerate(kinds) if kind == "key"]
    for at in answers:
        tokens = slice(starts[at], starts[at + 1])
        if any(begin < piece_ends[at - 1] for begin in token_begins[tokens]):
            raise RopepatchError(
                "the tokenizer joins the question and the key into one token",
                hint="end the template's question with a word",
            )
        written = str(tokenizer.decode(ids[tokens]))
        if written.replace(" ", "") != pieces[at].replace(" ", ""):  # without a decoder, spaces stand between
            raise RopepatchError(
                f"the tokenizer cannot write the key {pieces[at]}: it reads {written!r}",
                hint="use a tokenizer that has every digit",
            )
    prompt = Prompt(
        ids=torch.tensor(ids),
        keys=tuple(answer for _, answer in page.asked),
        answers=tuple((starts[at], starts[at + 1]) for at in answers),
        needles=tuple((starts[at], bisect_left(token_begins, piece_ends[at])) for at in places),
        sentences=(
            *(starts[at] for at, kind in enumerate(kinds) if kind == "filler"),
            starts[kinds.index("question")],
        ),
    )
    breaks = [end for end, gap in zip(piece_ends, gaps, strict=False) if gap == "\n"]
    return prompt, [
        token
        for place in breaks
        for token in range(bisect_right(token_ends, place), bisect_left(token_begins, place + 1))
    ]


def _pieces(page: Page, count: int) -> tuple[list[str], list[str], list[int]]:
    """What the pieces of a prompt are, their texts, and which of them are the needles."""
    filler = list(islice(cycle(reversed(page.filler)), count))[::-1]
    kinds, pieces, places = ["intro"], [page.intro], [0] * len(page.needles)
    depths = [depth for _, depth in page.needles]
    waiting = sorted(range(len(depths)), key=lambda number: depths[number], reverse=True)
    for gap in range(count + 1):
        while waiting and round(depths[waiting[-1]] * count) == gap:
            number = waiting.pop()
            places[number] = len(pieces)
            kinds.append("needle")
            pieces.append(page.needles[number][0])
        if gap < count:
            kinds.append("filler")
            pieces.append(filler[gap])
    for question, answer in page.asked:
        kinds += ["question", "key"]
        pieces += [question, answer]
    return kinds, pieces, places


def _shortened(prompt: Prompt, breaks: list[int], surplus: int) -> Prompt:
    """The prompt without its first ``surplus`` tokens of filler; those with line breaks go last."""
    stays = torch.ones(len(prompt.ids), dtype=torch.bool)
    filler = torch.zeros_like(stays)
    filler[prompt.sentences[0] : prompt.sentences[-1]] = True
    for begin, end in prompt.needles:
        filler[begin:end] = False
    lasting = torch.zeros_like(stays)
    lasting[breaks] = True
    stays[torch.cat([(filler & ~lasting).nonzero(), (filler & lasting).nonzero()])[:surplus, 0]] = False
    moved = (stays.cumsum(0) - stays.long()).tolist()  # of each token how many stay before it
    moved.append(int(stays.sum()))

    def shifted(spans: tuple[Span, ...]) -> tuple[Span, ...]:
        return tuple((moved[begin], moved[end]) for begin, end in spans)

    return Prompt(
        ids=prompt.ids[stays],
        keys=prompt.keys,
        answers=shifted(prompt.answers),
        needles=shifted(prompt.needles),
        sentences=tuple(moved[start] for start in prompt.sentences),
    )
