"""Run a suite: every task on every model, unscaled, scaled and fine-tuned; resumes after interruptions."""

from __future__ import annotations

import glob
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ropepatch.attention import Remapping
from ropepatch.encodings.loading import load_checkpoint
from ropepatch.errors import RopepatchError, argument
from ropepatch.evaluation.comparisons import BASELINE, FLOOR
from ropepatch.evaluation.results import (
    Result,
    as_read,
    environment,
    identity,
    read_result,
    slug,
)
from ropepatch.extension.patching import put
from ropepatch.extension.planning import Plan, plan_method
from ropepatch.extension.record import context_before, without_paths
from ropepatch.files import check_resumed, remove
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.config import text_config
from ropepatch.model.cost import (
    CARDS,
    GIB,
    HOUR,
    Cost,
    forward_bytes,
    forward_operations,
    kind_of,
)
from ropepatch.model.loading import AUTO
from ropepatch.model.precision import (
    describe_placement,
    known_dtype,
    num_parameters,
    placed,
    prefers_float32,
)
from ropepatch.processes import ALONE, Processes
from ropepatch.progress import Progress, no_bar
from ropepatch.settings import Length, relative_length, seed_of, short_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ropepatch.evaluation.suites import Suite
    from ropepatch.evaluation.tasks import Measurement


@dataclass(frozen=True, eq=False)
class Subject:
    """A model to measure; its weights are loaded when they are needed."""

    name: str  # as the user gave it
    source: Checkpoint
    # Those that share the measurements, with the device of this one
    processes: Processes
    # None for the one in which it runs fastest on the device
    dtype: torch.dtype | None = None
    say: Callable[[str], None] = lambda line: (
        None
    )  # takes lines on the placement of the weights
    # The model before fine-tuning: results have its name, texts its tokenizer
    base: Subject | None = None

    @property
    def trained(self) -> int:
        """Its context length in tokens."""
        return self.source.stock.window

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer."""
        return self.source.tokenizer if self.base is None else self.base.tokenizer

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model on its device, in the precision asked for or that the first process finds faster."""
        device = self.processes.device
        spread = AUTO if device == AUTO else None
        loaded = load_checkpoint(self.source, self.dtype, spread)
        if not spread:
            float32 = False
            if self.dtype is None:
                choose = partial(prefers_float32, device=device)
                (float32,) = self.processes.deal(
                    [loaded], choose, lambda model: self.name
                )
            loaded = placed(loaded, device, float32=float32)
        for line in describe_placement(loaded):
            self.say(line)
        return loaded

    def forget_model(self) -> None:
        """Free its memory; the model is loaded again when needed."""
        self.__dict__.pop("model", None)

    @cached_property
    def record(self) -> dict[str, Any]:
        """Its entry in results."""
        weights = self.source.fingerprint
        if self.base is not None:
            return self.base.record | {
                "weights": weights,
                "fine_tuned_from": self.base.record["weights"],
            }
        rope = self.source.stock.rope
        before = context_before(self.source.folder, weights)
        extended = {} if before is None else {"extended_from": before}
        return self.source.positions | {
            "name": self.name,
            "revision": self.source.revision,
            "weights": weights,
            "trained": self.trained,
            **extended,
            "rotary_dim": rope.rotary_dim,
            "rope_theta": rope.rope_theta,
            "inv_freq": rope.inv_freq().tolist(),
        }


Variant = tuple[Subject, str, Plan | None]  # label and scaling


@dataclass(frozen=True, eq=False)
class Job:
    """One task on a model under one scaling."""

    subject: Subject
    label: str
    plan: (
        Plan | None
    )  # of a fine-tuned model, whose checkpoint has the scaling, only recorded
    to: int
    measurement: Measurement
    place: str  # the beginning of its files' names: model, target and task

    def patched(self) -> AbstractContextManager[Any]:
        """A context manager in which its model is scaled."""
        if self.plan is None or self.subject.base is not None:
            return nullcontext()
        return put(self.subject.model, self.plan)

    @property
    def name(self) -> str:
        """The name of its result file, without .json."""
        return f"{self.place}-{slug(self.label)}"

    @cached_property
    def request(self) -> dict[str, Any]:
        """The parts of its result known before the measurement, without paths of this machine."""
        record = None if self.plan is None else self.plan.to_dict()
        keys = (
            "method",
            "factor",
            "parameters",
            "target",
            "attention_factor",
            "inv_freq",
        )
        request: dict[str, Any] = as_read(
            {
                "task": self.measurement.task.name,
                "label": self.label,
                "model": self.subject.record,
                "scaling": None
                if record is None
                else {key: record[key] for key in keys},
                "target": self.to,
                "parameters": self.measurement.parameters,
            }
        )
        return {key: without_paths(value) for key, value in request.items()}


