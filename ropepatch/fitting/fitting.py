"""Fit the frequencies and the attention factor of a model to a target, its weights frozen."""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.measuring import Progress
from ropepatch.evaluation.results import environment
from ropepatch.evaluation.running import distribute, is_first_process, rank_and_ranks
from ropepatch.extension.planning import Plan, plan_scaling
from ropepatch.files import check_resumed, read_json, whole_file, write_json
from ropepatch.fitting.bench import FitBench
from ropepatch.fitting.course import (
    Course,
    JudgedVector,
    batch_of,
    begin,
    draw_windows,
    proceed,
    starts_of,
    steps_in_all,
    stopped,
)
from ropepatch.fitting.examples import Material, read_material
from ropepatch.fitting.objective import Objective
from ropepatch.fitting.problem import BACKWARD, reading
from ropepatch.fitting.searches import run_search
from ropepatch.fitting.settings import FitSettings
from ropepatch.fitting.vectors import Vector
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.loading import check_device, load_model, load_tokenizer
from ropepatch.model.precision import describe_placement, prefers_float32
from ropepatch.model.source import find_source
from ropepatch.model.survey import survey_checkpoint
from ropepatch.scaling.file import write_scaling
from ropepatch.scaling.searched import CustomDivisors

logger = logging.getLogger(__name__)

STATE = "fit.json"  # in the work folder
SEARCHED = 5  # windows, at least, on which a search judges: LongRoPE takes as many texts
STARTING = 3  # of a budget of time, one part in so many goes to the starts
JUDGED = 30  # of the best vectors of a search, the last so many: as often as a descent is judged


@dataclass(frozen=True)
class Fitted:
    """A fitted scaling, how it was found, and how sure it is that it is better.

    Args:
        plan: The scaling on the model it was fitted on; what `ropepatch.patch` and `extend` take.
        record: How it was found, JSON-ready.
    """

    plan: Plan
    record: dict[str, Any]

    @property
    def scaling(self) -> CustomDivisors:
        """The divisors and the attention factor."""
        return cast("CustomDivisors", self.plan.scaling)

    def save(self, file: str | Path) -> Path:
        """Write the small JSON that every command takes for a method.

        Raises:
            RopepatchError: If the file exists or cannot be written.
        """
        plan = self.plan
        return write_scaling(file, plan.scaling, plan.rope, plan.target, fit=self.record)

    def __repr__(self) -> str:
        span = f"{self.plan.rope.original_max_position_embeddings} -> {self.plan.target} tokens"
        gain = self.record.get("held_out", {}).get("gain")
        found = "" if gain is None else f", gain {gain:.4f} nats per token"
        return f"Fitted({self.plan.model}, {span}{found})"

    def __str__(self) -> str:
        held, window = self.record["held_out"], self.plan.rope.original_max_position_embeddings
        gain, behind = held["gain"], held["after"] - held["own_window"]
        count = held["documents"]
        doubt = f"windows of {count} document{'s' * (count > 1)}: no interval"
        if held["gain_interval"] is not None:
            doubt = "95 % {:.3f} to {:.3f}".format(*held["gain_interval"])
        methods = "the best published method" if self.record["init"] == "auto" else "the best of its starts"
        stopped = f", stopped after {self.record['minutes']:g} min" if self.record.get("stopped") else ""
        divisors = ", ".join(f"{divisor:.3g}" for divisor in self.scaling.divisors)
        return "\n".join(
            [
                f"{self.plan.model}: {window} -> {self.plan.target} tokens",
                f"{_better(gain)} than {methods} ({self.record['start']}), {doubt}; "
                f"{_better(-behind)} than the baseline through its own window",
                "loss of held-out test windows, nats per token: "
                f"{held['before']:.4f} -> {held['after']:.4f} ({held['windows']} windows); "
                f"within the first {window} tokens: {held['short_before']:.4f} -> {held['short_after']:.4f}",
                f"frequency scale factors (θ -> θ/d), fastest pair first: {divisors}",
                f"attention factor: {self.scaling.attention_factor:.4g}",
                f"{self.record['forward_tokens'] / 1e6:.2f} M forward tokens, "
                f"{self.record['seconds']:.0f} s{stopped}",
            ]
        )


