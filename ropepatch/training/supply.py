"""What a recipe reads, made ready: the batches it trains on, and the text it is watched on."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ropepatch.data.questions import TAUGHT
from ropepatch.data.sources import local_files
from ropepatch.data.texts import Texts, digest
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.data.tokens import TokenStore, default_cache, tokenised, tokenizer_digest
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.exam import answerable
from ropepatch.files import read_json, whole_file, write_json
from ropepatch.fitting.examples import FEWEST, HELD_OUT, TALES
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.precision import best_device
from ropepatch.model.self_written import self_written
from ropepatch.settings import key_of, seed_of
from ropepatch.training.recipe import QUESTIONS, SELF, Generated, Recipe, RowSource
from ropepatch.training.rows import (
    Batches,
    GeneratedRows,
    QuestionRows,
    Schedule,
    Stream,
    TokenRows,
    check_rows,
    held_out,
)


@dataclass(frozen=True)
class HeldOut:
    """The pieces of text that a model is evaluated on while it trains."""

    name: str
    source: int | None  # its number in the recipe; None for a text of its own, or for the tales of tiny
    length: int  # tokens of a piece
    count: int


def held_out_of(recipe: Recipe, trained: int, target: int) -> HeldOut:
    """What a recipe holds out: pieces of its `watch.text`, else of its first text, else tales."""
    length, count = (target if recipe.watch.target else trained), recipe.watch.windows
    if recipe.watch.text is not None:
        return HeldOut(recipe.watch.text, None, length, count)
    for number, source in enumerate(recipe.data.sources):
        if isinstance(source, Texts):
            return HeldOut(source.text, number, length, count)
        if source.generated == SELF:  # joined, documents that end at L would contradict each other
            return HeldOut(SELF, number, trained, count * length // trained)
    return HeldOut("tales", None, length, count)


def is_at_hand(source: RowSource) -> bool:
    """Whether it takes neither the Hub nor the weights of a model."""
    if isinstance(source, Texts):
        return local_files(source.text) is not None
    return source.generated not in (SELF, QUESTIONS)


def _asks(source: RowSource) -> bool:
    return isinstance(source, Generated) and source.generated == QUESTIONS


@dataclass(frozen=True, eq=False)
class Supply:
    """Text as token ids."""

    batches: Batches  # what is trained on, a whole forward pass of one process each
    pieces: list[Tensor]  # held out, [target], or [L] where the target is not watched
    notes: list[str]  # what was read and what was left out
    kinds: Sequence[
        str
    ] = ()  # of questions, if the recipe asks them, that the model answers within its context

    @property
    def tokens(self) -> int:
        """How many are trained on, in all processes and steps."""
        return int(self.batches.schedule.windows.sum())

    @property
    def digest(self) -> str:
        """What names all of it."""
        return f"{seed_of(self.batches.digest, digest(self.pieces)):016x}"


@dataclass(frozen=True, eq=False, kw_only=True)
class RecipeReader:
    """Reads what a recipe names; texts are tokenised once, and come from the cache afterwards."""

    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    trained: int  # the original context length, in tokens
    target: int  # the new context, in tokens
    vocabulary: int
    folder: Path  # the checkpoint, which generates what a recipe calls `generated: self`
    cache: Path = field(default_factory=default_cache)
    say: Callable[[str], None] = lambda line: None  # how far the generation is

    def supply(self, per_step: int) -> Supply:
        """What is trained on and watched, in so many batches of one optimiser step over all processes."""
        recipe, data, seed = self.recipe, self.recipe.data, self.recipe.seed
        schedule = Schedule.of(
            data, trained=self.trained, steps=recipe.max_steps, per_step=per_step, seed=seed
        )
        streams, pieces, notes = self._open(schedule.tokens)
        layout: dict[str, Any] = {"boundaries": data.boundaries, "target": self.target, "seed": seed}
        batches = Batches(schedule, streams, recipe.positions, **layout)
        kinds = self.kinds if any(map(_asks, data.sources)) else ()
        return Supply(batches, pieces, notes + batches.report, kinds)

    @property
    def taught(self) -> list[str]:
        """Those that are asked while it trains."""
        return [kind for kind in self.kinds if kind in TAUGHT]

    @cached_property
    def kinds(self) -> list[str]:
        """The kinds of questions that the model answers within its context; the cache keeps them."""
        checkpoint = Checkpoint(self.folder)
        decisive = "kinds", checkpoint.fingerprint, tokenizer_digest(self.tokenizer), self.trained
        file = self.cache / f"{key_of((*decisive, self.recipe.seed))[:24]}-kinds.json"
        if file.is_file():
            return [str(kind) for kind in read_json(file)["kinds"]]
        self.say("measuring which kinds of questions the base model answers within its original context")
        model: Any = checkpoint.load()
        kinds = answerable(model.to(best_device()), self.tokenizer, self.trained, seed=self.recipe.seed)
        self.cache.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as partial:
            write_json(partial, {"kinds": kinds})
        return kinds

    def write_windows(self, file: Path) -> None:
        """Write windows [target] of the texts, by their weights, and of nothing that is watched, for a fit.

        The file has a JSON object with `input_ids` in each line, the windows that begin in one document
        after each other; its folder is made.
        """
        wanted, target = TALES + HELD_OUT, self.target
        streams, _, _ = self._open(lambda source: wanted * target)
        texts = {number: stream for number, stream in enumerate(streams) if isinstance(stream, TokenRows)}
        left = {number: (stream.size or 0) // target for number, stream in texts.items()}
        taken, count = dict.fromkeys(texts, 0), 0
        windows: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # by source and document
        while count < wanted and (unread := [number for number in texts if taken[number] < left[number]]):
            sources = self.recipe.data.sources
            number = min(unread, key=lambda number: (taken[number] + 1) / sources[number].weight)
            document = texts[number].document(taken[number], target)
            windows[number, document] += texts[number].row(taken[number], target).ids.tolist()
            taken[number], count = taken[number] + 1, count + 1
        if count < FEWEST:
            raise RopepatchError(
                f"the recipe's texts, less what is held out, make {count} windows of {target} tokens, "
                f"and a fit needs {FEWEST}",
                hint="give more text, or method: {name: fit, text: FILE}",
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as partial:
            lines = (json.dumps({"input_ids": ids}) + "\n" for ids in windows.values())
            partial.write_text("".join(lines), encoding="utf-8")

    def check(self) -> None:
        """Refuse sources of this machine that are missing or too short; neither Hub nor weights are read."""
        windows, _ = self.recipe.data.lengths(self.trained)
        streams, _, _ = self._open(lambda source: max(windows), at_once=True)
        check_rows(streams, windows)

    def _open(
        self, tokens_of: Callable[[int], int], *, at_once: bool = False
    ) -> tuple[list[Stream], list[Tensor], list[str]]:
        """The rows of every source; the pieces that are held out; and a line on every text.

        ``tokens_of`` says how many tokens of a source are wanted, by its number; ``at_once`` leaves out what
        the Hub has or the model writes.
        """
        watch, notes = self.recipe.watch, list[str]()
        held, pieces = held_out_of(self.recipe, self.trained, self.target), list[Tensor]()
        if watch.text is not None and not (at_once and local_files(watch.text) is None):
            text = Texts(text=watch.text, field=watch.field, split=watch.split)
            store = self._tokenised(text, held.count * held.length)
            pieces, _ = held_out(store, held.length, held.count)
            notes.append(f"held out: {store.report}")
        streams: list[Stream] = []
        read: tuple[TokenStore, int] | None = None
        for number, source in enumerate(self.recipe.data.sources):
            seed = seed_of(self.recipe.seed, "source", number)
            if at_once and not is_at_hand(source):
                continue
            if (
                _asks(source) and read
            ):  # in the text of the source before it, which stands in where nothing is asked
                asked = QuestionRows(*read, self.tokenizer, self.taught, seed) if self.taught else None
                streams.append(asked or TokenRows(*read, seed))
                kinds = (
                    ", ".join(self.taught) or "none, the base model answers none within its original context"
                )
                notes.append(f"kinds of training questions: {kinds}")
                continue
            if isinstance(source, Generated) and source.generated != SELF:
                streams.append(GeneratedRows(source.generated, self.tokenizer, seed))
                continue
            begin, tokens = 0, tokens_of(number)
            if number == held.source:
                tokens += held.count * held.length
            if isinstance(source, Texts):
                store = self._tokenised(source, tokens)
            else:
                store = self._self_written(tokens, seed)
            if number == held.source:
                pieces, begin = held_out(store, held.length, held.count)
            read = store, begin
            streams.append(TokenRows(*read, seed))
            notes.append(f"{store.reading.source}: {store.report}")
        if watch.text is None and held.source is None:
            tales = held_out_tales(self.tokenizer, length=held.length, count=held.count)
            pieces = [tale.ids for tale in tales]
        return streams, pieces, notes

    def _self_written(self, tokens: int, seed: int) -> TokenStore:
        windows, _ = self.recipe.data.lengths(self.trained)
        length = min(self.trained, max(windows))
        asked = {"length": length, "tokens": tokens, "seed": seed}
        return self_written(Checkpoint(self.folder), self.tokenizer, **asked, cache=self.cache, say=self.say)

    def _tokenised(self, text: Texts, tokens: int) -> TokenStore:
        limits = {"trained": self.trained, "vocabulary": self.vocabulary, "tokens": tokens}
        return tokenised(text, self.tokenizer, **limits, cache=self.cache)
