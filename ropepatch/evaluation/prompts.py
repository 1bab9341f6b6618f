"""Pass key prompts of an exact length in tokens.

Shapes: N tokens of a prompt.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate, cycle, islice, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class PasskeyTemplate:
    """The words of a prompt: intro, filler with the needle between two of its sentences, question, answer.

    Args:
        intro: Says what to look for.
        filler: Sentences that are repeated in this order, as many as fill the length.
        needle: Holds ``{key}``.
        question: Ends where the key is to be said, without the space before it.
        digits: Digits of a key; each is drawn on its own, so that keys may begin with 0.

    Raises:
        RopepatchError: No ``{key}`` in the needle, no filler, a question that ends in white space, no digits.
    """

    intro: str = "Somewhere on this page there is a pass key. Read on, you will need it."
    filler: tuple[str, ...] = (
        "The mill wheel turns and turns.",
        "Bread cools on the sill.",
        "Smoke climbs from every roof.",
        "A cart rolls by without haste.",
        "Nobody asks for the time.",
    )
    needle: str = "The pass key is {key}. Keep it well: {key} is the pass key."
    question: str = "What is the pass key? The pass key is"
    digits: int = 5

    def __post_init__(self) -> None:
        if "{key}" not in self.needle:
            raise RopepatchError(
                f"the needle must hold {{key}}, got {self.needle!r}", hint='e.g. "The pass key is {key}."'
            )
        if isinstance(self.filler, str) or not self.filler or not all(map(str.strip, self.filler)):
            raise RopepatchError(
                f"the filler must be a tuple of sentences, got {self.filler!r}",
                hint='one sentence is ("The grass is green.",)',
            )
        if not self.question or self.question[-1].isspace():
            raise RopepatchError(
                f"the question must end in a word, got {self.question!r}",
                hint="leave the space before the key out: it belongs to the answer",
            )
        if self.digits < 1:
            raise RopepatchError(f"a key needs at least 1 digit, got {self.digits}", hint="the default is 5")


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt and its answer as one row of tokens.

    Attributes:
        ids: Token ids [N], answer included.
        answer: How many of them, at the end, are the answer.
        needle: Where the needle's tokens begin and end.
        sentences: Where the filler sentences begin and, last, the question: the needle stands before one.
    """

    ids: Tensor
    answer: int
    needle: tuple[int, int]
    sentences: tuple[int, ...]


def passkey_prompt(
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    depth: float,
    key: str,
    template: PasskeyTemplate | None = None,
) -> Prompt:
    """A prompt of exactly ``length`` tokens, the beginning-of-sequence token and the answer included.

    The needle stands before the filler sentence nearest to the share ``depth`` of all. Whole sentences
    seldom make up a length: the first one loses its first tokens.

    Raises:
        RopepatchError: The length has no room for a filler sentence beside intro, needle, question and
            answer, the depth is not within 0 to 1, or the tokenizer gives no character offsets, joins the
            key to the question or cannot write it.
    """
    words = template or PasskeyTemplate()
    if not 0 <= depth <= 1:
        raise RopepatchError(
            f"depth must be from 0 to 1, got {depth}", hint="0 is before all filler, 1 after it"
        )
    if not getattr(tokenizer, "is_fast", False):  # transformers' backend for mistral-common has no is_fast
        raise RopepatchError(
            f"{type(tokenizer).__name__} gives no character offsets",
            hint="use a tokenizer with a tokenizer.json",
        )
    sample = _whole(tokenizer, words, len(words.filler), 0.0, key)
    sizes = [end - begin for begin, end in pairwise(sample.sentences)]
    if not any(sizes):
        raise RopepatchError("the tokenizer has no tokens for the filler", hint="choose another template")
    beside = len(sample.ids) - sum(sizes)  # tokens of all that is not filler
    if length < beside + sizes[-1]:
        raise RopepatchError(
            f"a pass key prompt of {length} tokens has no room for its filler",
            hint=f"the shortest takes {beside + sizes[-1]} tokens with this tokenizer",
        )
    totals = accumulate(cycle(reversed(sizes)), initial=beside)
    count = next(count for count, total in enumerate(totals) if total >= length)
    prompt = _whole(tokenizer, words, count, depth, key)
    while len(prompt.ids) < length:  # tokens that span sentences make the sum inexact
        count += 1
        prompt = _whole(tokenizer, words, count, depth, key)
    return _shortened(prompt, len(prompt.ids) - length)


def _whole(
    tokenizer: PreTrainedTokenizerBase, words: PasskeyTemplate, count: int, depth: float, key: str
) -> Prompt:
    """The prompt with ``count`` whole filler sentences, ending with the last of the template's."""
    filler = list(islice(cycle(reversed(words.filler)), count))[::-1]
    before = round(depth * count)
    needle = words.needle.replace("{key}", key)
    pieces = [words.intro, *filler[:before], needle, *filler[before:], words.question, key]
    encoded = tokenizer(
        " ".join(pieces), add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    prefix = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids = prefix + encoded["input_ids"]
    spans = [(0, 0)] * len(prefix) + encoded["offset_mapping"]  # of each token, in characters
    piece_ends = [end - 1 for end in accumulate(len(piece) + 1 for piece in pieces)]
    # A token belongs to the piece in which it ends, as a space goes with the word after it; to the needle
    # belongs each that has a letter of it.
    token_begins, token_ends = zip(*spans, strict=True)
    starts = [0, *(bisect_right(token_ends, end) for end in piece_ends)]
    if any(begin < piece_ends[-2] for begin, _ in spans[starts[-2] :]):
        raise RopepatchError(
            "the tokenizer joins the question and the key into one token",
            hint="end the template's question with a word",
        )
    answer = ids[starts[-2] :]
    said = str(tokenizer.decode(answer))
    if said.replace(" ", "") != key.replace(" ", ""):  # a tokenizer without a decoder puts spaces between
        raise RopepatchError(
            f"the tokenizer cannot write the key {key}: it reads {said!r}",
            hint="use a tokenizer that has every digit",
        )
    place = 1 + before  # of the needle among the pieces
    sentences = (*starts[1:place], *starts[place + 1 : -2])
    needle_end = bisect_left(token_begins, piece_ends[place])
    return Prompt(torch.tensor(ids), len(answer), (starts[place], needle_end), sentences)


def _shortened(prompt: Prompt, surplus: int) -> Prompt:
    """The prompt without its first ``surplus`` tokens of filler."""
    begin, end = prompt.needle
    filler = torch.arange(prompt.sentences[0], prompt.sentences[-1])
    filler = filler[(filler < begin) | (filler >= end)]
    kept = torch.ones(len(prompt.ids), dtype=torch.bool)
    kept[filler[:surplus]] = False
    moved = (kept.cumsum(0) - kept.long()).tolist()  # of each token how many are kept before it
    return Prompt(
        prompt.ids[kept],
        prompt.answer,
        (moved[begin], moved[end]),
        tuple(moved[start] for start in prompt.sentences),
    )
