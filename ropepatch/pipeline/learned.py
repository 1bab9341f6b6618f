"""The methods `fit` and `auto`: the search, kept in a work folder until the checkpoint is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ropepatch.data.texts import Texts
from ropepatch.errors import NothingHelpsError, RopepatchError, argument
from ropepatch.evaluation.ranking import RULE
from ropepatch.evaluation.results import as_read
from ropepatch.extension import record as records
from ropepatch.extension.planning import Plan, check_layers, plan_method
from ropepatch.files import absent, check_resumed, read_json, whole_file, write_json
from ropepatch.fitting import fitting
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.source import shown_name, without_paths
from ropepatch.pipeline import choice
from ropepatch.pipeline.options import ExtendOptions
from ropepatch.scaling.file import AUTO, FIT
from ropepatch.settings import refuse_unknown
from ropepatch.training.recipe import Fit, Recipe
from ropepatch.training.supply import RecipeReader

# Names in the work folder; the last is the folder of the measurements of `auto`.
START, WINDOWS, STATE, MEASURED = "start.json", "text.jsonl", fitting.STATE, "measured"
EVIDENCE = ("fit", "ranking")  # keys of records: the basis of the choice

Search = Callable[[Path], dict[str, Any]]  # in a work folder; method, parameters, factor, `EVIDENCE`


@dataclass(frozen=True)
class Learned:
    """A scaling that was learned or chosen on the model itself.

    Args:
        plan: The plan of that scaling.
        record: Its entries in `ropepatch.json`: the request, the outcome and its basis.
        work: The folder that contains it until the checkpoint is written.
    """

    plan: Plan
    record: dict[str, Any]
    work: Path

    def put_on_record(self, folder: Path) -> None:
        """Add its origin to the record of a checkpoint, and remove the work folder."""
        records.amend(folder, **self.record)
        if self.work.is_dir() and not _holds_other_files(self.work):
            shutil.rmtree(self.work)


def planned(options: ExtendOptions) -> tuple[Plan, Learned | None]:
    """The plan of a call, and how its method was learned or chosen, if it is `fit` or `auto`.

    Except in a dry run, a work folder next to the checkpoint is created, from which a search resumes.
    """
    if isinstance(options.plan, Plan):
        return options.plan, None
    if not options.searches:
        plan = plan_method(options.source, options.chosen, options.asked, options.target)
        return check_layers(plan, options.layers), None
    stand_in = check_layers(plan_method(options.source, "linear", {}, options.target), options.layers)
    options.check_suite(stand_in)  # refused before the search
    options.check_plan(stand_in)
    source = options.source.complete()
    settings, search = (_choose if options.chosen == AUTO else _fit)(options, source)
    asked = {"method": options.chosen} | settings | {"to": options.target, "weights": source.fingerprint}
    asked |= {} if options.original is None else {"original": options.original}
    work = work_folder(options)
    record = _remembered(as_read(asked), options.folder, work)
    if "method" not in record.get("start", {}):  # no search, or an interrupted one
        if options.processes.count > 1:
            raise RopepatchError(
                f"{argument('method')} {options.chosen} runs in one process",
                hint=f"run `ropepatch fit` or `compare` first, and pass {argument('method')} their result",
            )
        absent(options.folder)
        with nullcontext(work) if not options.dry_run else TemporaryDirectory(prefix="ropepatch-") as place:
            record = _searched_in(Path(place), as_read(asked), search)
    start = record["start"]
    parameters = start["parameters"] | ({"factor": start["factor"]} if "factor" in start else {})
    learned = plan_method(source, start["method"], parameters, options.target)
    evidence = {key: record[key] for key in ("start", *EVIDENCE) if key in record}
    return learned, Learned(learned, evidence, work)


def work_folder(options: ExtendOptions) -> Path:
    """The folder from which a search resumes."""
    return options.place.with_name(f"{options.place.name}.{FIT}")


def kept(options: ExtendOptions) -> str:
    """What an interrupted `extend` keeps: its checkpoint, that of the training, or the search."""
    if options.dry_run:
        return "nothing is kept"
    folder = options.place
    run, work = folder.with_name(f"{folder.name}.run"), work_folder(options)
    if folder.exists():
        return f"{folder} is written; the same command resumes"
    if options.training is not None and run.is_dir():
        steps = (path.name.rpartition("-")[2] for path in run.glob("checkpoint-*"))
        last = max((int(step) for step in steps if step.isdigit()), default=0)
        return f"{run} keeps step {last} of {options.training.max_steps}; the same command resumes from it"
    if (work / START).is_file() and (work / MEASURED).is_dir():
        return f"{work} keeps all finished results; the same command resumes"
    return kept_by_fit(work)


def kept_by_fit(work: Path) -> str:
    """What an interrupted `fit` keeps in its work folder."""
    if (work / STATE).is_file():
        return f"{work} keeps the fit so far; the same command resumes"
    return "nothing is kept; the same command starts again"


def _fit(options: ExtendOptions, source: Checkpoint) -> tuple[dict[str, Any], Search]:
    """The settings that determine `fit`, and the search."""
    text, recipe = options.searched, options.training
    refuse_unknown(options.asked, Fit.model_fields, "parameter of fit")
    settings = Fit(**(text if text["text"] and not options.suite else {}) | options.asked)
    sources = recipe.data.sources if recipe and settings.text is None else ()
    texts = [source.text for source in sources if isinstance(source, Texts)]
    seed = recipe.seed if recipe else 0

    def search(work: Path) -> dict[str, Any]:
        given = settings.model_dump()
        if recipe and recipe.quantization:  # 4-bit weights cannot be scaled
            given["queries"] = False
        if texts and recipe:
            _write_windows(recipe, source, options.target, work / WINDOWS)
            given |= {"text": work / WINDOWS, "field": "input_ids"}
        fitted = fitting.fit(
            source,
            to=options.target,
            **given,
            seed=seed,
            device=options.processes.device,
            work=work,
            progress=options.progress,
            say=options.say,
        )
        options.show(fitted)
        record = fitted.record | {"text": ", ".join(map(shown_name, texts)) or fitted.record["text"]}
        start = {"method": fitted.scaling.name, "factor": fitted.scaling.factor}
        return start | {"parameters": fitted.scaling.parameters(), "fit": record}

    return settings.model_dump() | {"recipe_texts": texts, "seed": seed}, search


def _choose(options: ExtendOptions, source: Checkpoint) -> tuple[dict[str, Any], Search]:
    """The settings that determine `auto`, and the search."""
    reading = {"split": "test"} | options.searched

    def search(work: Path) -> dict[str, Any]:
        asked = choice.CompareOptions(
            model=options.name,
            to=options.target,
            original=options.original,
            allow_code=options.allow_code,
            **reading,
            out=str(work / MEASURED),
            revision=options.revision,
            device=options.processes.device,
            say=options.say,
            progress=options.progress,
        )
        chosen = choice.choose(asked)
        options.show(chosen)
        if chosen.method is None:
            raise NothingHelpsError(" ".join(chosen.ranking.advice))
        ranking = {"rule": RULE, **chosen.ranking.record()}
        outcome = {"method": chosen.method, "parameters": chosen.parameters, "ranking": ranking}
        if chosen.fitted is not None:  # recommended, or only ranked
            (outcome if chosen.ranking.recommended == FIT else ranking)["fit"] = chosen.fitted.record
        return outcome

    return reading | ({"allow_code": True} if options.allow_code else {}), search


def _write_windows(recipe: Recipe, source: Checkpoint, to: int, file: Path) -> None:
    """Write windows of the training text of a recipe."""
    reader = RecipeReader(
        recipe=recipe,
        tokenizer=source.tokenizer,
        trained=source.window,
        target=to,
        vocabulary=source.config.vocab_size,
        folder=source.folder,
    )
    reader.write_windows(file)


def _remembered(asked: dict[str, Any], folder: Path, work: Path) -> dict[str, Any]:
    """The record of the same search in the checkpoint or the work folder; empty if there is none."""
    earlier, finished = {}, {}
    with suppress(OSError):  # a name that is too long, for which writing raises an error
        if records.exists(folder):
            finished = records.read(folder).to_dict()
        if (work / START).is_file():
            earlier = read_json(work / START)
    if finished.get("start", {}).get("asked") == without_paths(asked):
        return finished
    if earlier:
        hint = f"choose another {argument('out')}, or remove that folder to start again"
        check_resumed(f"{work} belongs to another search", earlier["start"]["asked"], asked, hint=hint)
    return earlier


def _searched_in(work: Path, asked: dict[str, Any], search: Search) -> dict[str, Any]:
    """Run a search in a folder from which it can resume, and return its record."""
    if work.exists() and _holds_other_files(work):
        raise RopepatchError(
            f"{work} exists and contains other files", hint=f"choose another {argument('out')}"
        )
    work.mkdir(parents=True, exist_ok=True)
    _write_start(work, {"start": {"asked": asked}})
    try:
        outcome = as_read(search(work))
    except RopepatchError:
        if work.is_dir() and not any((work / state).exists() for state in (STATE, MEASURED)):
            shutil.rmtree(work)
        raise
    evidence = {key: outcome.pop(key) for key in EVIDENCE if key in outcome}
    record = {"start": {"asked": asked} | outcome} | evidence
    _write_start(work, record)
    return record


def _write_start(work: Path, record: dict[str, Any]) -> None:
    with whole_file(work / START) as partial:
        write_json(partial, record)


def _holds_other_files(work: Path) -> bool:
    ours = {START, WINDOWS, STATE, MEASURED}
    return any(file.name not in ours and not file.name.startswith(".") for file in work.iterdir())
