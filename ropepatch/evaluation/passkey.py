"""Retrieval of a passkey from filler: prompts of an exact length, scored by teacher forcing.

Shapes: R prompts of N tokens.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, SupportsFloat

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.data.prompts import Prompt, draw_needles, needle_prompt
from ropepatch.data.templates import PasskeyTemplate, bundled
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.bars import advancing
from ropepatch.evaluation.grid import Passkey, PasskeyGrid
from ropepatch.evaluation.processes import rank_and_ranks
from ropepatch.evaluation.verdicts import dealt, forced, generated
from ropepatch.model.head import evaluating
from ropepatch.settings import seed_of

__all__ = ["Passkey", "PasskeyGrid", "passkey"]


def passkey(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    trials: int = 4,
    template: PasskeyTemplate | None = None,
    distractors: int = 0,
    queries: int = 1,
    seed: int = 0,
    tokens_per_batch: int = 2048,
    share_prefixes: bool = True,
    split: bool = False,
    progress: Callable[[int, int], None] | bool | None = None,
) -> PasskeyGrid:
    """Ask for passkeys at every length and depth.

    A key counts as retrieved if each of its tokens is the most probable one after the true ones before it:
    exactly when greedy decoding would say these tokens. With a template that has a parser, the answer is
    generated greedily, and counts if what the parser finds in it is the key. All that is drawn for a prompt
    follows from a seed of its own, made of the seed, length, depth and trial.

    Args:
        model: A causal language model of transformers; put in eval mode and back into the mode it was in.
        tokenizer: The model's, with character offsets.
        lengths: Tokens of the prompts, answers included; one given twice is read once, as is a depth.
        depths: Where the needle stands, from 0, before all filler, to 1, after it.
        trials: Prompts per length and depth.
        template: The words; the bundled ones if None.
        distractors: Further needles with other names and keys, anywhere in the filler; the template must hold
            ``{name}``.
        queries: How many needles are asked for, one after the other, with the true answers in between; the
            first is the one at the depth. Each counts.
        seed: The seed from which all that is drawn follows.
        tokens_per_batch: How many tokens are read at once, at most, but for a single longer prompt.
        share_prefixes: Whether what prompts have in common is read once where that is faster and changes
            nothing but rounding; takes memory for the keys and values of ``tokens_per_batch`` tokens, or of a
            single longer prompt.
        split: Deal the prompts to the processes of torch.distributed, if they are many; every process gives
            the same arguments and is returned the same.
        progress: Called as (prompts read, prompts to read), both by this process, after each batch. True for
            a bar.

    Raises:
        RopepatchError: An argument that is not as above, a prompt that cannot be made (see `needle_prompt`),
            or logits that are no numbers.
    """
    # Each once, as Python's numbers, which the seeds are made of; the shortest, that may be too short, first.
    tokens = sorted({_whole("a length", n, 1) for n in _listed("lengths", lengths, "[1024, 2048]")})
    places = sorted({_depth(depth) for depth in _listed("depths", depths, "[0.0, 0.5, 1.0]")})
    trials, queries = _whole("trials", trials, 1), _whole("queries", queries, 1)
    distractors = _whole("distractors", distractors, 0)
    tokens_per_batch = _whole("tokens_per_batch", tokens_per_batch, 1)
    words = template or bundled(distractors=distractors)
    _check_words(words, distractors, queries)
    rank, ranks = rank_and_ranks(split)
    total, done = len(tokens) * len(range(rank, len(places) * trials, ranks)), 0

    def advanced(counts: list[int]) -> None:
        nonlocal done
        done += len(counts)
        if advance is not None:
            advance(done, total)

    found: dict[tuple[int, float], list[int]] = {}  # of every prompt, by length and depth
    with evaluating(model), advancing(progress, "passkeys") as advance, torch.inference_mode():
        for length in tokens:
            prompts = [
                trial_prompt(
                    tokenizer,
                    words,
                    length=length,
                    depth=depth,
                    trial=trial,
                    seed=seed,
                    distractors=distractors,
                    queries=queries,
                )
                for depth in places
                for trial in range(trials)
            ]
            rows = max(1, tokens_per_batch // length)

            def answers(prompts: list[Prompt], _: list[int], rows: int = rows) -> Iterator[dict[int, int]]:
                if words.parse is None:
                    return forced(model, prompts, rows, share=share_prefixes)

                def first_match(row: int, text: str) -> int:
                    match = re.search(words.parse or "", text)
                    return int(match is not None and match[0] == prompts[row].keys[0])

                room = words.answer_tokens or 0
                return generated(model, tokenizer, prompts, rows, room=lambda _: room, count=first_match)

            said = dealt(prompts, answers, advanced, split=split)
            for at, depth in enumerate(places):
                found[length, depth] = said[at * trials : (at + 1) * trials]
    read = {cell: Passkey(sum(said), trials * queries, tuple(said)) for cell, said in found.items()}
    return PasskeyGrid(read, words, seed, trials, distractors, queries)


def trial_prompt(
    tokenizer: PreTrainedTokenizerBase,
    words: PasskeyTemplate,
    *,
    length: int,
    depth: float,
    trial: int,
    seed: int,
    distractors: int = 0,
    queries: int = 1,
) -> Prompt:
    """The prompt of one trial, which follows from these alone; see `passkey`.

    Raises:
        RopepatchError: A prompt that cannot be made (see `needle_prompt`).
    """
    needles = draw_needles(words, depth, distractors, seed_of("passkey", seed, length, depth, trial))
    return needle_prompt(tokenizer, length=length, needles=needles, queries=queries, template=words)


def _check_words(words: PasskeyTemplate, distractors: int, queries: int) -> None:
    if distractors and "{name}" not in words.question:
        raise RopepatchError(
            "distractors need a template with {name} in the needle and the question, got the question "
            f"{words.question!r}",
            hint="leave the template out for the bundled one",
        )
    available = min(len(words.names), words.num_keys)
    if distractors >= available:
        raise RopepatchError(
            f"{distractors} distractors and the needle need as many names and keys, the template has "
            f"{len(words.names)} names and {words.num_keys} keys",
            hint=f"ask for at most {available - 1} distractors",
        )
    if words.parse is not None and queries > 1:
        raise RopepatchError(
            f"a template with a parser takes one query, got {queries}", hint="leave parse out of the template"
        )


def _listed(name: str, values: Any, example: str) -> list[Any]:
    """The values, of which there must be some."""
    try:
        listed = [] if isinstance(values, str) else list(values)
    except TypeError:
        listed = []
    if not listed:
        raise RopepatchError(
            f"{name} must be a list of numbers, got {values!r}", hint=f"e.g. {name}={example}"
        )
    return listed


def _whole(name: str, value: Any, least: int) -> int:
    """The value as Python's number."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise RopepatchError(
            f"{name} must be a whole number of at least {least}, got {value!r}",
            hint="lengths are in tokens, all others are counts",
        )
    return number


def _depth(value: Any) -> float:
    if not isinstance(value, SupportsFloat):
        raise RopepatchError(f"a depth must be a number from 0 to 1, got {value!r}", hint="e.g. 0.5")
    return float(value)
