"""Fit the frequencies and the attention factor of a model to a target, its weights frozen."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.results import environment
from ropepatch.extension.planning import plan_scaling
from ropepatch.files import check_resumed, read_json, whole_file, write_json
from ropepatch.fitting.bench import Bench
from ropepatch.fitting.course import (
    Course,
    Found,
    batch_of,
    begin,
    proceed,
    starts_of,
    steps_in_all,
)
from ropepatch.fitting.descent import drawn
from ropepatch.fitting.examples import Objective
from ropepatch.fitting.fitted import Fitted
from ropepatch.fitting.material import Material, read_material
from ropepatch.fitting.problem import BACKWARD, reading
from ropepatch.fitting.searches import SEARCHES
from ropepatch.fitting.settings import FitSettings
from ropepatch.fitting.vectors import Vector
from ropepatch.model.loading import load_model, load_tokenizer
from ropepatch.model.source import Source, find_source
from ropepatch.model.survey import survey_folder
from ropepatch.model.weights import fingerprint, read_headers

if TYPE_CHECKING:
    pass

STATE = "fit.json"  # in the work folder
SEARCHED = 5  # windows, at least, on which a search judges: LongRoPE takes as many texts
JUDGED = 30  # of the best vectors of a search, the last so many: as often as a descent is judged

Progress = Callable[[str], AbstractContextManager[Callable[[int, int | None], None]]]


def fit(
    model: str | Path,
    *,
    to: int,
    text: str | Path | None = None,
    field: str = "text",
    split: str = "train",
    steps: int = 100,
    init: str = "auto",
    search: str = "descent",
    objective: Objective | None = None,
    shape: str = "free",
    keep: int = 0,
    seed: int = 0,
    spare: int = 0,
    revision: str | None = None,
    device: str = "cpu",
    work: Path | None = None,
    progress: Progress = lambda name: nullcontext(lambda done, total: None),
) -> Fitted:
    """Learn the divisors and the attention factor by which a model reads at a target; no weight changes.

    What is returned is, of the starts and all that was tried on the way, what reads some windows best that
    nothing is learned from: on these it is never worse than any start. The record tells how further windows
    are read, which decided nothing.

    Args:
        model: A checkpoint folder, a Hub id, or `tiny`.
        to: The target context in tokens.
        text: A file, a folder, a `datasets` id or a saved set; None for the tales of tiny.
        field: The column or key of a document's text.
        split: Of a `datasets` id or a saved set.
        steps: Of gradient descent; a search is given as many forward tokens.
        init: `auto`, or methods to start from, separated by commas.
        search: `descent`, or a name of `SEARCHES`.
        objective: What is minimised; None for the mean over all tokens.
        shape: `free`, `monotone` or `smooth` divisors.
        keep: So many of the fastest pairs keep their frequencies.
        seed: Of the order of the windows, and of random starts.
        spare: Leave out the windows that a perplexity task with so many windows of the target would read.
        revision: Of a Hub id.
        device: Where the model is put.
        work: A folder for the state of a descent: the same call goes on from it after an interruption.
        progress: Called with the name of each stage; gives a context manager around a callback that takes how
            much is done and how much there is.

    Raises:
        RopepatchError: If the model, the target, the text or a setting does not allow it.
    """
    settings = FitSettings(
        steps=steps,
        init=init,
        search=search,
        objective=objective or Objective(),
        shape=shape,
        keep=keep,
        seed=seed,
    )
    began = time.perf_counter()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RopepatchError("a fit runs in one process", hint="start it without torchrun or accelerate")
    source = find_source(model, revision, weights=True)
    found = survey_folder(source.folder)
    if keep >= found.rope.num_pairs:
        raise RopepatchError(
            f"keep must be below the {found.rope.num_pairs} rotary pairs of {source.name}, got {keep}",
            hint="--keep 0",
        )
    window = found.rope.original_max_position_embeddings
    if to <= window:
        raise RopepatchError(
            f"{source.name} already covers {window} tokens; nothing to fit at {to}", hint=f"--to {4 * window}"
        )
    if text is None and source.name != "tiny":
        raise RopepatchError(
            "--text is missing", hint="--text FILE, a folder, a JSONL file or a `datasets` id"
        )
    tokenizer = load_tokenizer(source.folder)
    material = read_material(tokenizer, text, field=field, split=split, length=to, spare=spare)
    loaded: Any = load_model(source.folder)
    _check_ids(material, loaded.config.get_text_config().vocab_size)
    with reading(loaded.to(device), found) as module:
        bench = Bench.of(loaded, tokenizer, module, found, material, settings)
        asked = _asked(source, to, material, settings)
        course, seconds = _run(bench, settings, asked, work, progress, began)
        record = asked | {
            "start": course.first.start,
            "found": {"start": course.best.start, "step": course.best.step},
            "decided_by": {
                "windows": len(material.held_out),
                "before": course.first.loss,
                "after": course.best.loss,
            },
            "held_out": bench.outcome(course, material.unseen),
            "history": list(course.history),
            "forward_tokens": course.spent,
            "seconds": round(seconds, 1),
            "env": environment(loaded),
        }
    scaling = Vector.from_flat(torch.tensor(course.best.vector)).scaling(to / window)
    return Fitted(plan_scaling(found, source.name, source.revision, scaling, to), record)


def _asked(source: Source, to: int, material: Material, settings: FitSettings) -> dict[str, Any]:
    """All that decides the outcome."""
    return {
        "model": source.name,
        "revision": source.revision,
        "weights": fingerprint(read_headers(source.folder)),
        "to": to,
        "text": material.text,
        "digest": material.digest,
        "windows": len(material.train),
        **settings.model_dump(),
    }


def _run(
    bench: Bench,
    settings: FitSettings,
    asked: dict[str, Any],
    work: Path | None,
    progress: Progress,
    began: float,
) -> tuple[Course, float]:
    """The course to its end, and the seconds it took since it began, over all calls."""
    file = None if work is None else work / STATE
    course, earlier = _resumed(file, asked)
    if course is None:
        with progress("starts"):
            course = begin(bench.train, bench.held_out, settings)
    if settings.search != "descent":
        return _searched(bench, settings, course, progress), time.perf_counter() - began
    with progress("fit") as advance:
        for now in proceed(bench.train, bench.held_out, settings, course):
            advance(now.taken, steps_in_all(settings, now))
            if file is not None and len(now.history) > len(course.history):
                seconds = earlier + time.perf_counter() - began
                _keep(file, {"asked": asked, "course": now.to_dict(), "seconds": seconds})
            course = now
    return course, earlier + time.perf_counter() - began


def _searched(bench: Bench, settings: FitSettings, course: Course, progress: Progress) -> Course:
    """The best that a search finds for the forward tokens of the descent."""
    train = bench.train
    budget = steps_in_all(settings, course) * train.cost(batch_of(train)) * (1 + BACKWARD)
    starts = [Vector.from_flat(torch.tensor(course.first.vector)), *starts_of(train, settings).values()]
    windows = drawn(train.num_windows, max(batch_of(train), SEARCHED), 0, settings.seed)
    spent = train.spent
    latest: deque[Vector] = deque(maxlen=JUDGED)
    with progress(settings.search) as advance:
        found = SEARCHES[settings.search](
            train, starts, budget=spent + budget, seed=settings.seed, windows=windows
        )
        for better in found:
            latest.append(better.vector)
            advance(better.spent - spent, budget)
    for vector in latest:
        loss = bench.held_out.by_window(vector).mean().item()
        if loss < course.best.loss:
            course = replace(course, best=Found(tuple(vector.flat().tolist()), loss, settings.search))
    return replace(course, spent=train.spent + bench.held_out.spent, finished=True)


def _check_ids(material: Material, vocabulary: int) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        RopepatchError: With the first.
    """
    for ids in (*material.train, *material.held_out, *material.unseen):
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise RopepatchError(
                f"{material.text} holds token id {ids.max().item()}, the model has {vocabulary}",
                hint="give texts, or ids of the model's own tokenizer",
            )


def _resumed(file: Path | None, asked: dict[str, Any]) -> tuple[Course | None, float]:
    """Where an earlier call stopped, and the seconds it had taken.

    Raises:
        RopepatchError: The folder holds another fit.
    """
    if file is None or not file.exists():
        return None, 0.0
    kept = read_json(file)
    hint = "remove it, or choose another --out"
    check_resumed(f"{file} is of another fit", kept.get("asked", {}), asked, hint=hint)
    return Course.from_dict(kept["course"]), kept["seconds"]


def _keep(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as partial:
        write_json(partial, content, indent=None)
