"""The texts of a recipe as batches for training, and held-out pieces for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from torch import Tensor

from ropepatch.data.questions import VERSION
from ropepatch.data.texts import Texts, digest
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.data.tokens import default_cache, tokenised, tokenizer_digest
from ropepatch.evaluation.retrieval import answerable
from ropepatch.files import read_json, whole_file, write_json
from ropepatch.model.architectures import BOS_IN_EACH_WINDOW
from ropepatch.model.precision import fastest, placed
from ropepatch.settings import key_of, seed_of
from ropepatch.training.recipe import QUESTIONS, SELF
from ropepatch.training.rows import (
    Batches,
    GeneratedRows,
    QuestionRows,
    Schedule,
    Stream,
    TokenRows,
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
    taught: list[str]  # the kinds of questions that are asked

    @property
    def tokens(self) -> int:
        """The number of training tokens, over all processes and steps."""
        return int(self.batches.schedule.windows.sum())


def read_supply(run: Run) -> Supply:
    """Read the texts of a run; they are tokenised once and cached.

    Held out are `watch.text`, else the beginning of the first text, else stories of the bundled checkpoint.
    """
    recipe, watch, notes = run.recipe, run.recipe.watch, list[str]()
    tokenizer, first = run.source.tokenizer, None
    if run.plan.config.model_type in BOS_IN_EACH_WINDOW:
        first = tokenizer.bos_token_id
    schedule = Schedule.of(
        recipe.data,
        trained=run.trained,
        steps=recipe.max_steps,
        per_step=run.processes.count * recipe.accumulated,
        seed=recipe.seed,
    )
    length = run.plan.target if watch.target else run.trained
    count = watch.windows
    read = partial(
        tokenised,
        tokenizer=tokenizer,
        trained=run.trained,
        vocabulary=run.plan.config.text.vocab_size,
    )
    pieces: list[Tensor] = []
    if watch.text is not None:
        text = Texts(text=watch.text, field=watch.field, split=watch.split)
        store = read(text, tokens=count * length)
        notes.append(f"held out: {store.report}")
        pieces, _ = held_out(store, length, count, first)
    streams: list[Stream] = []
    taught: list[str] = []
    for number, source in enumerate(recipe.data.sources):
        seed = seed_of(recipe.seed, "source", number)
        tokens = schedule.tokens(number)
        if isinstance(source, Texts) or source.generated == SELF:
            begin = 0
            is_held = not pieces
            if is_held and not isinstance(source, Texts):
                # Joined, documents that end at L would contradict each other.
                count = count * length // run.trained
                length = run.trained
            apart = count * length if is_held else 0
            if isinstance(source, Texts):
                store = read(source, tokens=tokens + apart)
            else:
                longest = int(schedule.windows.max())
                store = self_written(
                    run.source,
                    tokenizer,
                    length=min(run.trained, longest),
                    tokens=max(longest, -(-tokens // SELF_READ)) + apart,
                    seed=seed,
                    progress=run.progress,
                )
            if is_held:
                pieces, begin = held_out(store, length, count, first)
            notes.append(f"{store.name}: {store.report}")
            streams.append(TokenRows(store, begin, seed, first))
        elif source.generated != QUESTIONS:
            streams.append(GeneratedRows(source.generated, tokenizer, seed))
        elif kinds := _answered(run):
            taught = sorted(kinds)
            # `Recipe.check` requires a text before it
            notes.append(f"kinds of training questions: {', '.join(kinds)}")
            streams.append(QuestionRows(store, begin, tokenizer, kinds, seed))
        else:
            notes.append(
                "no training questions: the base model answers none within its length; SmolLM2 then lost quotes"
            )
            streams.append(TokenRows(store, begin, seed, first))
    if not pieces:
        tales = held_out_tales(tokenizer, length=length, count=count)
        pieces = [tale.ids for tale in tales]
    batches = Batches(
        schedule,
        streams,
        recipe.positions,
        boundaries=recipe.data.boundaries,
        target=run.plan.target,
        seed=recipe.seed,
    )
    texts = [stream.digest for stream in streams]
    key = key_of((texts, digest(pieces)))[:16]
    return Supply(key, batches, pieces, notes, taught)


def _answered(run: Run) -> list[str]:
    """The kinds of questions that the base model answers within the original length, cached."""
    recipe, tokenizer = run.recipe, run.source.tokenizer
    _, room = recipe.data.lengths(run.trained)
    most = int(ASKED * room * recipe.accumulated * recipe.max_steps)
    settings = (
        VERSION,
        run.source.fingerprint,
        tokenizer_digest(tokenizer),
        run.trained,
        most,
        recipe.seed,
    )
    key = key_of(("kinds", *settings, version("ropepatch"), fastest()))[:24]
    file = default_cache() / f"{key}-kinds.json"
    if file.is_file():
        return [str(kind) for kind in read_json(file)["kinds"]]
    kinds = answerable(
        placed(run.source.load()),
        tokenizer,
        run.trained,
        seed=recipe.seed,
        most=most,
        progress=run.progress,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as partial:
        write_json(partial, {"kinds": kinds})
    return kinds
