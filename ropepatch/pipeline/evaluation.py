"""Measure models with a suite, or with one perplexity task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated, Any

from pydantic import BeforeValidator, InstanceOf

from ropepatch.attention import REMAPPINGS
from ropepatch.errors import RopepatchError, argument
from ropepatch.evaluation import measuring
from ropepatch.evaluation.comparisons import comparisons, few
from ropepatch.evaluation.results import Result, measure_of, slug
from ropepatch.evaluation.suites import Method, Suite, read_method, read_suite
from ropepatch.evaluation.tasks import PerplexityTask, check_text
from ropepatch.extension.planning import Plan, plan_method
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.loading import AUTO, check_device, known_dtype
from ropepatch.pipeline.inputs import (
    Arguments,
    Listed,
    Model,
    Place,
    Tokens,
    as_text,
    check_places,
)
from ropepatch.pipeline.results import Results
from ropepatch.pipeline.running import Feedback, Say, interruptible
from ropepatch.processes import Processes, join
from ropepatch.scaling import formulas
from ropepatch.settings import Length, relative_length, short_length

ALL, EVERY_REMAPPING = (
    "all",
    "remappings",
)  # all candidates, and all position remappings, that the model allows
WINDOWS = 24  # default number of windows of text


OF_TASK = ("lengths", "windows", "documents", "stride", "bos", "gain")


class MeasureOptions(Arguments):
    """The common arguments of `evaluate` and `compare`."""

    model: Model | None
    text: Place | None = None
    field: str
    split: str
    original: Tokens | None = None
    out: Place | None = None
    report: Place | None = None
    revision: str | None = None
    device: str | None = None
    dtype: str | None = None
    seed: int | None = None
    command: str | None = None

    @property
    def reading(self) -> dict[str, Any]:
        """The text as settings of a task."""
        return {"text": self.text, "field": self.field, "split": self.split}

    @cached_property
    def source(self) -> Checkpoint:
        """The model, for its original context length."""
        assert self.model is not None
        return Checkpoint.find(self.model, self.revision, original=self.original)

    @cached_property
    def processes(self) -> Processes:
        """The processes that share the call."""
        return join(self.device)

    @cached_property
    def feedback(self) -> Feedback:
        """How it reports progress."""
        return Feedback(say=self.say, progress=self.progress, command=self.command)

    def measured(self, suite: Suite) -> Results:
        """The results of a suite, with a report; raises at once if a place cannot be written."""
        folder, page = check_places(self.out, self.report)
        dtype = known_dtype(self.dtype)
        if self.processes.device != AUTO:
            check_device(self.processes.device)
        how: Any = {"out": folder, "processes": self.processes, "dtype": dtype, "progress": self.progress}
        of: Any = (
            {"source": self.source} if self.model else {"revision": self.revision, "original": self.original}
        )
        results = measuring.measure(suite, **of, **how, say=self.say)
        kept = (
            f"nothing is kept; with {argument('out', 'DIR')} the same command resumes"
            if folder is None
            else f"finished results are kept in {folder}; the same command resumes"
        )
        with interruptible(self.say, lambda: kept):
            return reported(results, page, self.processes, self.feedback)


class EvaluateOptions(MeasureOptions):
    """The arguments of one call of `evaluate`."""

    suite: Annotated[InstanceOf[Suite] | str | None, BeforeValidator(as_text)]
    methods: Listed
    to: Tokens | None
    lengths: Listed | None
    windows: int | None
    documents: int | None
    stride: int | None
    bos: bool | None
    gain: bool
    limit: int | None

    def check(self) -> None:
        """Refuse arguments that cannot be combined."""
        if self.suite is not None:
            given = {"methods": self.methods, "to": self.to} | self.task
            if doubled := [argument(key) for key, value in given.items() if value not in (None, ())]:
                hint = "leave it out, or change a copy: `ropepatch suites NAME > mine.yaml`"
                raise RopepatchError(f"{argument('suite')} already sets {', '.join(doubled)}", hint=hint)
            return
        if self.windows is not None and self.documents is not None:
            hint = "windows join the documents; leave one out"
            words = f"{argument('windows')} cannot be combined with {argument('documents')}"
            raise RopepatchError(words, hint=hint)
        if self.model is None:
            hint = "a checkpoint folder, a Hub id, or tiny"
            raise RopepatchError(f"{argument('model')} is missing", hint=hint)
        check_text(self.text, self.model)
        if self.methods and self.to is None:
            raise RopepatchError(
                f"{argument('methods')} needs {argument('to')}", hint=f"add {argument('to', '32k')}"
            )

    @property
    def task(self) -> dict[str, Any]:
        """The settings of the perplexity task that are given."""
        given = {key: getattr(self, key) for key in OF_TASK}
        if self.bos is not None:
            given["bos"] = "window" if self.bos else "none"
        return {
            key: value
            for key, value in given.items()
            if value is not None and (key, value) != ("gain", False)
        }


def evaluate(options: EvaluateOptions) -> Results:
    """Measure perplexity by length, or a whole suite; see `ropepatch.evaluate`."""
    if options.suite is None:
        suite = _reading(options)
    else:
        suite = named_suite(options.suite, model=options.model, **options.reading)
    return options.measured(suite.narrowed(options.limit, options.seed))


def _lengths(options: EvaluateOptions) -> dict[str, Any]:
    """The given lengths in tokens, ascending."""
    if not options.lengths:
        return {}
    relative = any("x" in str(one) for one in options.lengths)
    window = options.source.stock.window if relative else 0
    return {"lengths": tuple(sorted({relative_length(length, window) for length in options.lengths}))}


def _reading(options: EvaluateOptions) -> Suite:
    """A suite with one perplexity task."""
    model, to, task = options.model, options.to, options.task
    assert model is not None
    methods = options.methods or (() if to is None else ("yarn",))
    if to is not None and any(method in (ALL, EVERY_REMAPPING) for method in methods):
        entrants = without(participants(options.source, methods, to=to), options.say)
    else:
        entrants = [method if isinstance(method, Method) else read_method(method) for method in methods]
    task |= _lengths(options)
    if options.windows is None and options.documents is None:
        task["windows"] = WINDOWS
    else:
        task["windows"] = options.windows
    return Suite(
        models=(model,),
        methods=tuple(entrants),
        to=(to or (task["lengths"][-1] if options.lengths else "1x"),),
        tasks=(PerplexityTask(**options.reading | task),),
    )


def named_suite(
    suite: str | Path | Suite, *, model: str | None = None, text: str | None, field: str, split: str
) -> Suite:
    """A suite, with its model and text replaced by those of the call, if given."""
    if text is None and (field, split) != ("text", "test"):
        raise RopepatchError(
            f"{argument('field')} and {argument('split')} need {argument('text')}",
            hint="leave them out; a suite sets them for its own text",
        )
    named = suite if isinstance(suite, Suite) else read_suite(str(suite))
    tasks = tuple(task.with_text(text, field, split) if text else task for task in named.tasks)
    return named.model_copy(update={"tasks": tasks, "models": (model,) if model else named.models})


def candidates() -> tuple[str, ...]:
    """The methods that `all` stands for: static ones without required parameters.

    A length-dependent method is measured at a fixed target, where it equals its static counterpart, which is
    among them. With a changing length it would not match the keys in the cache.
    """
    return tuple(name for name in formulas() if name != "none")  # the baseline


def participants(
    source: Checkpoint, methods: Iterable[str | dict[str, Any] | Method], *, to: Length
) -> tuple[list[tuple[Method, Plan]], dict[str, str]]:
    """The methods of a comparison with their plans, and those that `all` and `remappings` leave out."""
    groups = {ALL: candidates(), EVERY_REMAPPING: tuple(REMAPPINGS)}
    found: dict[str, tuple[Method, Plan]] = {}
    errors: dict[str, RopepatchError] = {}
    for entry in methods:
        group = groups.get(entry) if isinstance(entry, str) else None
        for candidate in [entry] if group is None else group:
            try:
                method = candidate if isinstance(candidate, Method) else read_method(candidate)
                found[method.label] = method, plan_method(source, method.name, method.parameters, to)
            except RopepatchError as error:
                if group is None:
                    raise
                errors[str(candidate)] = error
    if errors and not found:
        raise next(iter(errors.values()))
    return list(found.values()), {name: str(error) for name, error in errors.items()}


def without(entrants: tuple[list[tuple[Method, Plan]], dict[str, str]], say: Say) -> list[Method]:
    """The methods of `participants`, with a warning for each that is left out."""
    planned, left_out = entrants
    for name, reason in left_out.items():
        say(f"warning: without {name}: {reason}")
    return [method for method, _ in planned]


def reported(
    results: Iterator[Result], report: Path | None, processes: Processes, feedback: Feedback
) -> Results:
    """All results, each announced when finished, and their report."""
    measured: list[Result] = []
    for result in results:
        if not any(other.task == result.task for other in measured):
            for warning in few(result):
                feedback.say(f"warning: {warning}")
        measured.append(result)
        if result.seconds is not None:
            target = "" if result.scaling is None else f" to {short_length(result.target)}"
            feedback.say(f"{result.task}, {result.label}{target}{_first_figure(result)}")
    if report is not None:
        written = processes.write_once(lambda: _report(measured, report, feedback.command))
        feedback.say(f"report: {written}")
    return Results(measured)


def _report(results: Sequence[Result], file: Path, command: str | None) -> Path:
    from ropepatch.report import write_report

    try:
        return write_report(results, file, command=command)
    except (OSError, RopepatchError) as error:
        hint = f"the results are in {_kept(results)}"
        raise RopepatchError(f"cannot write the report: {error}", hint=hint) from error


def _first_figure(result: Result) -> str:
    """The first measure at its greatest length, with its interval, of every kind of question."""
    (group,) = comparisons([result])
    named = ((series.kind, group.last(result.label, series)) for series in group.main if group.results)
    lasts = [(kind, row) for kind, row in named if row is not None]
    if not lasts:
        return ""
    values = (
        " ".join(filter(None, [kind, row.text, row.interval and f"({row.interval})"])) for kind, row in lasts
    )
    first = lasts[0][1]
    return f" at {first.length:,} tokens: {measure_of(first.measure).title.lower()} {', '.join(values)}"


def _kept(results: Sequence[Result]) -> Path:
    """A new temporary folder with the results."""
    folder = Path(mkdtemp(prefix="ropepatch-results-"))
    for number, result in enumerate(results):
        result.write(folder / f"{number:03}-{result.task}-{slug(result.label)}.json")
    return folder
