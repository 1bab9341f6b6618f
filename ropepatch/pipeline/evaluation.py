"""Measure models by a suite, or by one task of reading."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from ropepatch.errors import RopepatchError
from ropepatch.evaluation import measuring
from ropepatch.evaluation.comparisons import few
from ropepatch.evaluation.results import Result, measure_of, slug
from ropepatch.evaluation.suites import Method, Suite, read_method, read_suite
from ropepatch.evaluation.tasks import PerplexityTask, check_text
from ropepatch.model.loading import AUTO, check_device, known_dtype
from ropepatch.pipeline.inputs import check_writable, in_tokens, model_name
from ropepatch.pipeline.results import Results
from ropepatch.pipeline.running import Feedback, Progress, Say, bar, interruptible, is_first, say_on_stderr
from ropepatch.pipeline.running import device as best_device
from ropepatch.settings import Length

WINDOWS = 24  # of text, if nothing else is said


def evaluate(
    model: str | os.PathLike[str] | None = None,
    suite: str | Path | Suite | None = None,
    *,
    methods: Sequence[str | dict[str, Any] | Method] = (),
    to: Length | None = None,
    text: str | None = None,
    field: str = "text",
    split: str = "test",
    out: str | Path | None = None,
    report: str | Path | None = None,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    limit: int | None = None,
    seed: int | None = None,
    say: Say = say_on_stderr,
    progress: Progress = bar,
    command: str | None = None,
    **task: Any,
) -> Results:
    """Measure a model unscaled and scaled: perplexity by length in one pass, or a whole suite.

    Args:
        model: A checkpoint folder, a Hub id, or `tiny`; None for the models of the suite.
        suite: The name of a suite, its YAML file or a `Suite`; None to read text alone.
        methods: Without a suite: also measure the model extended so, in memory. Names from `METHODS` or
            `MAPS`, scaling files, or mappings with a `name` and parameters.
        to: Without a suite: the target of the methods, in tokens; without methods, of yarn.
        text: A file, a folder, a `datasets` id or a saved set; None for that of the suite, or the tales of
            tiny.
        field: The column or key of a document's text.
        split: Which part of a `datasets` id or a saved set is read.
        out: A folder for the results: what it holds already is not measured again, and an interrupted call
            goes on from it.
        report: An HTML file to write, with tables and figures.
        revision: Branch, tag or commit of a Hub id.
        device: Where the models are put; None for the GPU, if there is one; `auto` for all GPUs and, where
            they have no room, the machine's memory, by accelerate.
        dtype: The precision in which they are read, such as `bfloat16`; None for that of their weights, or
            float32 where a CPU reads that faster.
        limit: At most so many pieces of text, haystacks, and documents of each lm-eval task.
        seed: Haystacks are drawn from it; None for the seed of the suite.
        say: Takes a line for every result.
        progress: See `Feedback`.
        command: The command line that asked, for the report.
        **task: Without a suite: `lengths`, `windows`, `documents`, `stride` and what else
            `ropepatch.evaluation.tasks.PerplexityTask` takes.

    Raises:
        RopepatchError: A model, method, suite or text that is not there or does not fit, before anything is
            measured; or a result in `out` that was measured with other settings.
    """
    name = None if model is None else model_name(model)
    if suite is None:
        task |= {"text": text, "field": field, "split": split}
        suite = _reading(name, revision, methods, to, task)
    else:
        options = {"method": methods or None, "to": to} | task
        if refused := [f"--{option}" for option, value in options.items() if value is not None]:
            raise RopepatchError(
                f"{', '.join(refused)} beside --suite",
                hint="the suite says it: copy its YAML file and change that",
            )
        suite = named_suite(suite, model=name, text=text, field=field, split=split)
    suite = suite.narrowed(limit, seed)
    where: dict[str, Any] = {"revision": revision, "device": device, "dtype": dtype}
    feedback = Feedback(say=say, progress=progress, command=command)
    return measured(suite, out=out, report=report, **where, feedback=feedback)


def _reading(
    model: str | None,
    revision: str | None,
    methods: Sequence[str | dict[str, Any] | Method],
    to: Length | None,
    task: dict[str, Any],
) -> Suite:
    """The suite of one perplexity task."""
    if task.get("windows") and task.get("documents"):
        raise RopepatchError("--windows beside --documents", hint="either join the documents or do not")
    if model is None:
        raise RopepatchError("MODEL is missing", hint="a checkpoint folder, a Hub id, or tiny")
    check_text(task["text"], model)
    if methods and to is None:
        raise RopepatchError("--method needs a target", hint="--to 32k")
    if to is not None and not methods:
        methods = ("yarn",)
    if lengths := task.get("lengths"):
        task["lengths"] = tuple(sorted(in_tokens(length, model, revision) for length in lengths))
    windows = None if task.get("documents") else task.get("windows") or WINDOWS
    return Suite(
        models=(model,),
        methods=tuple(method if isinstance(method, Method) else read_method(method) for method in methods),
        to=(to or (task["lengths"][-1] if lengths else "1x"),),
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
            "--field and --split are of --text, which is missing", hint="a suite says them of its own text"
        )

    named = suite if isinstance(suite, Suite) else read_suite(str(suite))
    tasks = tuple(task.with_text(text, field, split) if text else task for task in named.tasks)
    return named.model_copy(update={"tasks": tasks, "models": (model,) if model else named.models})


def measured(
    suite: Suite,
    *,
    out: str | Path | None = None,
    report: str | Path | None = None,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    feedback: Feedback,
) -> Results:
    """The results of a suite, and a report, refused before if it cannot be written; see `evaluate`."""
    folder, page = check_places(out, report)
    device, kind = device or best_device(), known_dtype(dtype)
    if device != AUTO:
        check_device(device)
    results = measuring.measure(
        suite,
        out=folder,
        revision=revision,
        device=device,
        dtype=kind,
        progress=feedback.progress,
        say=feedback.say,
    )
    with interruptible(feedback.say, lambda: kept_by_suite(folder)):
        return reported(results, page, feedback)


def kept_by_suite(folder: Path | None) -> str:
    """What is left of an interrupted measurement."""
    if folder is None:
        return "nothing is kept; with --out DIR the same command would go on"
    return f"every result that is finished is kept in {folder}; the same command goes on"


def check_places(out: str | Path | None, report: str | Path | None = None) -> tuple[Path | None, Path | None]:
    """The folder for results and the file of a report as paths.

    Raises:
        RopepatchError: The folder is none, or the report cannot be written.
    """
    folder, page = (None if place is None else Path(place) for place in (out, report))
    if page is not None and page.exists():
        raise RopepatchError(f"{page} already exists", hint="choose another --report; nothing is overwritten")
    if page is not None and not page.absolute().parent.is_dir():
        raise RopepatchError(f"no folder {page.parent} for the report", hint="make it first")
    if page is not None and not can_report():
        raise RopepatchError("a report needs matplotlib and jinja2", hint='pip install "ropepatch[plot]"')
    if folder is not None and folder.exists() and not folder.is_dir():
        raise RopepatchError(f"{folder} is a file", hint="--out is a folder")
    for place, option in ((page, "--report"), (folder, "--out")):
        if place is not None:
            check_writable(place, f"choose another {option}")
    return folder, page


def can_report() -> bool:
    """Whether what a report is drawn and written with is installed."""
    return all(find_spec(module) for module in ("matplotlib", "jinja2"))


def reported(results: Iterator[Result], report: Path | None, feedback: Feedback) -> Results:
    """All results, each announced as it comes, and their report."""
    measured: list[Result] = []
    for result in results:
        for warning in few(result):
            if not any(other.task == result.task for other in measured):
                feedback.say(f"warning: {warning}")
        measured.append(result)
        if result.seconds is not None:
            feedback.say(f"{result.task}, {result.label}, {result.target} tokens{_first_figure(result)}")
    if report is not None and is_first():
        from ropepatch.report import write_report

        try:
            feedback.say(f"report: {write_report(measured, report, command=feedback.command)}")
        except (OSError, RopepatchError) as error:
            raise RopepatchError(
                f"no report: {error}", hint=f"the results are in {_kept(measured)}"
            ) from error
    return Results(measured)


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
