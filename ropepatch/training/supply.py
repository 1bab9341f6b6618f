"""The texts of a recipe as batches for training, and held-out pieces for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

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
from ropepatch.training.recipe import QUESTIONS, SELF, RowSource
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

# Tokens of prompts that the model is asked on, per training token; each costs four
ASKED = 1 / 8
SELF_READ = 3  # times that a training reads self-generated text; as good as once (eval/studies/distil)


@dataclass(frozen=True, eq=False)
class Supply:
    """The text of a recipe as token ids. The digest identifies training and held-out text."""

    digest: str
    batches: Batches  # the training batches, one forward pass of one process each
    pieces: list[Tensor]  # held out, [target], or [L] without evaluation at the target
    notes: list[str]  # lines on the texts, for the user

    @property
    def tokens(self) -> int:
        """The number of training tokens, over all processes and steps."""
        return int(self.batches.schedule.windows.sum())


def read_supply(run: Run) -> Supply:
    """Read the texts of a run; they are tokenised once and cached."""
    recipe, reader = run.recipe, _Reader(run, default_cache())
    schedule = Schedule.of(
        recipe.data,
        trained=run.trained,
        steps=recipe.max_steps,
        per_step=run.processes.count * recipe.accumulated,
        seed=recipe.seed,
    )
    for number in range(len(recipe.data.sources)):
        reader.open(number, schedule.tokens(number))
    pieces = reader.held_out()
    batches = Batches(
        schedule,
        reader.streams,
        recipe.positions,
        boundaries=recipe.data.boundaries,
        target=run.plan.target,
        seed=recipe.seed,
    )
    streams = reader.streams
    reports = [schedule.report(*one) for one in enumerate(streams)]
    texts = [stream.digest for stream in streams]
    return Supply(
        key_of((texts, digest(pieces)))[:16], batches, pieces, reader.notes + reports
    )


def check_run(run: Run) -> None:
    """Raise `RopepatchError` if local texts or the run's folder are unsuitable; uses no Hub and no weights."""
    sources, watched = run.recipe.data.sources, run.recipe.watch.text
    windows, _ = run.recipe.data.lengths(run.trained)
    at_hand = [number for number, one in enumerate(sources) if _is_at_hand(one)]
    with TemporaryDirectory(prefix="ropepatch-") as cache:
        reader = _Reader(run, Path(cache))
        for number in at_hand:
            reader.open(number, max(windows))
        if watched is None or local_files(watched) is not None:
            reader.held_out()
        check_rows(reader.streams, windows)
    has_begun = run.out.exists() or run.folder.exists()
    if has_begun and len(at_hand) == len(sources):
        decisive = run.decisive(read_supply(run).digest)
        if not run.is_finished(decisive):
            run.check_resumed(decisive)


def _is_at_hand(source: RowSource) -> bool:
    """Return whether a source needs neither the Hub nor the weights of a model."""
    if isinstance(source, Texts):
        return local_files(source.text) is not None
    return source.generated not in (SELF, QUESTIONS)


