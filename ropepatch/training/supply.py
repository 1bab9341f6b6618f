"""The texts of a recipe as batches for training, and held-out pieces for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from ropepatch.data.questions import TAUGHT
from ropepatch.data.sources import local_files
from ropepatch.data.texts import Texts, digest
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.data.tokens import TokenStore, default_cache, tokenised, tokenizer_digest
from ropepatch.evaluation.exam import answerable
from ropepatch.files import read_json, whole_file, write_json
from ropepatch.model.precision import fastest, placed
from ropepatch.settings import key_of, seed_of
from ropepatch.training.recipe import QUESTIONS, SELF, Recipe, RowSource
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
from ropepatch.training.run import Run
from ropepatch.training.self_written import self_written

ASKED = (
    1 / 8
)  # tokens of prompts that the model is asked on, per training token, each of which costs four
SELF_READ = 3  # times that a training reads self-generated text; as good as once (eval/studies/distil)


@dataclass(frozen=True)
class HeldOut:
    """The pieces of text for evaluation during training."""

    source: (
        int | None
    )  # its number in the recipe; None for `watch.text`, or for the stories of tiny
    length: int  # tokens of a piece
    count: int


def held_out_of(recipe: Recipe, trained: int, target: int) -> HeldOut:
    """Choose the held-out text of a recipe: its `watch.text`, else its first text, else stories."""
    length, count = (target if recipe.watch.target else trained), recipe.watch.windows
    if recipe.watch.text is not None:
        return HeldOut(None, length, count)
    for number, source in enumerate(recipe.data.sources):
        if isinstance(source, Texts):
            return HeldOut(number, length, count)
        if (
            source.generated == SELF
        ):  # joined, documents that end at L would contradict each other
            return HeldOut(number, trained, count * length // trained)
    return HeldOut(None, length, count)


def is_at_hand(source: RowSource) -> bool:
    """Whether a source needs neither the Hub nor the weights of a model."""
    if isinstance(source, Texts):
        return local_files(source.text) is not None
    return source.generated not in (SELF, QUESTIONS)


@dataclass(frozen=True, eq=False)
class Supply:
    """The text of a recipe as token ids."""

    batches: Batches  # the training batches, one forward pass of one process each
    pieces: list[Tensor]  # held out, [target], or [L] without evaluation at the target
    notes: list[str]  # lines on the texts, for the user

    @property
    def tokens(self) -> int:
        """The number of training tokens, over all processes and steps."""
        return int(self.batches.schedule.windows.sum())

    @property
    def digest(self) -> str:
        """The fingerprint of training and held-out text."""
        return f"{seed_of(self.batches.digest, digest(self.pieces)):016x}"


@dataclass(frozen=True, eq=False)
class RecipeReader:
    """Reads the sources of a run's recipe; texts are tokenised once and cached."""

    run: Run
    cache: Path = field(default_factory=default_cache)

    def supply(self) -> Supply:
        """Make training batches and held-out text."""
        run, recipe = self.run, self.run.recipe
        schedule = Schedule.of(
            recipe.data,
            trained=run.trained,
            steps=recipe.max_steps,
            per_step=run.processes.count * recipe.accumulated,
            seed=recipe.seed,
        )
        streams, pieces, notes = self._open(schedule.tokens)
        batches = Batches(
            schedule,
            streams,
            recipe.positions,
            boundaries=recipe.data.boundaries,
            target=run.plan.target,
            seed=recipe.seed,
        )
        return Supply(batches, pieces, notes + batches.report)

    @property
    def most_read(self) -> int:
        """The most tokens of prompts to try, a share of those that the training reads."""
        recipe = self.run.recipe
        _, room = recipe.data.lengths(self.run.trained)
        return int(ASKED * room * recipe.accumulated * recipe.max_steps)

    @property
    def taught(self) -> list[str]:
        """The kinds of questions in the training."""
        return [kind for kind in self.kinds if kind in TAUGHT]

    @cached_property
    def kinds(self) -> list[str]:
        """The kinds of questions that the base model answers within the original length, cached."""
        run, seed = self.run, self.run.recipe.seed
        weights, splits = run.source.fingerprint, tokenizer_digest(run.tokenizer)
        asked = run.trained, self.most_read, seed, version("ropepatch"), fastest().dtype
        file = (
            self.cache / f"{key_of(('kinds', weights, splits, *asked))[:24]}-kinds.json"
        )
        if file.is_file():
            return [str(kind) for kind in read_json(file)["kinds"]]
        run.say(
            "measuring which kinds of questions the base model answers within its original context"
        )
        limits: dict[str, Any] = {
            "seed": seed,
            "most": self.most_read,
            "progress": run.progress,
        }
        kinds = answerable(
            placed(run.source.load()), run.tokenizer, run.trained, **limits
        )
        self.cache.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as partial:
            write_json(partial, {"kinds": kinds})
        return kinds

    def check(self) -> None:
        """Raise `RopepatchError` if a local source is missing or too short; uses neither Hub nor weights."""
        windows, _ = self.run.recipe.data.lengths(self.run.trained)
        streams, _, _ = self._open(lambda source: max(windows), at_once=True)
        check_rows(streams, windows)

    def _open(
        self, tokens_of: Callable[[int], int], *, at_once: bool = False
    ) -> tuple[list[Stream], list[Tensor], list[str]]:
        """Return the streams of all sources, the held-out pieces, and a line on every text.

        ``tokens_of`` returns the tokens to take of a source, by its number. ``at_once`` skips sources on the
        Hub and those that the model generates.
        """
        run, watch, notes = self.run, self.run.recipe.watch, list[str]()
        tokenizer, first = run.tokenizer, run.first_token
        held, pieces = (
            held_out_of(run.recipe, run.trained, run.plan.target),
            list[Tensor](),
        )
        if watch.text is not None and not (at_once and local_files(watch.text) is None):
            text = Texts(text=watch.text, field=watch.field, split=watch.split)
            store = self._tokenised(text, held.count * held.length)
            pieces, _ = held_out(store, held.length, held.count, first)
            notes.append(f"held out: {store.report}")
        streams: list[Stream] = []
        read: tuple[TokenStore, int] | None = None
        for number, source in enumerate(run.recipe.data.sources):
            seed, generated = (
                seed_of(run.recipe.seed, "source", number),
                getattr(source, "generated", None),
            )
            if at_once and not is_at_hand(source):
                continue
            if generated == QUESTIONS and read and self.taught:  # in the text before
                streams.append(QuestionRows(*read, tokenizer, self.taught, seed))
                notes.append(f"kinds of training questions: {', '.join(self.taught)}")
                continue
            if generated == QUESTIONS and read:
                streams.append(TokenRows(*read, seed, first))
                notes.append(
                    "no training questions: the base model answers none within its original context"
                )
                continue
            if generated not in (None, SELF):
                streams.append(GeneratedRows(generated, tokenizer, seed))
                continue
            begin, tokens = 0, tokens_of(number)
            apart = held.count * held.length if number == held.source else 0
            if isinstance(source, Texts):
                store = self._tokenised(source, tokens + apart)
            else:
                store = self._self_written(tokens, apart, seed)
            if apart:
                pieces, begin = held_out(store, held.length, held.count, first)
            read = store, begin
            streams.append(TokenRows(*read, seed, first))
            notes.append(f"{store.name}: {store.report}")
        if watch.text is None and held.source is None:
            tales = held_out_tales(tokenizer, length=held.length, count=held.count)
            pieces = [tale.ids for tale in tales]
        return streams, pieces, notes

    def _self_written(self, tokens: int, apart: int, seed: int) -> TokenStore:
        """Generate text of which a training reads ``tokens``, and as many as are held out."""
        longest = max(self.run.recipe.data.lengths(self.run.trained)[0])
        written = max(longest, -(-tokens // SELF_READ)) + apart
        return self_written(
            self.run.source,
            self.run.tokenizer,
            length=min(self.run.trained, longest),
            tokens=written,
            seed=seed,
            cache=self.cache,
            progress=self.run.progress,
        )

    def _tokenised(self, text: Texts, tokens: int) -> TokenStore:
        vocabulary = self.run.plan.config.text.vocab_size
        limits = {
            "trained": self.run.trained,
            "vocabulary": vocabulary,
            "tokens": tokens,
        }
        return tokenised(text, self.run.tokenizer, **limits, cache=self.cache)


def read_supply(run: Run) -> Supply:
    """Read the texts of a run."""
    return RecipeReader(run).supply()


def check_run(run: Run) -> None:
    """Raise `RopepatchError` before weights are loaded, if texts or folders of a run are unsuitable."""
    with TemporaryDirectory(prefix="ropepatch-") as cache:
        RecipeReader(run, Path(cache)).check()
    at_hand = all(map(is_at_hand, run.recipe.data.sources))
    if at_hand and (run.out.exists() or run.folder.exists()):
        record = run.record(read_supply(run).digest)
        if not run.is_finished(record):
            run.resumed(record)