def measure(
    suite: Suite,
    source: Checkpoint | None = None,
    *,
    out: Path | None = None,
    revision: str | None = None,
    original: Length | None = None,
    processes: Processes = ALONE,
    dtype: torch.dtype | None = None,
    progress: Progress = no_bar,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Result]:
    """Yield the results of a suite; those that ``out`` already contains are not measured again.

    An interrupted measurement resumes. Several processes may share the folder. ``source`` is the checkpoint
    of a suite with one model, if already found.
    """
    if not suite.models:
        raise RopepatchError(
            "the suite has no models", hint="pass MODEL on the command line"
        )
    jobs: list[Job] = []
    for name in suite.models:
        found = source or Checkpoint.find(name, revision, original=original)
        subject = Subject(name, found.complete(), processes, dtype, say)
        for to in dict.fromkeys(
            relative_length(length, subject.trained) for length in suite.to
        ):
            plans: dict[str, Plan | None] = {BASELINE: None}
            for method in suite.methods:
                plans[method.label] = plan_method(
                    subject.source, method.name, method.parameters, to
                )
            variants = [(subject, label, plan) for label, plan in plans.items()]
            jobs += _jobs(prepare_tasks(suite, subject.source, to), variants, to)
    return _resumed(jobs, out, progress)


def measure_extension(
    suite: Suite,
    plan: Plan,
    fine_tuned: Path | None = None,
    *,
    label: str = "fine-tuned",
    out: Path | None = None,
    processes: Processes = ALONE,
    dtype: torch.dtype | None = None,
    progress: Progress = no_bar,
    say: Callable[[str], None] = lambda line: None,
    measurements: Mapping[str, Measurement] | None = None,
) -> Iterator[Result]:
    """Yield the results of one extension: of the unchanged model, the patched one, and the fine-tuned one.

    All use the same texts, lengths and prompts, prepared for the unchanged model and the target of the plan.
    Only the tasks of the suite are used. Results from before the training are not measured again. The
    checkpoint ``fine_tuned``, called ``label``, was trained under the plan. ``measurements`` are the prepared
    tasks, if they exist. See `measure`.
    """
    subject = Subject(plan.source.name, plan.checkpoint(), processes, dtype, say)
    variants: list[Variant] = [
        (subject, BASELINE, None),
        (subject, plan.method.name, plan),
    ]
    if fine_tuned is not None:
        after = replace(
            subject, source=Checkpoint.find(fine_tuned, weights=True), base=subject
        )
        if after.source.config.frequencies.distance(plan.change.frequencies):
            raise RopepatchError(
                f"{fine_tuned} does not have the frequencies of {plan.method.name} to {plan.target} tokens",
                hint="pass the checkpoint that this plan produced",
            )
        variants.append((after, label, plan))
    prepared = measurements or prepare_tasks(suite, subject.source, plan.target)
    return _resumed(_jobs(prepared, variants, plan.target), out, progress)


def prepare_tasks(suite: Suite, source: Checkpoint, to: int) -> dict[str, Measurement]:
    """The prepared tasks of a suite for one model and target, by the prefix of their file names."""
    seen: Counter[str] = Counter()
    measurements: dict[str, Measurement] = {}
    for task in suite.tasks:
        seen[task.name] += 1
        number = f"-{seen[task.name]}" if seen[task.name] > 1 else ""
        place = "-".join(
            map(
                slug, (Path(source.name).name, short_length(to), f"{task.name}{number}")
            )
        )
        measurements[place] = task.prepare(
            source.name,
            source.tokenizer,
            trained=source.stock.window,
            to=to,
            family=source.stock.model_type,
        )
    return measurements


def _jobs(
    measurements: Mapping[str, Measurement], variants: Sequence[Variant], to: int
) -> list[Job]:
    """Every task on every variant of one model, ordered so that weights are loaded once."""
    return [
        Job(subject, label, plan, to, measurement, place)
        for _, group in groupby(variants, key=lambda variant: variant[0])
        for alike in [list(group)]
        for place, measurement in measurements.items()
        for subject, label, plan in alike
    ]


def _resumed(jobs: list[Job], out: Path | None, progress: Progress) -> Iterator[Result]:
    """The results of the jobs, after all checks that are possible in advance."""
    floors = dict.fromkeys(f"{job.place}-{FLOOR}" for job in jobs)
    for name, count in Counter([*floors, *(job.name for job in jobs)]).items():
        if count > 1:
            raise RopepatchError(
                f"two results would be called {name}",
                hint="use different names for models and labels",
            )
    earlier = (
        {}
        if out is None
        else {job.name: _earlier(job, out / f"{job.name}.json") for job in jobs}
    )
    return _run(jobs, earlier, _precisions(jobs, earlier, out), out, progress)


