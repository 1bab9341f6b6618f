"""Extend a checkpoint: plan, train or not, write, measure, push."""

from __future__ import annotations

import html
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropepatch.data.questions import TAUGHT
from ropepatch.errors import RopepatchError, argument, printable
from ropepatch.evaluation.comparisons import summary
from ropepatch.evaluation.measuring import measure_extension
from ropepatch.extension import gguf_writing, writing
from ropepatch.extension import record as records
from ropepatch.extension.planning import Plan, check_layers, plan_method
from ropepatch.extension.writing import check_savable
from ropepatch.files import absent, from_here, json_text
from ropepatch.model import reading_file as readings
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.gguf import GgufModel
from ropepatch.model.kinds import KEY
from ropepatch.model.source import without_paths
from ropepatch.pipeline.evaluation import reported
from ropepatch.pipeline.inputs import can_report, check_places, check_writable, default_place
from ropepatch.pipeline.options import ExtendOptions
from ropepatch.pipeline.results import Results, plot
from ropepatch.pipeline.running import interruptible
from ropepatch.probing.judging import shows_no_error
from ropepatch.probing.making import affordable, duration, make_reading
from ropepatch.progress import WEIGHTS, no_bar
from ropepatch.publishing.scanning import check_secrets
from ropepatch.scaling.file import method_label
from ropepatch.settings import short_length
from ropepatch.training.forecast import Forecast, forecast, other_model
from ropepatch.training.preparation import prepare

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel

    from ropepatch.publishing.hub import Pushed
    from ropepatch.training.preparation import Prepared
    from ropepatch.training.recipe import Recipe


