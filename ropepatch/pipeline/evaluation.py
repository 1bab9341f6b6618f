"""Measure models by a suite, or by one task of reading."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from ropepatch.attention import MAPS
from ropepatch.errors import RopepatchError, argument
from ropepatch.evaluation import measuring
from ropepatch.evaluation.comparisons import few
from ropepatch.evaluation.results import Result, measure_of, slug
from ropepatch.evaluation.suites import Method, Suite, read_method, read_suite
from ropepatch.evaluation.tasks import PerplexityTask, check_text
from ropepatch.extension.planning import Plan, plan_method
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.loading import AUTO, check_device, known_dtype
from ropepatch.pipeline.inputs import check_places, in_tokens, model_name, text_name
from ropepatch.pipeline.results import Results
from ropepatch.pipeline.running import Feedback, Say, interruptible
from ropepatch.processes import Processes, join
from ropepatch.progress import Progress
from ropepatch.scaling import formulas
from ropepatch.settings import Length, listed

ALL, EVERY_MAP = "all", "maps"  # stand for every candidate, and every attention map, that the model allows
WINDOWS = 24  # of text, if nothing else is said


def evaluate(
    model: str | os.PathLike[str] | None,
    suite: str | Path | Suite | None,
    *,
    methods: str | Iterable[str | dict[str, Any] | Method],
    to: Length | None,
    original: Length | None,
    text: str | Path | None,
    field: str,
    split: str,
    out: str | Path | None,
    report: str | Path | None,
    revision: str | None,
    device: str | None,
    dtype: str | None,
    limit: int | None,
    seed: int | None,
    say: Say,
    progress: Progress,
    command: str | None,
    **task: Any,
) -> Results:
    """Measure perplexity by length, or a whole suite: `ropepatch.evaluate`."""
    task = {option: value for option, value in task.items() if value is not None}
    name = None if model is None else model_name(model)
    text, feedback = text_name(text), Feedback(say=say, progress=progress, command=command)
    if suite is None:
        task |= {"text": text, "field": field, "split": split}
        suite = _reading(name, revision, original, listed(methods or ()), to, task, say)
    else:
        options = {"methods": methods or None, "to": to} | task
        if refused := [argument(option) for option, value in options.items() if value is not None]:
            raise RopepatchError(
                f"{', '.join(refused)} beside {argument('suite')}",
                hint="the suite says it: copy its YAML file and change that",
            )
        suite = named_suite(suite, model=name, text=text, field=field, split=split)
    of: dict[str, Any] = {
        "revision": revision,
        "original": original,
        "dtype": dtype,
        "processes": join(device),
    }
    return measured(suite.narrowed(limit, seed), out=out, report=report, **of, feedback=feedback)


def _reading(
    model: str | None,
    revision: str | None,
    original: Length | None,
    methods: list[str | dict[str, Any] | Method],
    to: Length | None,
    task: dict[str, Any],
    say: Say,
) -> Suite:
    """The suite of one perplexity task."""
    if task.get("windows") and task.get("documents"):
        raise RopepatchError(
            f"{argument('windows')} beside {argument('documents')}",
            hint="either join the documents or do not",
        )
    if model is None:
        raise RopepatchError(f"{argument('model')} is missing", hint="a checkpoint folder, a Hub id, or tiny")
    check_text(task["text"], model)
    if methods and to is None:
        raise RopepatchError(f"{argument('methods')} needs a target", hint=argument("to", "32k"))
    if to is not None and not methods:
        methods = ["yarn"]
    if to is not None and any(method in (ALL, EVERY_MAP) for method in methods):
        drawn, left_out = participants(model, methods, to=to, revision=revision, original=original)
        entrants = [method for method, _ in drawn]
        for candidate, reason in left_out.items():
            say(f"warning: without {candidate}: {reason}")
    else:
        entrants = [method if isinstance(method, Method) else read_method(method) for method in methods]
    if task.get("lengths"):
        tokens = {in_tokens(length, model, revision, original) for length in listed(task["lengths"])}
        task["lengths"] = tuple(sorted(tokens))
    windows = None if task.get("documents") else task.get("windows") or WINDOWS
    return Suite(
        models=(model,),
        methods=tuple(entrants),
        to=(to or (task["lengths"][-1] if task.get("lengths") else "1x"),),
        tasks=(PerplexityTask(**task | {"windows": windows}),),
    )


def named_suite(
    suite: str | Path | Suite, *, model: str | None = None, text: str | None, field: str, split: str
) -> Suite:
    """A suite, with the model and the text of the call, if given, in place of its own.

    Raises:
        RopepatchError: No such suite, or a field or a split of no text.
    """
    if text is None and (field, split) != ("text", "test"):
        raise RopepatchError(
            f"{argument('field')} and {argument('split')} are of {argument('text')}, which is missing",
            hint="a suite says them of its own text",
        )
    named = suite if isinstance(suite, Suite) else read_suite(str(suite))
    tasks = tuple(task.with_text(text, field, split) if text else task for task in named.tasks)
    return named.model_copy(update={"tasks": tasks, "models": (model,) if model else named.models})


def candidates() -> tuple[str, ...]:
    """The methods of the registry that `all` stands for: static ones that need no parameters.

    A method that follows the length is held at the target where it is measured, and there it is its static
    twin, which takes part; let go, it contradicts the keys in the cache.
    """
    return tuple(name for name in formulas() if name != "none")  # the baseline


def participants(
    model: str | Path,
    methods: Iterable[str | dict[str, Any] | Method],
    *,
    to: Length,
    revision: str | None = None,
    original: Length | None = None,
) -> tuple[list[tuple[Method, Plan]], dict[str, str]]:
    """The methods of a comparison, each once, planned; and what `all` and `maps` leave out, with the reason.

    Raises:
        RopepatchError: The model does not allow a method that is named, or none at all.
    """
    groups = {ALL: candidates(), EVERY_MAP: tuple(MAPS)}
    source = Checkpoint.find(model, revision, original=original)
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


def measured(
    suite: Suite,
    *,
    out: str | Path | None = None,
    report: str | Path | None = None,
    revision: str | None = None,
    original: Length | None = None,
    processes: Processes,
    dtype: str | None = None,
    feedback: Feedback,
) -> Results:
    """The results of a suite, and a report, refused before if it cannot be written; see `evaluate`."""
    folder, page = check_places(out, report)
    kind = known_dtype(dtype)
    if processes.device != AUTO:
        check_device(processes.device)
    results = measuring.measure(
        suite,
        out=folder,
        revision=revision,
        original=original,
        processes=processes,
        dtype=kind,
        progress=feedback.progress,
        say=feedback.say,
    )
    kept = (
        f"nothing is kept; with {argument('out', 'DIR')} the same command would go on"
        if folder is None
        else f"every result that is finished is kept in {folder}; the same command goes on"
    )
    with interruptible(feedback.say, lambda: kept):
        return reported(results, page, processes, feedback)


def reported(
    results: Iterator[Result], report: Path | None, processes: Processes, feedback: Feedback
) -> Results:
    """All results, each announced as it comes, and their report."""
    measured: list[Result] = []
    for result in results:
        if not any(other.task == result.task for other in measured):
            for warning in few(result):
                feedback.say(f"warning: {warning}")
        measured.append(result)
        if result.seconds is not None:
            feedback.say(f"{result.task}, {result.label}, {result.target} tokens{_first_figure(result)}")
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
        raise RopepatchError(f"no report: {error}", hint=hint) from error


def _first_figure(result: Result) -> str:
    """The first measure at its greatest length, with its interval."""
    rows = [row for row in result.rows if row.at.keys() == {"length"}]
    if not rows:
        return ""
    last = max((row for row in rows if row.measure == rows[0].measure), key=lambda row: row.length)
    doubt = f" ({last.interval})" if last.interval else ""
    return f": {measure_of(last.measure).title.lower()} {last.text}{doubt}"


def _kept(results: Sequence[Result]) -> Path:
    """A new folder with results that were to be shown only."""
    folder = Path(mkdtemp(prefix="ropepatch-results-"))
    for number, result in enumerate(results):
        result.write(folder / f"{number:03}-{result.task}-{slug(result.label)}.json")
    return folder