def _precisions(
    jobs: list[Job], earlier: Mapping[str, Result | None], out: Path | None
) -> dict[str, str]:
    """The dtype of earlier results, by model; refuses several dtypes for one model."""
    found: dict[str, str] = {}
    for job in jobs:
        result = earlier.get(job.name)
        dtype = result and result.env.get("dtype")
        if dtype and (first := found.setdefault(job.subject.name, dtype)) != dtype:
            raise RopepatchError(
                f"{out} contains results of {job.subject.name} in two precisions, {first} and {dtype}",
                hint=f"choose another {argument('out')}, or remove those of one precision",
            )
    return found


def _run(
    jobs: list[Job],
    earlier: Mapping[str, Result | None],
    precisions: dict[str, str],
    out: Path | None,
    progress: Progress,
) -> Iterator[Result]:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    for subject, group in groupby(jobs, key=lambda job: job.subject):
        own = list(group)
        if subject.dtype is None and (dtype := precisions.get(subject.name)):
            # Differences between precisions must not look like differences between methods.
            subject = replace(subject, dtype=known_dtype(dtype.removeprefix("torch.")))
            own = [replace(job, subject=subject) for job in own]
        ahead = [job for job in own if not earlier.get(job.name)]
        if ahead:
            mapped = [
                job
                for job in ahead
                if job.plan and isinstance(job.plan.method, Remapping)
            ]
            with (
                mapped[0].patched() if mapped else nullcontext()
            ):  # raises its errors before the first job
                pass
            if cost := forecast(subject.model, [job.measurement for job in ahead]):
                subject.say(f"to measure: {cost}")
            precisions.setdefault(subject.name, str(subject.model.dtype))
        for job in own:
            if job.plan is None and (floor := job.measurement.floor) is not None:
                result = Result(**job.request | {"label": FLOOR}, rows=floor, env={})
                yield _written(result, out, f"{job.place}-{FLOOR}", subject)
            yield earlier.get(job.name) or _measured(job, out, progress)
            if out is not None and subject.processes.first:
                for folder in out.glob(_partial(glob.escape(job.name), "?" * 16)):
                    remove(folder)
        subject.forget_model()


def _earlier(job: Job, file: Path) -> Result | None:
    """The result in a file, with the current names of model and text."""
    if not file.exists():
        return None
    result, settings = read_result(file), job.request
    earlier = {key: identity(getattr(result, key)) for key in settings}
    now = {key: identity(value) for key, value in settings.items()}
    if (dtype := job.subject.dtype) and result.env.get("dtype") != str(dtype):
        earlier["dtype"], now["dtype"] = result.env.get("dtype"), str(dtype)
    check_resumed(
        f"{file} was measured with other settings",
        earlier,
        now,
        hint=f"choose another {argument('out')}",
    )
    return replace(result, **settings)


def _measured(job: Job, out: Path | None, progress: Progress) -> Result:
    subject, label = job.subject, job.label
    model = subject.model
    env = environment(model)
    # Never resume with other settings, weights or versions.
    digest = f"{seed_of(job.request, env):016x}"
    keep = None if out is None else out / _partial(job.name, digest)
    began = time.perf_counter()
    length = max(job.measurement.reads or [job.to])
    with (
        job.patched(),
        progress(
            f"{job.measurement.task.name}, {label}, {short_length(length)}"
        ) as advance,
    ):
        rows = job.measurement.run(model, subject.tokenizer, keep, advance)
    seconds = round(time.perf_counter() - began, 2)
    return _written(
        Result(**job.request, rows=rows, env=env, seconds=seconds),
        out,
        job.name,
        subject,
    )


def _partial(name: str, digest: str) -> str:
    """The folder of the partial results of a job."""
    return f".{name}.{digest}.partial"


def _written(result: Result, out: Path | None, name: str, subject: Subject) -> Result:
    if out is not None and subject.processes.first:
        result.write(out / f"{name}.json")
    return result


def forecast(
    model: PreTrainedModel, measurements: Sequence[Measurement]
) -> Cost | None:
    """Estimate the cost of measurements on a device like the model's; None if their lengths are unknown."""
    rows = Counter[int]()
    for measurement in measurements:
        rows.update(measurement.reads or ())
    if not rows:
        return None
    config, weights = text_config(model.config), num_parameters(model)
    operations = sum(
        count * forward_operations(config, weights, length)
        for length, count in rows.items()
    )
    kind, size = kind_of(model.device.type), model.dtype.itemsize
    held = weights * size + forward_bytes(config, max(rows), size, cached=True)
    return Cost(
        steps=sum(rows.values()),
        tokens=sum(length * count for length, count in rows.items()),
        memory=held / GIB,
        hours=operations / HOUR[kind],
        card=CARDS[kind],
    )