@dataclass(frozen=True, eq=False)
class Extension:
    """An extended checkpoint. You can use it wherever a path is expected.

    `str(extension)`, `os.fspath(extension)` and `extension / "config.json"` are those of its folder, so
    `from_pretrained(extension)` loads it. A notebook shows the change and the measurements.

    Args:
        folder: The folder of the checkpoint, or of the adapter for a recipe with `save: adapter`; for a GGUF
            model the new file.
        plan: The change.
        record: The content of its `ropepatch.json`; empty after a dry run, which writes nothing.
        results: The measurements before and after.
        gate: The short-context check: the loss within the original context length before and after the
            training; None without training.
        pushed: The files pushed to the Hub; None if none were.
        forecast: After a dry run with a recipe, the forecast of the training.
        obstacles: After a dry run, the errors that would stop the same call.
    """

    folder: Path
    plan: Plan
    record: dict[str, Any] = field(repr=False)
    results: Results = field(default=Results(), repr=False)
    gate: records.Gate | None = None
    pushed: Pushed | None = None
    forecast: Forecast | None = field(default=None, repr=False)
    obstacles: tuple[RopepatchError, ...] = field(default=(), repr=False)

    def __fspath__(self) -> str:
        return os.fspath(self.folder)

    def __str__(self) -> str:
        return str(self.folder)

    def __truediv__(self, name: str | os.PathLike[str]) -> Path:
        return self.folder / name

    def plot(self, name: str | None = None) -> Figure:
        """A figure of the measurements, see `Results.plot`; without results, of the plan.

        Args:
            name: A name such as `perplexity`, `retrieval` or `wavelengths-yarn`.

        Raises:
            RopepatchError: If there is no figure of that name, or no matplotlib.
        """
        return plot(self.results if self.results or name else self.plan, name)

    def outcome(self) -> str:
        """The lengths, the method and the verification as text; after a dry run the plan and forecast."""
        if not self.record:
            place = f"to be written: {printable(str(self.folder.expanduser().absolute()))}"
            return "\n\n".join(map(str, filter(None, (self._planned(), self.forecast, place))))
        window = self.plan.source.window
        place = printable(from_here(self.folder))
        lines = [f"{place}: {window} -> {self.plan.target} tokens, {self.plan.method.name}"]
        verified = self.record.get("verified")
        if isinstance(verified, str):  # of a GGUF file
            lines.append(f"read back: {verified}")
        elif verified:
            proof = f"frequencies {verified['frequencies']}, logits {verified['logits']}"
            stock = "transformers and its code" if self.plan.remapping else "stock transformers"
            how = "reloaded with" if verified["compared"] else "not reloaded; config.json checked with"
            lines.append(f"{how} {stock}: {proof}")
        return "\n".join(lines)

    def _planned(self) -> str:
        """The plan; with a forecast only its head and its warnings."""
        if self.forecast is None:
            return str(self.plan)
        head = str(self.plan).partition("\n\n")[0]
        return "\n".join([head, *(f"warning: {printable(warning)}" for warning in self.plan.warnings)])

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-ready data; after a dry run the plan, and with a recipe its `training`."""
        if self.record:
            return self.record
        return self.plan.to_dict() | ({"training": self.forecast.to_dict()} if self.forecast else {})

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json_text(self.to_dict())

    def _repr_html_(self) -> str:
        gate = [] if self.gate is None else [str(self.gate)]
        text = "\n".join([self.outcome(), *gate])
        return f"<pre>{html.escape(text)}</pre>{self.results._repr_html_()}"


def extend(options: ExtendOptions) -> Extension:
    """Write a checkpoint with a longer context; see `ropepatch.extend`."""
    if options.of_gguf:
        return _of_gguf(options)
    say, include = options.say, options.include
    training, note = options.taught
    if not options.dry_run:
        _check_push(options)
    if note:
        say(note)
    processes = options.processes
    with interruptible(say, lambda: kept(options)):
        plan = planned(options)
        if options.dry_run:
            return _dry_run(options, plan)
        if options.plan is None:
            for warning in plan.warnings:
                say(f"warning: {warning}")
        if training is not None:
            for warning in other_model(plan, training):
                say(f"warning: {warning}")
        prepared = options.check_plan(plan)
        options.check_reading(plan)
        options.check_suite(plan)
        is_written = training is None and _is_written(options, plan)
        if options.plan is not None:
            plan.checkpoint.check_unchanged()
        _check_place(options)
        folder = options.place
        source = writing.source_of(plan, out=folder, include=include)
        extra, carried = _carried(options, source)
        if others := writing.left_out(source, carried):
            more = f"({argument('include')} copies more files)"
            say(f"not copied: {', '.join(others)} {more}")
        for code in writing.tokenizer_of_copy(source.folder, carried)[1]:
            say(f"warning: the tokenizer needs {code}; add {argument('include', code)} to copy it")
        if is_written:
            processes.write_once(lambda: _complete(options, plan, source, extra))
            extension = _finished(options, plan, folder)
        elif training is None:
            with options.progress(WEIGHTS) as advance:
                write = partial(
                    writing.extend,
                    plan,
                    options.folder,
                    link_weights=options.link_weights,
                    include=include,
                    progress=advance,
                    source=source,
                    record=options.record,
                    finish=partial(add_reading, options),
                )
                folder = processes.write_once(write)
            extension = _finished(options, plan, folder)
        else:
            extension = _trained(options, training, plan, prepared)
            processes.write_once(lambda: writing.copy_files(extra, extension.folder))
        options.show(extension)
        if extension.gate is not None:
            say(f"{'' if extension.gate.passed else 'warning: '}{extension.gate}")
        return _pushed(extension, options.push, options) if options.push and processes.first else extension


def planned(options: ExtendOptions) -> Plan:
    """The plan of a call."""
    if options.plan is not None:
        return options.plan
    plan = plan_method(options.source, options.chosen, options.asked, options.target)
    return check_layers(plan, options.layers)


def kept(options: ExtendOptions) -> str:
    """What an interrupted `extend` keeps: its checkpoint, or that of the training."""
    if options.dry_run:
        return "nothing is kept"
    folder = options.place
    run = folder.with_name(f"{folder.name}.run")
    if folder.exists():
        return f"{folder} is written; the same command resumes"
    if options.training is not None and run.is_dir():
        steps = (path.name.rpartition("-")[2] for path in run.glob("checkpoint-*"))
        last = max((int(step) for step in steps if step.isdigit()), default=0)
        return f"{run} keeps step {last} of {options.training.max_steps}; the same command resumes from it"
    return "nothing is kept; the same command starts again"


def _of_gguf(options: ExtendOptions) -> Extension:
    """Write a GGUF file with other RoPE parameters, or dry-run it."""
    plan = options.plan
    if plan is None:
        source = GgufModel.find(options.name, options.original)
        plan = plan_method(source, options.chosen, options.asked, options.to)
    parts = plan.gguf.file.stem, method_label(options.chosen), short_length(plan.target)
    file = Path(options.out or f"{default_place(*parts)}.gguf")
    if options.dry_run:
        obstacles = []
        try:
            gguf_writing.check_place(plan, file)
        except RopepatchError as error:
            obstacles.append(error)
        return Extension(file, plan, {}, obstacles=tuple(obstacles))
    with interruptible(options.say, lambda: "nothing is kept"):
        if options.plan is None:
            for warning in plan.warnings:
                options.say(f"warning: {warning}")
        with options.progress(WEIGHTS) as advance:
            file, verified = gguf_writing.extend(plan, file, advance)
    extension = Extension(
        file, plan, without_paths(plan.to_dict()) | {"verified": verified} | (options.record or {})
    )
    options.show(extension)
    return extension


def _is_written(options: ExtendOptions, plan: Plan) -> bool:
    """Whether an earlier call wrote the checkpoint of the same plan; raises for any other existing folder.

    Without a suite or a push there is nothing to resume, so it raises for that folder as well.
    """
    with suppress(OSError, RuntimeError, RopepatchError):  # no name or home, or a folder with other content
        folder = options.place
        if (options.suite is not None or options.push) and records.exists(folder):
            record = records.read(folder).to_dict()
            layers = record["config_changes"].get(KEY, {}).get("layers")
            known = replace(plan, layers=tuple(layers)) if isinstance(layers, list) else plan
            made = records.Record.of(known).to_dict()
            of_plan = without_paths({key: made.get(key) for key in plan.to_dict()})
            same = all(record.get(key) == value for key, value in of_plan.items())
            if same and "verified" in record and "adaptation" not in record:
                return True
    absent(options.folder)
    return False


def _complete(options: ExtendOptions, plan: Plan, source: Checkpoint, extra: dict[str, Path]) -> None:
    """Add this call's files to a checkpoint from an earlier one, unless it has other weights."""
    written = Checkpoint(options.place)
    record = records.read(written.folder)
    if record.weights != written.fingerprint or record.weights != source.fingerprint:
        absent(options.folder)
    options.say(f"{options.folder} is already written")
    writing.copy_files(extra, written.folder)
    add_reading(options, written, record)


