"""What a recipe reads, made ready: the batches it trains on, and the text it is watched on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ropepatch.data.texts import Texts, digest
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.data.token_store import TokenStore
from ropepatch.data.tokens import tokenised
from ropepatch.errors import RopepatchError
from ropepatch.files import whole_file
from ropepatch.fitting.examples import FEWEST, HELD_OUT, TALES
from ropepatch.settings import seed_of
from ropepatch.training.recipe import Recipe
from ropepatch.training.recipe_sections import Generated
from ropepatch.training.rows import Batches, GeneratedRows, Schedule, Stream, TokenRows, held_out


@dataclass(frozen=True, eq=False)
class Supply:
    """Text as token ids.

    Attributes:
        batches: What is trained on, a whole forward pass of one process each.
        pieces: Held-out token ids [target], not trained on.
        notes: What was read and what was left out, a line each.
    """

    batches: Batches
    pieces: list[Tensor]
    notes: list[str]

    @property
    def tokens(self) -> int:
        """How many are trained on, in all processes and steps."""
        return int(self.batches.schedule.windows.sum())

    @property
    def digest(self) -> str:
        """What names all of it."""
        return f"{seed_of(self.batches.digest, digest(self.pieces)):016x}"


def make_supply(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    *,
    trained: int,
    target: int,
    vocabulary: int,
    per_step: int,
    cache: Path,
) -> Supply:
    """Tokenise what the recipe needs, from the cache where it is there.

    Args:
        recipe: The recipe, which says what is read.
        tokenizer: The tokenizer of the model.
        trained: The old context, in tokens.
        target: The new context, in tokens.
        vocabulary: How many tokens the model knows.
        per_step: Batches of one optimiser step, over all processes.
        cache: The folder of tokenised texts.

    Raises:
        RopepatchError: A text that is not there, is too short, or does not fit the tokenizer.
    """
    data, seed = recipe.data, recipe.seed
    schedule = Schedule.of(data, trained=trained, steps=recipe.max_steps, per_step=per_step, seed=seed)
    take = partial(tokenised, tokenizer=tokenizer, trained=trained, vocabulary=vocabulary, cache=cache)
    streams, pieces, notes = _open(recipe, tokenizer, target, schedule.tokens, take)
    batches = Batches(
        schedule, streams, recipe.positions, boundaries=data.boundaries, target=target, seed=seed
    )
    return Supply(batches, pieces, notes + batches.report)


def write_windows(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    file: Path,
    *,
    trained: int,
    target: int,
    vocabulary: int,
    cache: Path,
) -> None:
    """Write windows [target] of what a recipe trains on, and of nothing that is watched, for a fit.

    Args:
        recipe: The recipe, whose texts are read by their weights.
        tokenizer: The tokenizer of the model.
        file: The file of a JSON object with `input_ids` a line; its folder is made.
        trained: The old context, in tokens.
        target: The tokens of a window.
        vocabulary: How many tokens the model knows.
        cache: The folder of tokenised texts.

    Raises:
        RopepatchError: What `make_supply` refuses, or too few windows for a fit.
    """
    wanted = TALES + HELD_OUT
    take = partial(tokenised, tokenizer=tokenizer, trained=trained, vocabulary=vocabulary, cache=cache)
    streams, _, _ = _open(recipe, tokenizer, target, lambda source: wanted * target, take)
    texts = [number for number, stream in enumerate(streams) if isinstance(stream, TokenRows)]
    left = {number: (streams[number].size or 0) // target for number in texts}
    taken = dict.fromkeys(texts, 0)
    rows: list[Tensor] = []
    while len(rows) < wanted and (unread := [number for number in texts if taken[number] < left[number]]):
        number = min(unread, key=lambda number: (taken[number] + 1) / recipe.data.sources[number].weight)
        rows.append(streams[number].row(taken[number], target).ids)
        taken[number] += 1
    if len(rows) < FEWEST:
        raise RopepatchError(
            f"the recipe's texts, less what is held out, make {len(rows)} windows of {target} tokens, and a "
            f"fit needs {FEWEST}",
            hint="give more text, or method: {name: fit, text: FILE}",
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as partial_file:
        lines = (json.dumps({"input_ids": ids.tolist()}) + "\n" for ids in rows)
        partial_file.write_text("".join(lines), encoding="utf-8")


def _open(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    target: int,
    tokens_of: Callable[[int], int],
    take: Callable[..., TokenStore],
) -> tuple[list[Stream], list[Tensor], list[str]]:
    """The rows of every source; the pieces [target] that are held out; and a line on every text.

    ``tokens_of`` says how many tokens of a source are wanted, by its number; ``take`` tokenises a source.
    """
    data, watch, notes = recipe.data, recipe.watch, list[str]()
    held = watch.windows * target
    pieces: list[Tensor] | None = None
    if watch.text is not None:
        text = Texts(text=watch.text, field=watch.field, split=watch.split)
        store = take(text, tokens=held)
        pieces, _ = held_out(store, target, watch.windows)
        notes.append(f"watched: {store.report}")
    streams: list[Stream] = []
    for number, source in enumerate(data.sources):
        seed = seed_of(recipe.seed, "source", number)
        if isinstance(source, Generated):
            streams.append(GeneratedRows(source.generated, tokenizer, seed))
            continue
        begin = 0
        store = take(source, tokens=tokens_of(number) + (held if pieces is None else 0))
        if pieces is None:
            pieces, begin = held_out(store, target, watch.windows)
        streams.append(TokenRows(store, begin, seed))
        notes.append(f"{source.text}: {store.report}")
    if pieces is None:
        pieces = [tale.ids for tale in held_out_tales(tokenizer, length=target, count=watch.windows)]
    return streams, pieces, notes
