"""The texts of a recipe as batches for training, and held-out pieces for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ropepatch.data.questions import TAUGHT
from ropepatch.data.sources import local_files
from ropepatch.data.texts import Texts, digest
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.data.tokens import TokenStore, default_cache, tokenised, tokenizer_digest
from ropepatch.evaluation.exam import answerable
from ropepatch.files import read_json, whole_file, write_json
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.precision import fastest, placed
from ropepatch.progress import Progress, no_bar
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
from ropepatch.training.self_written import self_written

ASKED = 1 / 8  # tokens of prompts that the model is asked on, per training token, each of which costs four
SELF_READ = 3  # times that a training reads self-generated text; as good as once (eval/studies/distil)


@dataclass(frozen=True)
class HeldOut:
    """The pieces of text for evaluation during training."""

    name: str
    source: int | None  # its number in the recipe; None for `watch.text`, or for the stories of tiny
    length: int  # tokens of a piece
    count: int


def held_out_of(recipe: Recipe, trained: int, target: int) -> HeldOut:
    """Choose the held-out text of a recipe: its `watch.text`, else its first text, else stories."""
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
    """Whether a source needs neither the Hub nor the weights of a model."""
    if isinstance(source, Texts):
        return local_files(source.text) is not None
    return source.generated not in (SELF, QUESTIONS)


def _has_questions(source: RowSource) -> bool:
    return isinstance(source, Generated) and source.generated == QUESTIONS


@dataclass(frozen=True, eq=False)
class Supply:
    """The text of a recipe as token ids."""

    batches: Batches  # the training batches, one forward pass of one process each
    pieces: list[Tensor]  # held out, [target], or [L] without evaluation at the target
    notes: list[str]  # lines on the texts, for the user
    kinds: Sequence[
        str
    ] = ()  # kinds of questions that the base model answers within L, if the recipe has any
    most_read: int = 0  # the most tokens of the prompts that a model is asked on

    @property
    def tokens(self) -> int:
        """The number of training tokens, over all processes and steps."""
        return int(self.batches.schedule.windows.sum())

    @property
    def digest(self) -> str:
        """The fingerprint of training and held-out text."""
        return f"{seed_of(self.batches.digest, digest(self.pieces)):016x}"


@dataclass(frozen=True, eq=False, kw_only=True)
class RecipeReader:
    """Reads the sources of a recipe; texts are tokenised once and cached."""

    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    trained: int  # the original context length, in tokens
    target: int  # the target length, in tokens
    vocabulary: int
    folder: Path  # the checkpoint, which generates the source `generated: self`
    first: int | None = None  # the token at the start of every sequence, if the model's family needs it
    cache: Path = field(default_factory=default_cache)
    say: Callable[[str], None] = lambda line: None  # takes lines for the user
    progress: Progress = no_bar

    def supply(self, per_step: int) -> Supply:
        """Make training batches and held-out text; ``per_step`` batches, of all processes, are one step."""
        recipe, data, seed = self.recipe, self.recipe.data, self.recipe.seed
        schedule = Schedule.of(
            data, trained=self.trained, steps=recipe.max_steps, per_step=per_step, seed=seed
        )
        streams, pieces, notes = self._open(schedule.tokens)
        layout: dict[str, Any] = {"boundaries": data.boundaries, "target": self.target, "seed": seed}
        batches = Batches(schedule, streams, recipe.positions, **layout)
        kinds = self.kinds if any(map(_has_questions, data.sources)) else ()
        return Supply(batches, pieces, notes + batches.report, kinds, self.most_read)

    @property
    def most_read(self) -> int:
        """The most tokens of the prompts of an exam, a share of those that the training reads."""
        _, room = self.recipe.data.lengths(self.trained)
        accumulated: int = self.recipe.trainer.get("gradient_accumulation_steps", 1)
        return int(ASKED * room * accumulated * self.recipe.max_steps)

    @property
    def taught(self) -> list[str]:
        """The kinds of questions in the training."""
        return [kind for kind in self.kinds if kind in TAUGHT]

    @cached_property
    def kinds(self) -> list[str]:
        """The kinds of questions that the base model answers within the original length, cached."""
        checkpoint = Checkpoint(self.folder)
        weights, splits = checkpoint.fingerprint, tokenizer_digest(self.tokenizer)
        asked = self.trained, self.most_read, self.recipe.seed, version("ropepatch"), fastest().dtype
        file = self.cache / f"{key_of(('kinds', weights, splits, *asked))[:24]}-kinds.json"
        if file.is_file():
            return [str(kind) for kind in read_json(file)["kinds"]]
        self.say("measuring which kinds of questions the base model answers within its original context")
        model = placed(checkpoint.load())
        limits: dict[str, Any] = {"seed": self.recipe.seed, "most": self.most_read}
        kinds = answerable(model, self.tokenizer, self.trained, **limits, progress=self.progress)
        self.cache.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as partial:
            write_json(partial, {"kinds": kinds})
        return kinds

    def check(self) -> None:
        """Raise `RopepatchError` if a local source is missing or too short; uses neither Hub nor weights."""
        windows, _ = self.recipe.data.lengths(self.trained)
        streams, _, _ = self._open(lambda source: max(windows), at_once=True)
        check_rows(streams, windows)

    def _open(
        self, tokens_of: Callable[[int], int], *, at_once: bool = False
    ) -> tuple[list[Stream], list[Tensor], list[str]]:
        """Return the streams of all sources, the held-out pieces, and a line on every text.

        ``tokens_of`` returns the tokens to take of a source, by its number. ``at_once`` skips sources on the
        Hub and those that the model generates.
        """
        watch, notes = self.recipe.watch, list[str]()
        held, pieces = held_out_of(self.recipe, self.trained, self.target), list[Tensor]()
        if watch.text is not None and not (at_once and local_files(watch.text) is None):
            text = Texts(text=watch.text, field=watch.field, split=watch.split)
            store = self._tokenised(text, held.count * held.length)
            pieces, _ = held_out(store, held.length, held.count, self.first)
            notes.append(f"held out: {store.report}")
        streams: list[Stream] = []
        read: tuple[TokenStore, int] | None = None
        for number, source in enumerate(self.recipe.data.sources):
            seed = seed_of(self.recipe.seed, "source", number)
            if at_once and not is_at_hand(source):
                continue
            if _has_questions(source) and read:  # in the text before; without questions, that text
                questions = QuestionRows(*read, self.tokenizer, self.taught, seed) if self.taught else None
                streams.append(questions or TokenRows(*read, seed, self.first))
                kinds = (
                    ", ".join(self.taught) or "none, the base model answers none within its original context"
                )
                notes.append(f"kinds of training questions: {kinds}")
                continue
            if isinstance(source, Generated) and source.generated != SELF:
                streams.append(GeneratedRows(source.generated, self.tokenizer, seed))
                continue
            begin, tokens = 0, tokens_of(number)
            apart = held.count * held.length if number == held.source else 0
            if isinstance(source, Texts):
                store = self._tokenised(source, tokens + apart)
            else:
                store = self._self_written(tokens, apart, seed)
            if apart:
                pieces, begin = held_out(store, held.length, held.count, self.first)
            read = store, begin
            streams.append(TokenRows(*read, seed, self.first))
            notes.append(f"{store.name}: {store.report}")
        if watch.text is None and held.source is None:
            tales = held_out_tales(self.tokenizer, length=held.length, count=held.count)
            pieces = [tale.ids for tale in tales]
        return streams, pieces, notes

    def _self_written(self, tokens: int, apart: int, seed: int) -> TokenStore:
        """Generate text of which a training reads ``tokens``, and as many as are held out."""
        longest = max(self.recipe.data.lengths(self.trained)[0])
        written = max(longest, -(-tokens // SELF_READ)) + apart
        sizes = {"length": min(self.trained, longest), "tokens": written, "seed": seed}
        return self_written(
            Checkpoint(self.folder), self.tokenizer, **sizes, cache=self.cache, progress=self.progress
        )

    def _tokenised(self, text: Texts, tokens: int) -> TokenStore:
        limits = {"trained": self.trained, "vocabulary": self.vocabulary, "tokens": tokens}
        return tokenised(text, self.tokenizer, **limits, cache=self.cache)