def _dry_run(options: ExtendOptions, plan: Plan) -> Extension:
    """The plan and forecast of a call, and the errors that would stop it; loads no weights."""
    options.check_suite(plan)
    recipe, folder = options.training, options.folder
    checks: list[Callable[[], object]] = [
        partial(_check_push, options),
        partial(options.check_reading, plan),
    ]
    if options.plan is not None:
        checks.append(plan.checkpoint.check_unchanged)
    ahead, obstacles, prepared = None, list[RopepatchError](), None
    if recipe is not None:
        prepared = prepare(plan, recipe)
        ahead = forecast(plan, recipe, folder, processes=options.processes.count, prepared=prepared)
        obstacles += ahead.obstacles
    else:
        checks += [partial(check_savable, plan), partial(_is_written, options, plan)]
    checks.append(partial(_check_place, options))
    if plan.model == "tiny" or Path(plan.model).is_dir():  # for a Hub id only config.json is here
        checks.append(partial(_check_files, options, plan))
        if prepared is not None and recipe is not None:
            checks.append(partial(_check_run, plan, recipe, folder, prepared))
    for check in checks:
        try:
            check()
        except RopepatchError as error:
            obstacles.append(error)
    return Extension(folder, plan, {}, forecast=ahead, obstacles=tuple(obstacles))


def _check_push(options: ExtendOptions) -> None:
    """Refuse a repository that cannot be pushed to."""
    if options.push:
        from ropepatch.publishing.hub import check_repo

        check_repo(options.push, private=options.private)


def _check_place(options: ExtendOptions) -> None:
    """Refuse a folder that cannot be created, before hours of work."""
    with suppress(RuntimeError):  # ~ of an unknown user, for which writing raises an error
        if not os.path.lexists(place := options.folder.expanduser()):
            check_writable(place, f"choose another {argument('out')}")


def _carried(options: ExtendOptions, source: Checkpoint) -> tuple[dict[str, Path], dict[str, Path]]:
    """The files that `include` adds, and all files to copy; refuses secrets in them."""
    extra = writing.included_files(source.folder, options.include)
    carried = writing.small_files(source.folder) | extra
    check_secrets(carried)
    return extra, carried


def _check_files(options: ExtendOptions, plan: Plan) -> None:
    """Refuse a checkpoint that cannot be copied, from its small files and weight headers."""
    source = writing.source_of(plan, out=options.folder, include=options.include)
    _ = source.weights
    _carried(options, source)
    if options.training is None:
        writing.check_copy(
            plan, source, options.folder, link_weights=options.link_weights, include=options.include
        )


def _check_run(plan: Plan, recipe: Recipe, folder: Path, prepared: Prepared) -> None:
    """Raise the errors of a training that its preparation does not find."""
    from ropepatch.training.run import Run

    Run.of(plan, recipe, folder, replace(prepared, obstacles=())).check()


