"""Suites, and their results: models unscaled, scaled and fine-tuned, one after the other.

An interrupted measurement resumes.
"""

from __future__ import annotations

import glob
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import groupby
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import BeforeValidator, ConfigDict, Field, with_config
from typing_extensions import TypedDict

from ropepatch.attention import REMAPPINGS, Remapping
from ropepatch.encodings.loading import load_checkpoint
from ropepatch.errors import RopepatchError, argument
from ropepatch.evaluation.results import (
    BASELINE,
    FLOOR,
    Result,
    as_read,
    environment,
    identity,
    read_result,
    slug,
)
from ropepatch.evaluation.tasks import TASKS, Data, Goal, Task
from ropepatch.extension.patching import put
from ropepatch.extension.planning import Plan, check_method, plan_method
from ropepatch.extension.record import context_before, taught_kinds, without_paths
from ropepatch.files import check_resumed, remove
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.loading import AUTO
from ropepatch.model.precision import (
    check_device,
    describe_placement,
    known_dtype,
    placed,
)
from ropepatch.processes import ALONE, Processes, join
from ropepatch.progress import Progress, Say, no_bar, silent
from ropepatch.scaling import METHODS, formulas
from ropepatch.settings import (
    SUITES,
    Length,
    Settings,
    Several,
    Text,
    find_shipped,
    named_in,
    relative_length,
    seed_of,
    short_length,
    shown,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Suites


class Method(Settings):
    """A scaling or a position remapping with its parameters.

    Args:
        name: A name from `METHODS` or `REMAPPINGS`.
        parameters: The parameters that differ from their defaults.
    """

    name: Text
    parameters: dict[str, Any] = Field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its name in tables and figures."""
        given = [f"{key}={_short(value)}" for key, value in self.parameters.items()]
        return f"{self.name} ({', '.join(given)})" if given else self.name


def read_method(content: Any) -> Method:
    """A method from YAML: its name, or a mapping with a name and parameters."""
    if isinstance(content, Method):
        return content
    parameters = dict(content) if isinstance(content, dict) else {"name": content}
    name = parameters.pop("name", None)
    if not isinstance(name, str):
        raise RopepatchError(
            f"a method must be a name, or a mapping with a name, got {content!r}"
        )
    check_method(name, parameters)
    return Method(name=name, parameters=parameters)


def candidates() -> tuple[str, ...]:
    """The methods that `all` stands for: static ones without required parameters.

    A length-dependent method is measured at a fixed target, where it equals its static counterpart, which is
    among them. With a changing length it would not match the keys in the cache.
    """
    return tuple(name for name in formulas() if name != "none")  # the baseline


def participants(
    source: Checkpoint,
    methods: Iterable[str | dict[str, Any] | Method],
    *,
    to: Length,
    say: Say,
) -> tuple[Method, ...]:
    """The methods of a comparison, each of which has a plan; those that a group leaves out are said."""
    groups = {"all": candidates(), "remappings": tuple(REMAPPINGS)}
    found: dict[str, Method] = {}
    for entry in methods:
        group = groups.get(entry) if isinstance(entry, str) else None
        for candidate in group or [entry]:
            try:
                method = read_method(candidate)
                plan_method(source, method.name, method.parameters, to)
            except RopepatchError as error:
                if group is None:
                    raise
                say(f"warning: without {candidate}: {error}")
            else:
                found[method.label] = method
    return tuple(found.values())


def read_task(content: Any) -> Task:
    """A task from YAML: a mapping with the name of the task and its settings."""
    if isinstance(content, Task):
        return content
    if not isinstance(content, dict) or "task" not in content:
        raise RopepatchError(
            f"a task must be a mapping with the key task, got {shown(content)}",
            hint=f"tasks: {', '.join(TASKS)}",
        )
    settings = {key: content[key] for key in content if key != "task"}
    return TASKS.find(content["task"]).model_validate(settings)


@with_config(ConfigDict(extra="allow"))
class NamedMethod(TypedDict):
    """A method with its parameters."""

    name: Text


# As YAML has them, for editors:
WrittenScaling = (
    Annotated[str, named_in(METHODS)]
    | Annotated[str, Field(pattern=r"\.json$")]
    | NamedMethod
)
WrittenMethod = WrittenScaling | Annotated[str, named_in(REMAPPINGS)]
WrittenTask: Any = reduce(or_, TASKS.values())
ReadMethod = Annotated[
    Method, BeforeValidator(read_method, json_schema_input_type=WrittenMethod)
]
ReadTask = Annotated[
    Task, BeforeValidator(read_task, json_schema_input_type=WrittenTask)
]


class Suite(Settings):
    """Measurements over models, methods, target lengths and tasks; each model is also measured unscaled.

    Args:
        models: Folders, Hub ids or tiny; MODEL on the command line replaces them.
        methods: The scalings and position remappings.
        to: The target lengths; without methods, the greatest lengths to measure.
        tasks: The tasks to measure.
    """

    models: tuple[Text, ...] = ()
    methods: tuple[ReadMethod, ...] = ()
    to: Several[Length]
    tasks: Several[ReadTask]

    def narrowed(self, limit: int | None, seed: int | None) -> Suite:
        """The suite with at most ``limit`` pieces, prompts and documents, and with a seed."""
        if limit is not None and limit < 1:
            raise RopepatchError(
                f"{argument('limit')} must be at least 1, got {limit}",
                hint="leave it out for no limit",
            )
        tasks = []
        for task in self.tasks:
            if seed is not None and "seed" in type(task).model_fields:
                task = task.model_copy(update={"seed": seed})
            tasks.append(task if limit is None else task.limited(limit))
        return self.model_copy(update={"tasks": tuple(tasks)})


def read_suite(name: str) -> Suite:
    """A bundled suite by its name, or the suite of a YAML file."""
    return Suite.from_yaml(find_shipped(name, SUITES, "suite"))


def _short(value: Any) -> str:
    """A value within a label; of a list its length and a hash."""
    if isinstance(value, list | tuple):
        return f"{len(value)} numbers {seed_of(*value) % 16**6:06x}"
    return str(value)


# Measurements


@dataclass(eq=False)
class Machine:
    """What measures a model: the processes that share the work, with the device of this one, and a precision.

    Attributes:
        processes: The processes.
        dtype: The precision; None, until the model is loaded, for the one in which it runs fastest there.
        say: Takes lines on the placement of the weights and the cost.
    """

    processes: Processes = ALONE
    dtype: torch.dtype | None = None
    say: Say = silent

    @classmethod
    def of(cls, device: str | None, dtype: str | None, say: Say) -> Machine:
        """All processes of a call, on a device that exists; None for a GPU if there is one."""
        processes = join(device)
        if processes.device != AUTO:
            check_device(processes.device)
        return cls(processes, known_dtype(dtype), say)


HERE = Machine()


@dataclass(eq=False)
class Subject:
    """A model to measure; its weights are loaded when they are needed."""

    name: str  # as the user gave it
    source: Checkpoint
    machine: Machine
    base: Subject | None = None  # the model before fine-tuning: results have its name

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model on its device, in the precision asked for or that is faster there."""
        device, dtype = self.machine.processes.device, self.machine.dtype
        if device == AUTO:
            loaded = load_checkpoint(self.source, dtype, AUTO)
        else:
            loaded = load_checkpoint(self.source, dtype)
            loaded = placed(loaded, device, float32=False if dtype else None)
        self.machine.dtype = loaded.dtype
        self.machine.say(describe_placement(loaded))
        return loaded

    def forget_model(self) -> None:
        """Free its memory; the model is loaded again when needed."""
        self.__dict__.pop("model", None)

    @cached_property
    def record(self) -> dict[str, Any]:
        """Its entry in results."""
        weights = self.source.fingerprint
        taught = taught_kinds(self.source.folder, weights)
        kinds = {"taught": taught} if taught else {}
        if self.base is not None:
            return self.base.record | {
                "weights": weights,
                "fine_tuned_from": self.base.record["weights"],
                **kinds,
            }
        rope = self.source.stock.rope
        record = self.source.positions | {
            "name": self.name,
            "revision": self.source.revision,
            "weights": weights,
            "trained": self.source.stock.window,
            **kinds,
            "rotary_dim": rope.rotary_dim,
            "rope_theta": rope.rope_theta,
            "inv_freq": rope.inv_freq().tolist(),
        }
        before = context_before(self.source.folder, weights)
        if before is not None:
            record["extended_from"] = before
        if rope.carried_attention_factor != 1:
            record["attention_factor"] = rope.carried_attention_factor
        return record


Plans = dict[Subject, dict[str, Plan | None]]  # by label


@dataclass(frozen=True, eq=False)
class Job:
    """The measurement of one result: a model under a label, and what is measured."""

    subject: Subject
    label: str
    # The scaling; that of a fine-tuned model, whose checkpoint contains it, is only recorded
    plan: Plan | None
    to: int
    data: Data
    place: str  # the beginning of its files' names: model, target and task

    @cached_property
    def name(self) -> str:
        """The name of its result file, without .json."""
        return f"{self.place}-{slug(self.label)}"

    def patched(self) -> AbstractContextManager[Any]:
        """A context manager in which its model is scaled."""
        if self.plan is None or self.subject.base is not None:
            return nullcontext()
        return put(self.subject.model, self.plan)

    @cached_property
    def request(self) -> dict[str, Any]:
        """The parts of its result known before the measurement, without paths of this machine."""
        scaling = None
        if self.plan is not None:
            frequencies = self.plan.frequencies()
            scaling = {
                "method": self.plan.method.name,
                "factor": self.plan.factor,
                "parameters": self.plan.method.parameters(),
                "target": self.plan.target,
                "attention_factor": frequencies.attention_factor,
                "inv_freq": frequencies.inv_freq.tolist(),
            }
        known = {
            "task": self.data.task,
            "label": self.label,
            "model": self.subject.record,
            "scaling": scaling,
            "target": self.to,
            "parameters": self.data.parameters,
        }
        request: dict[str, Any] = without_paths(as_read(known))
        return request


def measure(
    suite: Suite,
    source: Checkpoint | None = None,
    *,
    out: Path | None = None,
    revision: str | None = None,
    original: Length | None = None,
    machine: Machine = HERE,
    progress: Progress = no_bar,
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
        subject = Subject(name, found.complete(), replace(machine))
        window = subject.source.stock.window
        for to in dict.fromkeys(relative_length(length, window) for length in suite.to):
            plans: dict[str, Plan | None] = {BASELINE: None}
            for method in suite.methods:
                plans[method.label] = plan_method(
                    subject.source, method.name, method.parameters, to
                )
            jobs += _jobs(suite, {subject: plans}, to)
    return _resumed(jobs, out, progress)


def measure_extension(
    suite: Suite,
    plan: Plan,
    fine_tuned: Path | None = None,
    *,
    out: Path | None = None,
    machine: Machine = HERE,
    progress: Progress = no_bar,
) -> Iterator[Result]:
    """Yield the results of one extension: of the unchanged model, the patched one, and the fine-tuned one.

    All use the same texts, lengths and prompts, prepared for the unchanged model and the target of the plan.
    Only the tasks of the suite are used. Results from before the training are not measured again. The
    checkpoint ``fine_tuned`` was trained under the plan. See `measure`.
    """
    machine, to = replace(machine), plan.target
    subject = Subject(plan.source.name, plan.checkpoint(), machine)
    plans: Plans = {subject: {BASELINE: None, plan.method.name: plan}}
    if fine_tuned is not None:
        source = Checkpoint.find(fine_tuned, weights=True)
        if source.config.frequencies.distance(plan.change.frequencies):
            raise RopepatchError(
                f"{fine_tuned} does not have the frequencies of {plan.method.name} to {to} tokens",
                hint="pass the checkpoint that this plan produced",
            )
        after = Subject(plan.source.name, source, machine, base=subject)
        plans[after] = {f"{plan.method.name} + training": plan}
    return _resumed(_jobs(suite, plans, to), out, progress)


def _jobs(suite: Suite, plans: Plans, to: int) -> list[Job]:
    """The tasks of a suite on every model under its plans; the data are prepared for the first model."""
    source = next(iter(plans)).source
    stock = source.stock
    goal = Goal(source.name, source.tokenizer, stock.window, to, stock.model_type)
    seen: Counter[str] = Counter()
    data = {}
    for task in suite.tasks:
        seen[task.name] += 1
        number = f"-{seen[task.name]}" if seen[task.name] > 1 else ""
        parts = Path(source.name).name, short_length(to), f"{task.name}{number}"
        data["-".join(map(slug, parts))] = task.prepare(goal)
    return [
        Job(subject, label, plan, to, one, place)
        for subject, of_subject in plans.items()
        for place, one in data.items()
        for label, plan in of_subject.items()
    ]


def _resumed(jobs: list[Job], out: Path | None, progress: Progress) -> Iterator[Result]:
    """The results of the jobs, after all checks that are possible in advance."""
    names = Counter(job.name for job in jobs)
    names.update({f"{job.place}-{FLOOR}" for job in jobs})
    (name, count), *_ = names.most_common(1)
    if count > 1:
        raise RopepatchError(
            f"two results would be called {name}",
            hint="use different names for models and labels",
        )
    earlier: dict[str, Result] = {}
    for job in jobs:
        if out is not None and (file := out / f"{job.name}.json").exists():
            earlier[job.name] = _earlier(job, file)
    return _run(jobs, earlier, out, progress)


def _run(
    jobs: list[Job],
    earlier: Mapping[str, Result],
    out: Path | None,
    progress: Progress,
) -> Iterator[Result]:
    """Measure job by job; a model is loaded once, and freed before the next."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    for subject, group in groupby(jobs, key=lambda job: job.subject):
        of_subject = list(group)
        _check_remapping([job for job in of_subject if job.name not in earlier])
        for job in of_subject:
            if job.plan is None and job.data.floor is not None:
                request = job.request | {"label": FLOOR}
                result = Result(**request, rows=job.data.floor, env={})
                yield _written(result, out, f"{job.place}-{FLOOR}", subject)
            yield earlier.get(job.name) or _measured(job, out, progress)
            if out is not None and subject.machine.processes.first:
                for folder in out.glob(_partial(glob.escape(job.name), "?" * 16)):
                    remove(folder)
        subject.forget_model()


def _check_remapping(jobs: Sequence[Job]) -> None:
    """Raise the error of a position remapping that the model does not support, before the first job."""
    for job in jobs:
        if job.plan is not None and isinstance(job.plan.method, Remapping):
            with job.patched():
                return


def _earlier(job: Job, file: Path) -> Result:
    """The result in a file, with the current names of model and text; the others get its precision."""
    result, settings = read_result(file), job.request
    dtype = result.env.get("dtype")
    machine = job.subject.machine
    if machine.dtype is None and dtype is not None:
        machine.dtype = known_dtype(dtype.removeprefix("torch."))
    earlier = {key: identity(getattr(result, key)) for key in settings}
    now = {key: identity(value) for key, value in settings.items()}
    check_resumed(
        f"{file} was measured with other settings",
        earlier | {"dtype": dtype},
        now | {"dtype": str(machine.dtype)},
        hint=f"choose another {argument('out')}",
    )
    return replace(result, **settings)


def _measured(job: Job, out: Path | None, progress: Progress) -> Result:
    model = job.subject.model
    env = environment(model)
    # Never resume with other settings, weights or versions.
    digest = f"{seed_of(job.request, env):016x}"
    keep = None if out is None else out / _partial(job.name, digest)
    began = time.perf_counter()
    bar = progress(f"{job.data.task}, {job.label}, {short_length(job.to)}")
    with job.patched(), bar as advance:
        rows = job.data.measure(model, keep, advance)
    seconds = round(time.perf_counter() - began, 2)
    result = Result(**job.request, rows=rows, env=env, seconds=seconds)
    return _written(result, out, job.name, job.subject)


def _partial(name: str, digest: str) -> str:
    """The folder of the partial results of a job."""
    return f".{name}.{digest}.partial"


def _written(result: Result, out: Path | None, name: str, subject: Subject) -> Result:
    if out is not None and subject.machine.processes.first:
        result.write(out / f"{name}.json")
    return result
