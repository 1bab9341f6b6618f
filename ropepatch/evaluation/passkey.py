"""Retrieval of a pass key from filler: prompts of an exact length, scored by teacher forcing.

Shapes: B prompts of a batch, N tokens of a prompt, A tokens of its answer, V vocabulary.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, cycle, islice, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.perplexity import evaluating, gives_positions
from ropepatch.seeds import seed_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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


@dataclass(frozen=True)
class Passkey:
    """How many of ``n`` keys were retrieved."""

    correct: int
    n: int

    @property
    def accuracy(self) -> float:
        """The share retrieved."""
        return self.correct / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the accuracy (J. Am. Stat. Assoc. 22, 1927)."""
        z = 1.959964

        def least(correct: int) -> float:
            root = math.sqrt(correct * (self.n - correct) / self.n + z * z / 4)
            return (correct + z * z / 2 - z * root) / (self.n + z * z)

        return least(self.correct), 1 - least(self.n - self.correct)


@dataclass(frozen=True)
class PasskeyGrid:
    """What was retrieved at every length and depth.

    Attributes:
        cells: By (length in tokens, depth).
    """

    cells: Mapping[tuple[int, float], Passkey]

    def at(self, length: int) -> Passkey:
        """All depths of a length together.

        Raises:
            RopepatchError: The grid has no such length.
        """
        read = [cell for (tokens, _), cell in self.cells.items() if tokens == length]
        if not read:
            lengths = sorted({tokens for tokens, _ in self.cells})
            raise RopepatchError(f"no pass key was asked for at {length} tokens", hint=f"measured: {lengths}")
        return Passkey(sum(cell.correct for cell in read), sum(cell.n for cell in read))

    def __str__(self) -> str:
        lengths = sorted({length for length, _ in self.cells})
        depths = sorted({depth for _, depth in self.cells})
        rows = [("tokens", *(f"depth {depth:.2f}" for depth in depths), "all")]
        for length in lengths:
            cells = [*(self.cells[length, depth] for depth in depths), self.at(length)]
            rows.append((f"{length}", *(f"{cell.correct}/{cell.n}" for cell in cells)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


def passkey(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    trials: int = 4,
    template: PasskeyTemplate | None = None,
    seed: int = 0,
    tokens_per_batch: int = 4096,
    progress: Callable[[int, int], None] | None = None,
) -> PasskeyGrid:
    """Ask for pass keys at every length and depth.

    A key counts as retrieved if each of its tokens is the most probable one after the true ones before it:
    exactly when greedy decoding would say these tokens. Every key is drawn from a seed of its own, made of
    the seed, length, depth and trial.

    Args:
        model: A causal language model of transformers; put in eval mode and back into the mode it was in.
        tokenizer: The model's, with character offsets.
        lengths: Tokens of the prompts, answer included; one given twice is read once, as is a depth.
        depths: Where the needle stands, from 0, before all filler, to 1, after it.
        trials: Keys per length and depth.
        template: The words; the bundled ones if None.
        seed: Of the keys.
        tokens_per_batch: How many tokens are read at once, at most, but for a single longer prompt.
        progress: Called as (prompts read, prompts in all) after each batch.

    Raises:
        RopepatchError: No lengths, depths or trials, a prompt that cannot be made (see `passkey_prompt`), or
            logits that are no numbers.
    """
    if not len(lengths) or not len(depths) or trials < 1:
        raise RopepatchError(
            f"need lengths, depths and trials, got {lengths}, {depths}, {trials}",
            hint="e.g. lengths=[1024, 2048], depths=[0.0, 0.5, 1.0], trials=4",
        )
    words = template or PasskeyTemplate()
    # Each once, as Python's numbers, which the seeds are made of; the shortest, that may be too short, first.
    tokens, places = sorted({int(length) for length in lengths}), sorted({float(depth) for depth in depths})
    total, done = len(tokens) * len(places) * trials, 0
    correct: Counter[tuple[int, float]] = Counter()
    with evaluating(model), torch.inference_mode():
        for length in tokens:
            cells = [(length, depth) for depth in places for _ in range(trials)]
            prompts = [
                passkey_prompt(tokenizer, length=length, depth=depth, key=key, template=words)
                for depth in places
                for key in (_key(words.digits, seed, length, depth, trial) for trial in range(trials))
            ]
            batch = max(1, tokens_per_batch // length)
            for begin in range(0, len(prompts), batch):
                retrieved = _retrieved(model, prompts[begin : begin + batch])
                correct.update(cell for cell, found in zip(cells[begin:], retrieved, strict=False) if found)
                done += len(retrieved)
                if progress is not None:
                    progress(done, total)
    return PasskeyGrid({(n, depth): Passkey(correct[n, depth], trials) for n in tokens for depth in places})


def _key(digits: int, *parts: object) -> str:
    draw = random.Random(seed_of("passkey", *parts))
    return "".join(draw.choices("0123456789", k=digits))


def _retrieved(model: PreTrainedModel, prompts: Sequence[Prompt]) -> list[bool]:
    """Whether the model says the answer of each prompt; all prompts have the same length."""
    embedding: Any = model.get_input_embeddings().weight
    device = torch.device("cpu") if embedding.is_meta else embedding.device  # meta: offloaded by accelerate
    ids = torch.stack([prompt.ids for prompt in prompts]).to(device)
    if (vocabulary := len(embedding)) <= (largest := int(ids.max())):
        raise RopepatchError(
            f"the tokenizer gives token {largest}, the model knows 0 to {vocabulary - 1}",
            hint="use the tokenizer that belongs to the model",
        )
    kept = max(prompt.answer for prompt in prompts) + 1  # the token before the answer predicts its first
    takes_some = any(map(gives_positions, model.modules()))  # any: wrappers such as PEFT's pass keywords on
    options: dict[str, Any] = {"logits_to_keep": kept} if takes_some else {}
    logits = model(input_ids=ids, use_cache=False, **options).logits[:, -kept:-1]  # [B, A, V]
    if logits.isnan().any():
        raise RopepatchError(
            f"{type(model).__name__} gave logits that are no numbers",
            hint="load the model in float32 or bfloat16; check its weights and its rope scaling",
        )
    said = logits.argmax(dim=-1).cpu()  # [B, A]
    return [
        torch.equal(row[-prompt.answer :], prompt.ids[-prompt.answer :])
        for row, prompt in zip(said, prompts, strict=True)
    ]
