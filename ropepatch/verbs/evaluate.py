"""`eval`: measure models by a text or a suite, and a written checkpoint with the model it was made from.

The results, which `compare` shares, have a table, a pandas frame, figures and a report.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache

from ropepatch.columns import data_frame
from ropepatch.errors import RopepatchError, argument
from ropepatch.evaluation import measuring
from ropepatch.evaluation.measuring import (
    Machine,
    Method,
    Suite,
    participants,
    read_suite,
)
from ropepatch.evaluation.results import Result, first_figure, read_result, results_json
from ropepatch.evaluation.tasks import PerplexityTask, check_text
from ropepatch.extension import record as records
from ropepatch.extension.patching import plan_of_record
from ropepatch.extension.planning import Plan
from ropepatch.files import check_writable
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.progress import Progress, Say, bar, interruptible, say_on_stderr
from ropepatch.report.tables import results_text
from ropepatch.settings import (
    Length,
    listed,
    refuse_unknown,
    relative_length,
    short_length,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from ropepatch.extension.record import Record


def evaluate(
    model: str | os.PathLike[str] | None = None,
    suite: str | Path | Suite | None = None,
    *,
    text: str | Path | None = None,
    lengths: str | Iterable[Length] | None = None,
    methods: str | Iterable[str | dict[str, Any] | Method] = (),
    to: Length | None = None,
    out: str | Path | None = None,
    report: str | Path | None = None,
    field: str = "text",
    split: str = "test",
    original: Length | None = None,
    windows: int | None = None,
    stride: int | None = None,
    gain: bool = False,
    limit: int | None = None,
    seed: int | None = None,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    say: Say = say_on_stderr,
    progress: Progress = bar,
) -> Results:
    """Measure perplexity by length, with and without RoPE scaling, or run a whole suite.

    Without a suite, the documents of `text` are joined, each after a beginning-of-sequence token, and cut
    into windows of the largest length. The model processes each window once. The first N tokens give the
    perplexity at length N. The stories of tiny are not joined.

    Of a checkpoint that ropepatch wrote, it also measures the model that it was made from, if that is here.
    The results go into the checkpoint, and `ropepatch push` shows them.

    Args:
        model: A checkpoint folder, a Hub id, or tiny. Default: the models of the suite.
        suite: The name of a suite, or a YAML file; see `ropepatch suites`.
        text: A text, JSONL, CSV or Parquet file, a folder of text and JSONL files, a `datasets` id, or a
            dataset saved with `datasets`. Default: that of the suite, or the stories of tiny.
        lengths: The lengths to measure in tokens, such as 256,1k,4x. Default: L/2, L, 2L ... `to`, where L is
            the original length.
        methods: Also measure these methods, in memory: names separated by commas, all,
            remappings. Default: yarn if `to` is given.
        to: The target length of the methods, such as 32k.
        out: A folder for the results. Results that it already contains are not measured again. Default: the
            folder evaluation of a checkpoint that ropepatch wrote, else none.
        report: An HTML file to write, with tables and figures.
        field: The column or key that contains the text of a document.
        split: The split of a dataset.
        original: The original context length, if config.json contains another one: 32k for Qwen3, whose
            config.json contains 40960.
        windows: Use at most N windows of the joined documents. Default: 24.
        stride: Slide windows of each length over the text, N tokens at a time. Default: one pass.
        gain: Also measure the gain from tokens beyond the original context length.
        limit: Measure at most N pieces of text, N retrieval prompts, and N documents of an lm-eval task.
        seed: The random seed of the retrieval prompts. Default: that of the suite.
        revision: The branch, tag or commit of a Hub id.
        device: A device such as cpu, cuda or cuda:1. Default: a GPU if there is one. auto lets accelerate use
            all GPUs and, if they are too small, the machine's memory.
        dtype: float32, bfloat16 or float16. Default: that of the weights, or the faster one on a CPU.
        say: A function that takes a line for every result.
        progress: See `ropepatch.progress.bar`.

    Raises:
        RopepatchError: If a model, method, suite or text is missing or does not fit, before anything is
            measured; or if `out` contains a result that was measured with other settings.
    """
    if model is None and suite is None:
        raise RopepatchError(
            f"{argument('model')} is missing",
            hint="a checkpoint folder, a Hub id, or tiny",
        )
    entries = tuple(listed(methods))
    if suite is None and entries and to is None:
        raise RopepatchError(
            f"{argument('methods')} needs {argument('to')}",
            hint=f"add {argument('to', '32k')}",
        )
    task = _given(lengths=lengths, windows=windows, stride=stride, gain=gain or None)
    if suite is not None and (doubled := _given(methods=entries or None, to=to) | task):
        raise RopepatchError(
            f"{argument('suite')} already sets {', '.join(map(argument, doubled))}",
            hint="leave it out, or change a copy: `ropepatch suites NAME > mine.yaml`",
        )
    source = None if model is None else find_checkpoint(model, revision, original)
    place: Any = str(text) if isinstance(text, Path) else text
    reading = {"text": place, "field": field, "split": split}
    extension = None
    if source and not entries and to is None:
        extension = extension_of(source, say)
    if suite is not None:
        chosen = named_suite(suite, source, reading)
        if source and not extension and records.exists(source.folder):
            chosen = chosen.model_copy(update={"methods": (), "to": ("1x",)})
    else:
        assert source is not None
        origin = extension[0].source if extension else source
        check_text(place, origin.name)
        chosen = _perplexity_suite(source, entries, to, reading | task, say)
    chosen = chosen.narrowed(limit, seed)
    written = source.folder if source and extension and out is None else None
    folder, page = check_places(written / "evaluation" if written else out, report)
    machine = Machine.of(device, dtype, say)
    how: Any = {"out": folder, "machine": machine, "progress": progress}
    if extension:
        results = measuring.measure_extension(chosen, *extension, **how)
    else:
        results = measuring.measure(
            chosen, source, revision=revision, original=original, **how
        )
    if written is None:
        return reported(results, folder, page, machine)
    if page is None and can_report():
        page = written / "evaluation.html"
    machine.processes.write_once(lambda: _begin(written))
    measured = reported(results, folder, page, machine)
    machine.processes.write_once(lambda: _record(written))
    return measured


def _given(**values: Any) -> dict[str, Any]:
    """The arguments that are not None."""
    return {key: value for key, value in values.items() if value is not None}


def named_suite(
    suite: str | Path | Suite, source: Checkpoint | None, reading: dict[str, Any]
) -> Suite:
    """A suite, with its model and text replaced by those of the call, if given."""
    has_text = reading["text"] is not None
    if not has_text and reading != {"text": None, "field": "text", "split": "test"}:
        raise RopepatchError(
            f"{argument('field')} and {argument('split')} need {argument('text')}",
            hint="leave them out; a suite sets them for its own text",
        )
    named = suite if isinstance(suite, Suite) else read_suite(str(suite))
    tasks = tuple(task.with_text(reading) if has_text else task for task in named.tasks)
    models = named.models if source is None else (source.name,)
    return named.model_copy(update={"tasks": tasks, "models": models})


def _perplexity_suite(
    source: Checkpoint,
    methods: tuple[Any, ...],
    to: Length | None,
    task: dict[str, Any],
    say: Say,
) -> Suite:
    """A suite with one perplexity task on one model."""
    target: Length = to or "1x"
    if "lengths" in task:
        window = source.stock.window
        asked = {relative_length(length, window) for length in listed(task["lengths"])}
        task = task | {"lengths": tuple(sorted(asked))}
        target = to or max(asked)
    entrants: tuple[Method, ...] = ()
    if to is not None:
        entrants = participants(source, methods or ("yarn",), to=to, say=say)
    return Suite(
        models=(source.name,),
        methods=entrants,
        to=(target,),
        tasks=(PerplexityTask(**task),),
    )


# A checkpoint that ropepatch wrote


def extension_of(written: Checkpoint, say: Say) -> tuple[Plan, Path | None] | None:
    """The plan of a checkpoint that ropepatch wrote, and its folder if it was trained.

    None for other checkpoints, and with a warning if the model that it was made from is not here.
    """
    if not records.exists(written.folder):
        return None
    record = records.read(written.folder)
    source = _origin(written, record)
    if source is None:
        say(
            f"warning: only this checkpoint is measured, and ropepatch.json stays as it is: {record.model}, "
            "from which it was made, is not beside it, in this folder or in the Hub's cache"
        )
        return None
    trained = None if record.training is None else written.folder
    return plan_of_record(record, source), trained


def _origin(written: Checkpoint, record: Record) -> Checkpoint | None:
    """The model that a checkpoint was made from, on this machine: with its weights and original length."""
    name, revision = record.model, record.revision
    places = Path(name), written.folder.resolve().parent / name
    candidates: list[Any] = [place for place in places if place.is_dir()]
    if revision is not None:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        candidates = [name] if isinstance(cached, str) else []
    elif name == "tiny":
        candidates.insert(0, name)
    for candidate in candidates:
        found = Checkpoint.find(candidate, revision, original=record.original)
        weights = found.complete().fingerprint
        same = weights == (record.base_weights or record.weights)
        if same and found.config.window == record.original_max_position_embeddings:
            return found
    return None


def _begin(written: Path) -> None:
    """Mark the results in a checkpoint as incomplete."""
    (written / "evaluation.html").unlink(missing_ok=True)
    records.amend(written, evaluation={})


def _record(written: Path) -> None:
    """Record in a checkpoint which results it contains."""
    labels: dict[str, list[str]] = {}
    for result in read_results(written):
        labels.setdefault(result.task, []).append(result.label)
    records.amend(written, evaluation=labels)


# Results


class Results(tuple[Result, ...]):
    """Results that were measured together, in order."""

    __slots__ = ()

    def to_json(self) -> str:
        """The results as a JSON list."""
        return results_json([asdict(result) for result in self])

    def to_pandas(self) -> DataFrame:
        """A pandas frame: a row for every number, with its model, target, task and label.

        Raises:
            RopepatchError: If pandas is not installed.
        """
        rows = []
        for result in self:
            origin = {
                "model": result.model["name"],
                "target": result.target,
                "task": result.task,
                "label": result.label,
            }
            for row in result.rows:
                values = vars(row) | {"clusters": len(row.clusters)}
                place = values.pop("at")
                rows.append(origin | values | place)
        return data_frame(rows)

    def plot(self, name: str | None = None) -> Figure:
        """A figure of the results.

        Args:
            name: A name such as `perplexity`, `positions` or `retrieval`; None for the first available.

        Raises:
            RopepatchError: If there are no results, no figure of that name, or no matplotlib.
        """
        from ropepatch.report.plots.lines import figures

        drawn = figures(self)
        if not drawn:
            raise RopepatchError(
                "no results to draw", hint="measure first, with evaluate=SUITE"
            )
        chosen = name or next(iter(drawn))
        refuse_unknown([chosen], drawn, "figure")
        return drawn[chosen]

    def __repr__(self) -> str:
        return results_text(self)


def read_results(place: str | Path) -> Results:
    """Read the results of `evaluate` or `compare` from a folder or a file.

    Args:
        place: A folder in which every JSON file is a result; a checkpoint with an `evaluation` folder; or one
            result file.

    Raises:
        RopepatchError: If there is no such place, it contains no results, or a file is not a result.
    """
    folder = Path(place)
    folder = folder / "evaluation" if (folder / "evaluation").is_dir() else folder
    files = sorted(folder.glob("*.json")) if folder.is_dir() else [folder]
    if not files:
        raise RopepatchError(f"no results in {place}", hint="pass a folder of results")
    return Results(map(read_result, files))


def reported(
    results: Iterator[Result],
    folder: Path | None,
    page: Path | None,
    machine: Machine,
) -> Results:
    """All results, each announced when finished, and their report."""
    measured: list[Result] = []
    with interruptible(machine.say, lambda: _kept(folder)):
        for result in results:
            measured.append(result)
            if result.seconds is not None:
                target = f" to {short_length(result.target)}" if result.scaling else ""
                outcome = first_figure(result)
                machine.say(f"{result.task}, {result.label}{target}{outcome}")
        if page is not None:
            report = partial(_report, measured, page)
            machine.say(machine.processes.write_once(report))
    return Results(measured)


def _kept(folder: Path | None) -> str:
    """What an interrupted measurement leaves."""
    if folder is None:
        return (
            f"nothing is kept; with {argument('out', 'DIR')} the same command resumes"
        )
    return f"finished results are kept in {folder}; the same command resumes"


def _report(results: Sequence[Result], file: Path) -> str:
    """Write the report, and return a line on it; without it there are still the results."""
    from ropepatch.report.page import write_report

    try:
        return f"report: {write_report(results, file)}"
    except (OSError, RopepatchError) as error:
        return f"warning: no report: {error}"


# Arguments


def find_checkpoint(
    model: str | os.PathLike[str], revision: str | None, original: Length | None
) -> Checkpoint:
    """Find the checkpoint to measure that a user names; config.json only for a Hub id."""
    checkpoint = Checkpoint.find(model, revision, original=original)
    checkpoint.stock.check_generates()
    return checkpoint


def check_places(
    out: str | Path | None, report: str | Path | None
) -> tuple[Path | None, Path | None]:
    """Check the folder for results and the report file, and return their paths."""
    folder, page = (None if place is None else Path(place) for place in (out, report))
    if page is not None:
        if os.path.lexists(page):
            raise RopepatchError(
                f"{page} already exists",
                hint=f"choose another {argument('report')}; nothing is overwritten",
            )
        if not can_report():
            raise RopepatchError(
                "a report needs matplotlib and jinja2",
                hint='pip install "ropepatch[plot]"',
            )
        check_writable(page, f"choose another {argument('report')}")
    if folder is not None:
        check_writable(folder, f"choose another {argument('out')}")
    return folder, page


def can_report() -> bool:
    """Whether the packages for a report are installed."""
    return all(find_spec(module) for module in ("matplotlib", "jinja2"))