def _trained(options: ExtendOptions, recipe: Recipe, plan: Plan, prepared: Prepared | None) -> Extension:
    """Train a model under a plan and return its checkpoint, with the record of the call."""
    from ropepatch.training.adaptation import adapt

    old, once = None, options.processes.write_once
    with suppress(OSError):  # a name that is too long, for which the training raises an error
        old = records.read(options.folder) if records.exists(options.folder) else None
    adapted = adapt(
        plan,
        recipe,
        options.folder,
        max_short_loss_increase=options.max_short_loss_increase,
        say=options.say,
        progress=options.progress,
        prepared=prepared,
        finish=partial(add_reading, options),
    )
    if old is not None and (adapted.folder / "config.json").exists():  # written by an earlier call
        once(lambda: add_reading(options, Checkpoint(adapted.folder), old))
    extension = _finished(options, plan, adapted.folder)

    def amended() -> records.Record:
        record, extras = records.read(adapted.folder), options.record or {}
        if old and old.evaluation == record.evaluation and extras.keys() <= {*old.to_dict()}:
            return record
        return records.amend(adapted.folder, **extras)

    record = once(amended)
    return replace(extension, record=record.to_dict(), gate=adapted.gate)


def _finished(options: ExtendOptions, plan: Plan, folder: Path) -> Extension:
    """The checkpoint with its record, measured if a suite is given."""
    results = _measured(options, plan, folder)
    return Extension(folder, plan, records.read(folder).to_dict(), results)


def add_reading(
    options: ExtendOptions,
    checkpoint: Checkpoint,
    record: records.Record,
    model: PreTrainedModel | None = None,
) -> None:
    """Write the fingerprint of a checkpoint if requested or quick, or say why there is none.

    An existing fingerprint of the same weights is kept.
    """
    if options.reading is False:
        return
    folder, device = checkpoint.folder, options.processes.device
    try:
        if readings.exists(folder) and readings.read(folder).weights == checkpoint.fingerprint:
            return
        hypotheses = None if options.reading else affordable(checkpoint, record, device)
        if isinstance(hypotheses, str):
            raise RopepatchError(hypotheses)
        if options.reading:
            options.say(f"computing {readings.FILE}: {duration(checkpoint, record, device)}")
        progress = (
            no_bar if options.training is None else options.progress
        )  # without training, the bar of the weights is still open
        with progress("fingerprint") as advance:
            how: Any = {"hypotheses": hypotheses, "progress": advance, "record": record, "model": model}
            reading = make_reading(checkpoint, device=device, **how)
        readings.write(folder, reading)
        if shows_no_error(reading):
            reach = f"up to {reading.target:,} tokens"
            options.say(f"warning: {readings.FILE} cannot show a RoPE error: none changes this model {reach}")
    except RopepatchError as error:
        if options.reading:
            raise
        options.say(f"no {readings.FILE}: {error}")


def _measured(options: ExtendOptions, plan: Plan, folder: Path) -> Results:
    """Measure before and after; write results, report and summary into the checkpoint's folder."""
    if options.suite is None:
        return Results()
    report, once = folder / "evaluation.html", options.processes.write_once

    def begin() -> None:
        report.unlink(missing_ok=True)  # from an interrupted call
        records.amend(folder, evaluation={})

    once(begin)
    out, page = check_places(folder / "evaluation", report if can_report() else None)
    results = measure_extension(
        options.suite,
        plan,
        folder if options.training else None,
        label=options.label,
        out=out,
        processes=options.processes,
        progress=options.progress,
        say=options.say,
        measurements=options.measurements,
    )
    measured = reported(results, page, options.processes, options.feedback)
    once(lambda: records.amend(folder, evaluation=summary(measured)))
    if page is None:
        options.say('no report: pip install "ropepatch[plot]"')
    if options.training and options.training.asks_questions:
        kinds = ", ".join(TAUGHT)
        options.say(f"warning: the training asked questions of the kinds {kinds}: judge it by other kinds")
    return measured


def _pushed(extension: Extension, repo: str, options: ExtendOptions) -> Extension:
    """Push the extension, unless it failed the short-context check."""
    from ropepatch.publishing.hub import push

    def command(*flags: str) -> str:
        given = [f"--{flag}" for flag in (*flags, *["private"] * options.private)]
        return f"`{' '.join(['ropepatch push', *given, str(extension), repo])}`"

    if extension.gate is not None and not extension.gate.passed:
        options.say(f"not pushed; to push it anyway: {command('force')}")
        return extension
    how: Any = {"private": options.private, "include": options.include, "say": options.say}
    try:
        pushed = push(extension.folder, repo, **how)
    except RopepatchError as error:
        again = f"the checkpoint is written; to push it: {command()}"
        raise RopepatchError(str(error), hint=f"{error.hint}; {again}" if error.hint else again) from error
    return replace(extension, pushed=pushed)
