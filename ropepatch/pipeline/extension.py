"""Extend a checkpoint: find the method, plan, train or not, write, measure, push."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropepatch.errors import RopepatchError, argument, printable
from ropepatch.evaluation.comparisons import summary
from ropepatch.evaluation.measuring import measure_extension
from ropepatch.extension import record as records
from ropepatch.extension import writing
from ropepatch.extension.planning import Plan
from ropepatch.extension.writing import check_savable
from ropepatch.files import absent, json_text
from ropepatch.model import reading_file as readings
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.pipeline.evaluation import named_suite, reported
from ropepatch.pipeline.inputs import can_report, check_places, text_name
from ropepatch.pipeline.learned import Learned, kept, planned
from ropepatch.pipeline.request import Request, read_request
from ropepatch.pipeline.results import Results, plot
from ropepatch.pipeline.running import Feedback, Say, Show, interruptible
from ropepatch.probing.making import affordable, make_reading
from ropepatch.processes import Processes, join
from ropepatch.progress import WEIGHTS, Progress, no_bar
from ropepatch.publishing.scanning import check_secrets
from ropepatch.scaling.file import AUTO, FIT
from ropepatch.settings import Length
from ropepatch.training.forecast import Forecast, forecast, other_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel

    from ropepatch.evaluation.suites import Suite
    from ropepatch.publishing.hub import Pushed
    from ropepatch.training.recipe import Recipe


@dataclass(frozen=True, eq=False)
class Extension:
    """A checkpoint that was extended. It stands for its folder wherever a path does.

    `str(extension)`, `os.fspath(extension)` and `extension / "config.json"` are those of the folder, so that
    `from_pretrained(extension)` loads it; a notebook shows what was changed and measured.

    Args:
        folder: The checkpoint, or of a recipe with `save: adapter` the adapter.
        plan: What was changed.
        record: What its `ropepatch.json` says; empty after a dry run, which writes nothing.
        results: What was measured before and after.
        gate: The loss within the old context before and after the training; None where nothing was trained.
        pushed: What was pushed to the Hub; None for nothing.
        forecast: After a dry run with a recipe, what the training will do.
        obstacles: After a dry run, what would stop the same call.
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
        """A figure of what was measured, see `Results.plot`; without results, of what was planned.

        Args:
            name: Such as `perplexity`, `retrieval` or `wavelengths-yarn`.

        Raises:
            RopepatchError: If there is no figure of that name, or no matplotlib.
        """
        return plot(self.results if self.results or name else self.plan, name)

    def outcome(self) -> str:
        """From where to where, by what, and what stock transformers made of it; of a dry run all it found."""
        if not self.record:
            place = f"to be written: {printable(str(self.folder.expanduser().absolute()))}"
            return "\n\n".join(map(str, filter(None, (self.plan, self.forecast, place))))
        window = self.plan.source.window
        lines = [
            f"{printable(str(self.folder))}: {window} -> {self.plan.target} tokens, {self.plan.method.name}"
        ]
        if verified := self.record.get("verified"):
            proof = f"frequencies {verified['frequencies']}, logits {verified['logits']}"
            stock = "transformers and its code" if self.plan.remapping else "stock transformers"
            lines.append(f"reloaded with {stock}: {proof}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data: the record; after a dry run the plan, and with a recipe its `training`."""
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


def extend(
    model: str | os.PathLike[str] | Plan,
    out: str | Path | None,
    *,
    to: Length | None,
    method: str | None,
    original: Length | None,
    allow_code: bool,
    settings: Mapping[str, Any] | None,
    recipe: str | Path | Recipe | None,
    distil: bool,
    max_short_loss_increase: float | None,
    evaluate: str | Path | Suite | None,
    text: str | Path | None,
    field: str,
    split: str | None,
    limit: int | None,
    link_weights: bool,
    reading: bool | None,
    include: Sequence[str],
    push: str | None,
    dry_run: bool,
    revision: str | None,
    record: Mapping[str, Any] | None,
    say: Say,
    progress: Progress,
    show: Show,
    **parameters: Any,
) -> Extension:
    """Write a checkpoint with a longer context, trained at it with a recipe: `ropepatch.extend`."""
    text = text_name(text)
    feedback = Feedback(say=say, progress=progress, show=show, command=(record or {}).get("command"))
    suite = None
    if evaluate is not None:
        suite = named_suite(evaluate, text=text, field=field, split=split or "test").narrowed(limit, None)
    request = read_request(
        model,
        out,
        recipe,
        to=to,
        method=method,
        original=original,
        parameters=dict(settings or {}) | parameters,
        allow_code=allow_code,
        revision=revision,
        suite=suite,
        text={"text": text, "field": field, "split": split},
        distil=distil,
        max_short_loss_increase=max_short_loss_increase,
        link_weights=link_weights,
        limit=limit,
        reading=reading,
        include=include,
        record=record,
    )
    if push and not dry_run:
        from ropepatch.publishing.hub import check_repo

        check_repo(push)
    if request.note:
        say(request.note)
    if dry_run and request.method in (FIT, AUTO):
        say(f"method {request.method} is searched for before there is a plan; nothing of it is kept")
    processes = join()
    with interruptible(say, lambda: kept(request, dry_run=dry_run)):
        plan, learned = planned(request, processes, feedback, keep=not dry_run)
        if dry_run:
            return _foreseen(request, plan, processes)
        if request.plan is None:
            for warning in plan.warnings:
                say(f"warning: {warning}")
        if request.recipe is not None:
            for warning in other_model(plan, request.recipe):
                say(f"warning: {warning}")
        request.check_plan(plan)
        request.check_suite(plan)
        place = absent(request.folder) if request.recipe is None else request.folder
        if request.plan is not None:
            plan.source.check_unchanged()
        source = writing.source_of(plan, beside=place, include=include)
        extra = writing.included_files(source.folder, include)
        carried = writing.small_files(source.folder) | extra
        check_secrets(carried)
        if stays := writing.left_out(source, carried):
            more = f"({argument('include')} carries more along)"
            say(f"left out, no part of a checkpoint: {', '.join(stays)} {more}")
        for code in writing.tokenizer_of_copy(source.folder, carried)[1]:
            say(f"warning: the tokenizer needs {code}, which {argument('include')} {code} would carry along")
        if request.recipe is None:
            with feedback.progress(WEIGHTS) as advance:
                write = partial(
                    writing.extend,
                    plan,
                    request.folder,
                    link_weights=link_weights,
                    include=include,
                    progress=advance,
                    source=source,
                    record=(learned.record if learned else {}) | request.record,
                    finish=lambda written, model: add_reading(
                        request, written, processes.device, feedback, model
                    ),
                )
                folder = processes.write_once(write)
            extension = _finished(request, plan, folder, learned, processes, feedback)
        else:
            extension = _trained(request, plan, learned, processes, feedback)
            processes.write_once(lambda: writing.copy_files(extra, extension.folder))
        show(extension)
        if extension.gate is not None:
            say(f"{'' if extension.gate.passed else 'warning: '}{extension.gate}")
        return extension if not (push and processes.first) else _pushed(extension, push, include, feedback)


def _foreseen(request: Request, plan: Plan, processes: Processes) -> Extension:
    """What a call would do, and what would stop it; no weights are read."""
    request.check_suite(plan)
    checks: list[Callable[[], object]] = []
    ahead, obstacles = None, list[RopepatchError]()
    if request.recipe is not None:
        ahead = forecast(plan, request.recipe, request.folder, processes=processes.count)
        obstacles += ahead.obstacles
    else:
        checks += [partial(check_savable, plan), partial(absent, request.folder)]
    if plan.model == "tiny" or Path(plan.model).is_dir():  # of the Hub's, config.json alone is here
        checks += [partial(_find_weights, plan, request), partial(_find_tokenizer, plan, request)]
    for check in checks:
        try:
            check()
        except RopepatchError as error:
            obstacles.append(error)
    return Extension(request.folder, plan, {}, forecast=ahead, obstacles=tuple(obstacles))


def _find_weights(plan: Plan, request: Request) -> None:
    """Refuse a folder without weights, or one that cannot be extended there."""
    _ = writing.source_of(plan, beside=request.folder, include=request.include).weights


def _find_tokenizer(plan: Plan, request: Request) -> None:
    """Refuse a folder without a tokenizer where the call needs one."""
    if request.recipe is not None or request.suite is not None:
        _ = plan.source.complete().tokenizer


def _trained(
    request: Request, plan: Plan, learned: Learned | None, processes: Processes, feedback: Feedback
) -> Extension:
    """The checkpoint of a model that was trained under a plan; it is on record as the request says if new."""
    from ropepatch.training.adaptation import adapt

    assert request.recipe is not None
    old = None
    with suppress(OSError):  # a name that is too long: the training says so
        old = records.read(request.folder) if records.exists(request.folder) else None
    adapted = adapt(
        plan,
        request.recipe,
        request.folder,
        max_short_loss_increase=request.max_short_loss_increase,
        say=feedback.say,
        progress=feedback.progress,
    )
    extension = _finished(request, plan, adapted.folder, learned, processes, feedback)

    def amended() -> records.Record:
        record, extras = records.read(adapted.folder), request.record
        if old and old.evaluation == record.evaluation and extras.keys() <= {*old.to_dict()}:
            return record
        return records.amend(adapted.folder, **extras)

    record = processes.write_once(amended)
    return replace(extension, record=record.to_dict(), gate=adapted.gate)


def _finished(
    request: Request,
    plan: Plan,
    folder: Path,
    learned: Learned | None,
    processes: Processes,
    feedback: Feedback,
) -> Extension:
    """A checkpoint whose record says where its scaling comes from, measured if a suite is given."""

    def finish() -> None:
        if learned:
            learned.put_on_record(folder)
        if request.recipe is not None and (folder / "config.json").exists():
            add_reading(request, Checkpoint(folder), processes.device, feedback)

    processes.write_once(finish)
    results = _measured(request, plan, folder, processes, feedback)
    return Extension(folder, plan, records.read(folder).to_dict(), results)


def add_reading(
    request: Request,
    checkpoint: Checkpoint,
    device: str,
    feedback: Feedback,
    model: PreTrainedModel | None = None,
) -> None:
    """Write the reading of a checkpoint if it is asked for or quick, or say why there is none.

    One of the same weights stays.
    """
    if request.reading is False:
        return
    folder = checkpoint.folder
    try:
        if readings.exists(folder) and readings.read(folder).weights == checkpoint.fingerprint:
            return
        unasked = request.reading is None
        hypotheses = affordable(checkpoint, records.read(folder), device) if unasked else None
        if isinstance(hypotheses, str):
            feedback.say(f"no {readings.FILE}: {hypotheses}")
            return
        progress = no_bar if request.recipe is None else feedback.progress  # that of the weights still shows
        with progress("reading") as advance:
            reading = make_reading(
                checkpoint, device=device, hypotheses=hypotheses, progress=advance, model=model
            )
        readings.write(folder, reading)
    except RopepatchError as error:  # the checkpoint is written and proven
        feedback.say(f"no {readings.FILE}: {error}")


def _measured(
    request: Request, plan: Plan, folder: Path, processes: Processes, feedback: Feedback
) -> Results:
    """Before and after; results, report and a summary go into the checkpoint's folder."""
    if request.suite is None:
        return Results()
    report = folder / "evaluation.html"
    # Of an earlier call, which was interrupted.
    processes.write_once(lambda: report.unlink(missing_ok=True))
    out, page = check_places(folder / "evaluation", report if can_report() else None)
    results = measure_extension(
        request.suite,
        plan,
        folder if request.recipe else None,
        label=request.label,
        out=out,
        processes=processes,
        progress=feedback.progress,
        say=feedback.say,
    )
    measured = reported(results, page, processes, feedback)
    processes.write_once(lambda: records.amend(folder, evaluation=summary(measured)))
    if page is None:
        feedback.say('no report: pip install "ropepatch[plot]"')
    return measured


def _pushed(extension: Extension, repo: str, include: Sequence[str], feedback: Feedback) -> Extension:
    """The extension with what was pushed; nothing of what failed its gate."""
    from ropepatch.publishing.hub import push

    if extension.gate is not None and not extension.gate.passed:
        feedback.say(f"not pushed: `ropepatch push --force {extension} {repo}` does")
        return extension
    try:
        pushed = push(extension.folder, repo, include=include, say=feedback.say)
    except RopepatchError as error:
        again = f"the checkpoint is written: `ropepatch push {extension} {repo}` goes on"
        raise RopepatchError(str(error), hint=f"{error.hint}; {again}" if error.hint else again) from error
    return replace(extension, pushed=pushed)
