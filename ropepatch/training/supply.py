"""What a recipe reads, made ready: the batches it trains on, and the text it is watched on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ropepatch.evaluation.texts import digest
from ropepatch.seeds import seed_of
from ropepatch.tiny.held_out import held_out_tales
from ropepatch.training.rows import Batches, GeneratedRows, Schedule, Stream, TokenRows, held_out
from ropepatch.training.sections import Generated, Texts
from ropepatch.training.tokens import tokenised

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from ropepatch.training.recipe import Recipe


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
        recipe: What is read.
        tokenizer: Of the model.
        trained: The old context, in tokens.
        target: The new one.
        vocabulary: How many tokens the model knows.
        per_step: Batches of one optimiser step, over all processes.
        cache: The folder of tokenised texts.

    Raises:
        RopepatchError: A text that is not there, is too short, or does not fit the tokenizer.
    """
    take = partial(tokenised, tokenizer=tokenizer, trained=trained, vocabulary=vocabulary, cache=cache)
    data, watch, notes = recipe.data, recipe.watch, list[str]()
    schedule = Schedule.of(data, trained=trained, steps=recipe.max_steps, per_step=per_step, seed=recipe.seed)
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
        store = take(source, tokens=schedule.tokens(number) + (held if pieces is None else 0))
        if pieces is None:
            pieces, begin = held_out(store, target, watch.windows)
        streams.append(TokenRows(store, begin, seed))
        notes.append(f"{source.text}: {store.report}")
    if pieces is None:
        pieces = [tale.ids for tale in held_out_tales(tokenizer, length=target, count=watch.windows)]
    batches = Batches(
        data,
        streams,
        recipe.positions,
        trained=trained,
        target=target,
        steps=recipe.max_steps,
        per_step=per_step,
        seed=recipe.seed,
    )
    return Supply(batches, pieces, notes + batches.report)