class _Reader:
    """Opens the sources of a run's recipe, in their order.

    Held out are `watch.text`, else the beginning of the first text, else stories of the bundled checkpoint.
    """

    def __init__(self, run: Run, cache: Path) -> None:
        self.run, self.cache = run, cache
        self.streams: list[Stream] = []
        self.notes: list[str] = []
        watch = run.recipe.watch
        self._length = run.plan.target if watch.target else run.trained
        self._count = watch.windows
        self._pieces: list[Tensor] = []
        self._text: tuple[TokenStore, int] | None = None  # and where training begins
        generated = run.recipe.data.generated
        texts = [n for n, kind in enumerate(generated) if kind in (None, SELF)]
        self._held = texts[0] if texts and watch.text is None else None
        if self._held is not None and generated[self._held] == SELF:
            # Joined, documents that end at L would contradict each other.
            self._count = self._count * self._length // run.trained
            self._length = run.trained

    def open(self, number: int, tokens: int) -> None:
        """Open a source, to read so many tokens of it."""
        source = self.run.recipe.data.sources[number]
        tokenizer = self.run.tokenizer
        seed = seed_of(self.run.recipe.seed, "source", number)
        if isinstance(source, Texts) or source.generated == SELF:
            self._open_text(number, source, tokens, seed)
        elif source.generated != QUESTIONS:
            self.streams.append(GeneratedRows(source.generated, tokenizer, seed))
        elif self._text is not None:  # `Recipe.check` requires it
            self._open_questions(*self._text, seed)

    def held_out(self) -> list[Tensor]:
        """Return the pieces for evaluation."""
        run, watch = self.run, self.run.recipe.watch
        if watch.text is not None:
            text = Texts(text=watch.text, field=watch.field, split=watch.split)
            store = self._tokenised(text, self._count * self._length)
            self.notes.append(f"held out: {store.report}")
            return held_out(store, self._length, self._count, run.first_token)[0]
        if self._held is not None:
            return self._pieces
        sizes = {"length": self._length, "count": self._count}
        return [tale.ids for tale in held_out_tales(run.tokenizer, **sizes)]

    def _open_text(
        self, number: int, source: RowSource, tokens: int, seed: int
    ) -> None:
        first, begin, apart = self.run.first_token, 0, 0
        if number == self._held:
            apart = self._count * self._length
        if isinstance(source, Texts):
            store = self._tokenised(source, tokens + apart)
        else:
            store = self._self_written(tokens, apart, seed)
        if apart:
            self._pieces, begin = held_out(store, self._length, self._count, first)
        self._text = store, begin
        self.streams.append(TokenRows(store, begin, seed, first))
        self.notes.append(f"{store.name}: {store.report}")

    def _open_questions(self, store: TokenStore, begin: int, seed: int) -> None:
        run, taught = self.run, [kind for kind in self._answered if kind in TAUGHT]
        if not taught:
            self.streams.append(TokenRows(store, begin, seed, run.first_token))
            self.notes.append(
                "no training questions: the base model answers none within its original context"
            )
            return
        self.streams.append(QuestionRows(store, begin, run.tokenizer, taught, seed))
        self.notes.append(f"kinds of training questions: {', '.join(taught)}")

    @cached_property
    def _answered(self) -> list[str]:
        """The kinds of questions that the base model answers within the original length, cached."""
        run, recipe = self.run, self.run.recipe
        _, room = recipe.data.lengths(run.trained)
        most = int(ASKED * room * recipe.accumulated * recipe.max_steps)
        model = run.source.fingerprint, tokenizer_digest(run.tokenizer), run.trained
        software = version("ropepatch"), fastest().dtype
        key = key_of(("kinds", *model, most, recipe.seed, *software))[:24]
        file = self.cache / f"{key}-kinds.json"
        if file.is_file():
            return [str(kind) for kind in read_json(file)["kinds"]]
        run.say(
            "measuring which kinds of questions the base model answers within its original context"
        )
        kinds = answerable(
            placed(run.source.load()),
            run.tokenizer,
            run.trained,
            seed=recipe.seed,
            most=most,
            progress=run.progress,
        )
        self.cache.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as partial:
            write_json(partial, {"kinds": kinds})
        return kinds

    def _self_written(self, tokens: int, apart: int, seed: int) -> TokenStore:
        """Generate text of which a training reads ``tokens``, and as many as are held out."""
        run = self.run
        longest = max(run.recipe.data.lengths(run.trained)[0])
        return self_written(
            run.source,
            run.tokenizer,
            length=min(run.trained, longest),
            tokens=max(longest, -(-tokens // SELF_READ)) + apart,
            seed=seed,
            cache=self.cache,
            progress=run.progress,
        )

    def _tokenised(self, text: Texts, tokens: int) -> TokenStore:
        return tokenised(
            text,
            self.run.tokenizer,
            trained=self.run.trained,
            vocabulary=self.run.plan.config.text.vocab_size,
            tokens=tokens,
            cache=self.cache,
        )
