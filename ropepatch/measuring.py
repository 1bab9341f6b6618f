"""Run a suite: every task on every model, as it is and scaled, one result each, resumed where it stopped."""

from __future__ import annotations

import glob
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import FLOOR
from ropepatch.evaluation.ranks import is_first_process
from ropepatch.evaluation.results import Result, as_read, environment, read_result
from ropepatch.lengths import relative_length, short_length
from ropepatch.loading import load_model, load_tokenizer
from ropepatch.patching import patch
from ropepatch.planning import Plan, plan
from ropepatch.seeds import seed_of
from ropepatch.source import Source, find_source
from ropepatch.survey import Survey, survey_folder
from ropepatch.tasks import prepare
from ropepatch.weights import fingerprint, read_headers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ropepatch.suites import Suite
    from ropepatch.tasks import Material

AS_IT_IS = "as it is"

Progress = Callable[[str], AbstractContextManager[Callable[[int, int | None], None]]]


@dataclass(frozen=True, eq=False)
class Subject:
    """A model that is measured; its weights are loaded when they are needed."""

    name: str
    source: Source
    survey: Survey
    device: str

    @property
    def trained(self) -> int:
        """The context it reads now, in tokens."""
        return self.survey.rope.original_max_position_embeddings

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer."""
        return load_tokenizer(self.source.folder)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model on its device."""
        loaded: Any = load_model(self.source.folder)
        loaded.to(self.device)
        model: PreTrainedModel = loaded
        return model

    def forget_model(self) -> None:
        """Free its memory; the model is loaded again if it is asked for."""
        self.__dict__.pop("model", None)

    @cached_property
    def record(self) -> dict[str, Any]:
        """What results say of it."""
        rope = self.survey.rope
        return {
            "name": self.name,
            "revision": self.source.revision,
            "weights": fingerprint(read_headers(self.source.folder)),
            "trained": self.trained,
            "rotary_dim": rope.rotary_dim,
            "rope_theta": rope.rope_theta,
            "inv_freq": rope.inv_freq().tolist(),
        }


@dataclass(frozen=True, eq=False)
class Job:
    """One task on one model under one scaling."""

    subject: Subject
    label: str
    plan: Plan | None
    to: int
    material: Material
    place: str  # the beginning of its files' names: model, target and task

    @property
    def name(self) -> str:
        """Of its result file, without .json."""
        return f"{self.place}-{_slug(self.label)}"

    @cached_property
    def asked(self) -> dict[str, Any]:
        """All of its result that does not have to be measured."""
        made = None if self.plan is None else self.plan.to_dict()
        kept = ("method", "factor", "parameters", "target", "attention_factor", "inv_freq")
        return {
            "task": self.material.task.name,
            "label": self.label,
            "model": self.subject.record,
            "scaling": None if made is None else {key: made[key] for key in kept},
            "target": self.to,
            "parameters": self.material.parameters,
        }


def measure(
    suite: Suite,
    *,
    out: Path | None = None,
    revision: str | None = None,
    device: str = "cpu",
    progress: Progress = lambda name: nullcontext(lambda done, total: None),
) -> Iterator[Result]:
    """The results of a suite, as they come.

    Args:
        suite: What to measure.
        out: A folder for the results, one JSON file each. Those it holds already are not measured again, and
            a text that was being read is taken up where it stopped.
        revision: Of models from the Hub.
        device: Where the models are put.
        progress: Called with the name of each job; gives a context manager around a callback that takes how
            much is done and how much there is.

    Raises:
        RopepatchError: A model, method or text that is not there or does not fit, before anything is
            measured; or a result in ``out`` that was measured with other settings.
    """
    if not suite.models:
        raise RopepatchError("the suite names no models", hint="give MODEL on the command line")
    jobs = [job for name in suite.models for job in _jobs(suite, name, revision, device)]
    for name, count in Counter(job.name for job in jobs).items():
        if count > 1:
            raise RopepatchError(f"two results would be called {name}", hint="give models different names")
    found = {} if out is None else {job.name: _found(job, out / f"{job.name}.json") for job in jobs}
    return _run(jobs, found, out, progress)


def _jobs(suite: Suite, name: str, revision: str | None, device: str) -> Iterator[Job]:
    source = find_source(name, revision, weights=True)
    subject = Subject(name, source, survey_folder(source.folder), device)
    for to in dict.fromkeys(relative_length(length, subject.trained) for length in suite.to):
        plans: dict[str, Plan | None] = {AS_IT_IS: None} | {
            method.label: plan(name, to=to, method=method.name, revision=revision, **method.parameters)
            for method in suite.methods
        }
        seen: Counter[str] = Counter()
        for task in suite.tasks:
            seen[task.name] += 1
            material = prepare(task, name, subject.tokenizer, trained=subject.trained, to=to)
            number = f"-{seen[task.name]}" if seen[task.name] > 1 else ""
            for label, made in plans.items():
                place = "-".join(map(_slug, (Path(name).name, short_length(to), f"{task.name}{number}")))
                yield Job(subject, label, made, to, material, place)


def _slug(part: str) -> str:
    return re.sub(r"[^\w.=]+", "-", part).strip("-")


def _run(
    jobs: list[Job], found: Mapping[str, Result | None], out: Path | None, progress: Progress
) -> Iterator[Result]:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    before = None
    for job in jobs:
        if before not in (None, job.subject):
            before.forget_model()
        before = job.subject
        if job.plan is None and (floor := job.material.floor_tables) is not None:
            result = Result(**job.asked | {"label": FLOOR}, tables=floor, env={})
            yield _kept(result, out, f"{job.place}-{FLOOR}")
        yield found.get(job.name) or _measured(job, out, progress)
        if out is not None and is_first_process():
            for partial in out.glob(f".{glob.escape(job.name)}.*.partial"):
                shutil.rmtree(partial, ignore_errors=True)


def _found(job: Job, file: Path) -> Result | None:
    if not file.exists():
        return None
    found = read_result(file)
    for key, wanted in job.asked.items():
        if _told_apart(getattr(found, key)) != _told_apart(as_read(wanted)):
            raise RopepatchError(
                f"{file} was measured with other settings ({key})", hint="choose another --out"
            )
    return found


def _told_apart(value: Any) -> Any:
    """Without the names of model and text, which fingerprint and hash tell better than any spelling."""
    names = {"name", "text"} if isinstance(value, dict) and {"weights", "digest"} & value.keys() else set()
    return {key: item for key, item in value.items() if key not in names} if names else value


def _measured(job: Job, out: Path | None, progress: Progress) -> Result:
    name = f"{job.material.task.name}, {job.label}, {short_length(job.to)}"
    model = job.subject.model
    env = environment(model)
    # Settings, weights and environment tell apart what must not be resumed from one another.
    digest = f"{seed_of(as_read(job.asked), env):016x}"
    keep = None if out is None else out / f".{job.name}.{digest}.partial"
    patched: Any = nullcontext() if job.plan is None else patch(model, job.plan)
    began = time.perf_counter()
    with patched, progress(name) as advance:
        tables = job.material.run(model, job.subject.tokenizer, keep, advance)
    seconds = round(time.perf_counter() - began, 2)
    return _kept(Result(**job.asked, tables=tables, env=env, seconds=seconds), out, job.name)


def _kept(result: Result, out: Path | None, name: str) -> Result:
    if out is not None and is_first_process():
        result.write(out / f"{name}.json")
    return result