def _better(gain: float) -> str:
    return f"{abs(gain):.3f} nats/token {'worse' if gain < 0 else 'better'}"


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
    minutes: float | None = None,
    progress: Progress = lambda name: nullcontext(lambda done, total: None),
    say: Callable[[str], None] = lambda line: None,
) -> Fitted:
    """Learn the divisors and the attention factor by which a model reads at a target; no weight changes.

    What is returned is, of the starts and all that was tried on the way, what reads some windows best that
    nothing is learned from: on these it is never worse than any start. The record tells how further windows
    are read, which decided nothing.

    The processes of torch.distributed share the starts, the race of the best of them and the windows that
    decide; what they return is the same, to the bit that of one process with as many threads.

    Args:
        model: A checkpoint folder, a Hub id, or `tiny`.
        to: The target context in tokens.
        text: A file, a folder, a `datasets` id or a saved set; None for the tales of tiny.
        field: The column or key of a document's text.
        split: The split of a `datasets` id or a saved set.
        steps: Steps of gradient descent; a search is given as many forward tokens.
        init: `auto`, or methods to start from, separated by commas.
        search: `descent`, or a name of `SEARCHES`.
        objective: What is minimised; None for the mean over all tokens.
        shape: `free`, `monotone` or `smooth` divisors.
        keep: How many of the fastest pairs keep their frequencies.
        seed: Decides the order of the windows and the random starts.
        spare: Leave out the windows that a perplexity task with so many windows of the target would read.
        revision: The revision of a Hub id.
        device: Where the model is put.
        work: A folder for the state of a descent: the same call goes on from it after an interruption.
        minutes: The descent ends after about so much time, over all calls, with the best until then; a third
            of it is for the starts. None to end as `steps` says, which does not depend on the machine.
        progress: Called with the name of each stage; see `ropepatch.evaluation.measuring.measure`.
        say: Takes a line on where the model is read, and in which precision.

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
    if minutes is not None and (search != "descent" or not 0 < minutes < math.inf):
        raise RopepatchError(
            f"minutes must be a number above 0, and of a descent, got {minutes} for {search}",
            hint="leave it out: a search is given as many forward tokens as the steps of a descent",
        )
    began = time.perf_counter()
    processes = rank_and_ranks(True)[1]
    if processes < int(os.environ.get("WORLD_SIZE", "1")):
        raise RopepatchError("these processes do not know each other", hint="leave --device out")
    if search != "descent" and processes > 1:
        raise RopepatchError("a search runs in one process", hint="--search descent, or without torchrun")
    check_device(device)
    source = find_source(model, revision, weights=True)
    survey = survey_checkpoint(source)
    if keep >= survey.rope.num_pairs:
        raise RopepatchError(
            f"keep must be below the {survey.rope.num_pairs} rotary pairs of {source.name}, got {keep}",
            hint="--keep 0",
        )
    window = survey.rope.original_max_position_embeddings
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
    loaded: Any = load_model(source)
    material.check_ids(loaded.config.get_text_config().vocab_size)
    request = _request(source, to, material, settings)
    with reading(_placed(loaded, device, work), survey) as module:
        for line in describe_placement(loaded):
            say(line)
        bench = FitBench(loaded, tokenizer, module, survey, material, settings)
        budget = math.inf if minutes is None else 60 * minutes
        course, seconds = _run(bench, settings, request, work, progress, began, budget)
        record = request | {
            **({} if minutes is None else {"minutes": minutes, "stopped": not course.finished}),
            "start": course.first.start,
            "found": {"start": course.best.start, "step": course.best.step},
            "decided_by": {
                "windows": len(material.held_out),
                "before": course.first.loss,
                "after": course.best.loss,
            },
            "held_out": bench.outcome(course, material),
            "history": list(course.history),
            "forward_tokens": course.spent,
            "seconds": round(seconds, 1),
            "env": environment(loaded),
        }
    scaling = course.best.point.scaling(to / window)
    return Fitted(plan_scaling(survey, source.name, source.revision, scaling, to), record)


def remove_finished(work: Path) -> None:
    """Remove what a fit left that was killed when it had come to its end; there is nothing to go on with."""
    with suppress(OSError, RopepatchError, LookupError, TypeError, ValueError):  # none, or somebody else's
        names = [path.name for path in work.iterdir()]
        if not names or (names == [STATE] and Course.from_dict(read_json(work / STATE)["course"]).finished):
            logger.warning("removing %s, which a process left that was killed", work)
            shutil.rmtree(work)


def _placed(model: Any, device: str, work: Path | None) -> Any:
    """The model on its device, in the precision in which the fit of a work folder began."""
    if work is None or not (work / STATE).exists():
        choose = partial(prefers_float32, device=device)
        (float32,) = distribute([model], choose, key=lambda model: device, split=True)
    else:
        float32 = read_json(work / STATE).get("dtype") == str(torch.float32)
    return (model.float() if float32 else model).to(device)


def _request(source: Checkpoint, to: int, material: Material, settings: FitSettings) -> dict[str, Any]:
    """All that decides the outcome."""
    return {
        "model": source.name,
        "revision": source.revision,
        "weights": source.fingerprint,
        "to": to,
        "text": material.text,
        "digest": material.digest,
        "windows": len(material.train),
        **settings.model_dump(),
    }


def _run(
    bench: FitBench,
    settings: FitSettings,
    request: dict[str, Any],
    work: Path | None,
    progress: Progress,
    began: float,
    budget: float,
) -> tuple[Course, float]:
    """The course to its end, or that of a budget in seconds, and those it took since it began, in all calls.

    Raises:
        RopepatchError: The work folder holds another fit.
    """
    file = None if work is None else work / STATE
    if file is not None and file.exists():
        state = read_json(file)
        hint = "remove it, or choose another --out"
        check_resumed(f"{file} is of another fit", state.get("asked", {}), request, hint=hint)
        course, began = Course.from_dict(state["course"]), began - state["seconds"]
    else:
        with progress("starts") as advance:
            until = began + budget / STARTING
            course = begin(bench.train, bench.held_out, settings, until=until, advance=advance)
    if settings.search != "descent":
        return _searched(bench, settings, course, progress), time.perf_counter() - began
    with progress("fit") as advance:
        for now in proceed(bench.train, bench.held_out, settings, course):
            advance(now.taken, steps_in_all(settings, now))
            if file is not None and is_first_process() and len(now.history) > len(course.history):
                seconds = time.perf_counter() - began
                file.parent.mkdir(parents=True, exist_ok=True)
                with whole_file(file) as partial:
                    state = {
                        "asked": request,
                        "course": now.to_dict(),
                        "seconds": seconds,
                        "dtype": str(bench.model.dtype),
                    }
                    write_json(partial, state, indent=None)
            course = now
            if not now.finished and budget < math.inf and _late(began + budget):
                course = stopped(bench.held_out, now)
                break
    return course, time.perf_counter() - began


def _late(end: float) -> bool:
    """Whether it is later than that on the first process."""
    (late,) = distribute([end], lambda end: time.perf_counter() > end, key=lambda end: "", split=True)
    return late


def _searched(bench: FitBench, settings: FitSettings, course: Course, progress: Progress) -> Course:
    """The best that a search finds for the forward tokens of the descent."""
    train = bench.train
    budget = steps_in_all(settings, course) * train.cost(batch_of(train)) * (1 + BACKWARD)
    starts = [course.first.point, *starts_of(train, settings).values()]
    windows = draw_windows(train.num_windows, max(batch_of(train), SEARCHED), 0, settings.seed)
    spent = train.spent
    latest: deque[Vector] = deque(maxlen=JUDGED)
    with progress(settings.search) as advance:
        for improvement in run_search(
            settings.search, train, starts, budget=spent + budget, seed=settings.seed, windows=windows
        ):
            latest.append(improvement.vector)
            advance(improvement.spent - spent, budget)
    for vector in latest:
        loss = bench.held_out.by_window(vector).mean().item()
        if loss < course.best.loss:
            course = replace(course, best=JudgedVector(vector.numbers(), loss, settings.search))
    return replace(course, spent=train.spent + bench.held_out.spent, finished=True)
