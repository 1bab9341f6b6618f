"""`train`: fine-tune a model at its target length, and write the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropepatch.data.texts import Texts
from ropepatch.errors import RopepatchError, argument
from ropepatch.extension import record as records
from ropepatch.extension import writing
from ropepatch.extension.planning import Plan
from ropepatch.extension.planning import plan as plan_of
from ropepatch.files import is_gguf
from ropepatch.probing.making import add_fingerprint, check_fingerprint
from ropepatch.processes import join
from ropepatch.progress import Progress, Say, bar, interruptible, say_on_stderr
from ropepatch.settings import Length, name_of
from ropepatch.training.forecast import forecast, other_model
from ropepatch.training.preparation import Prepared, prepare
from ropepatch.training.recipe import QUESTIONS, Recipe, read_recipe
from ropepatch.training.self_taught import sized
from ropepatch.verbs.extend import (
    Extension,
    absolute,
    check_carried,
    check_place,
    check_unchanged,
    failures,
    is_here,
    output_of,
    say_warnings,
)

if TYPE_CHECKING:
    from ropepatch.training.fine_tuning import FineTuned


def train(
    model: str | os.PathLike[str] | Plan,
    out: str | Path | None = None,
    *,
    recipe: str | Path | Recipe,
    to: Length | None = None,
    method: str | Path | None = None,
    text: str | Path | None = None,
    field: str = "text",
    split: str = "train",
    original: Length | None = None,
    reading: bool | None = None,
    include: Sequence[str] = (),
    dry_run: bool = False,
    revision: str | None = None,
    command: str | None = None,
    say: Say = say_on_stderr,
    progress: Progress = bar,
) -> Extension:
    """Fine-tune a model at a longer context length, and write the checkpoint; stock transformers loads it.

    It scales RoPE, trains with the recipe, merges, and measures the loss within the original context length
    before and after. The folder OUT.run contains the checkpoints of the training. The same command resumes
    after an interruption, and the result is the same, on a CPU to the bit. Under torchrun or accelerate
    several processes share the work. The global random seeds become those of the recipe.

    Args:
        model: A checkpoint folder, a Hub id, or tiny.
        out: The folder to write. Default: MODEL-METHOD-TO-RECIPE in the working folder, or next to MODEL if
            that is the working folder.
        recipe: A name from `ropepatch recipes`, or a YAML file. distil needs no text: the model teaches
            itself.
        to: The target length in tokens, e.g. 32k, or 4x the original length. Default: that of the recipe.
        method: A scaling from `ropepatch methods`, or a scaling file. Default: that of the recipe.
        text: Train on this text instead of that of the recipe: a text, JSONL, CSV or Parquet file, a folder
            of text and JSONL files, a `datasets` id, or a dataset saved with `datasets`.
        field: The column or key that contains the text of a document.
        split: The split of a dataset.
        original: The original context length, if config.json contains another one: 32k for Qwen3, whose
            config.json contains 40960.
        reading: Write the fingerprint reading.json, with which `ropepatch probe` checks a server. Default:
            write it if that takes at most a minute or two.
        include: Also copy these files, such as examples/*.
        dry_run: Print the plan and what the recipe would do, and write nothing.
        revision: The branch, tag or commit of a Hub id.
        command: The command line, for ropepatch.json.
        say: A function that takes lines of progress.
        progress: See `ropepatch.progress.bar`.

    Raises:
        RopepatchError: If an argument is invalid, the model, target, method or recipe does not allow it, a
            text is missing, the folder exists with other content or cannot be written, or the loss is not a
            number.
    """
    if text is None and (field, split) != ("text", "train"):
        raise RopepatchError(
            f"{argument('field')} and {argument('split')} need {argument('text')}",
            hint="add the text, or leave them out",
        )
    if isinstance(model, Plan) and any(
        one is not None for one in (to, method, original, revision)
    ):
        raise RopepatchError(
            "a plan already sets target, method, original and revision",
            hint="pass the model, or only the plan",
        )
    if not isinstance(model, Plan) and is_gguf(model):
        raise RopepatchError(
            f"{model} is a GGUF file, which cannot be trained",
            hint="train the checkpoint that it was made from",
        )
    _check_installed()
    settings = recipe if isinstance(recipe, Recipe) else read_recipe(os.fspath(recipe))
    plan = (
        model
        if isinstance(model, Plan)
        else _planned(model, settings, to, method, original, revision)
    )
    if isinstance(model, Plan):
        check_unchanged(plan)
    if text is not None:
        settings = _reading(
            settings, Texts(text=os.fspath(text), field=field, split=split)
        )
    if settings.distil is not None and settings.distil.auto_size:
        settings, note = sized(settings, plan.checkpoint(), plan.target)
        say(note)
    named = "recipe" if isinstance(recipe, Recipe) else name_of(os.fspath(recipe))
    place = output_of(plan, out, method, named)
    if dry_run:
        return _dry_run(plan, settings, place, reading, include)
    if not isinstance(model, Plan):
        say_warnings(plan, say)
    for warning in other_model(plan, settings):
        say(f"warning: {warning}")
    prepared = prepare(plan, settings)
    prepared.check()
    _check_fingerprint(plan, settings, reading)
    check_place(place)
    with interruptible(say, lambda: _kept(absolute(place), settings)):
        source = plan.checkpoint(include)
        writing.check_outside(source, absolute(place))
        extra = check_carried(source, include, say)
        trained = _trained(plan, settings, place, prepared, reading, say, progress)
        folder, check = trained.folder, trained.short_context
        join().write_once(partial(_complete, folder, extra, command))
        say(str(check) if check.passed else f"warning: {check}")
        return Extension(folder, plan, records.read(folder).to_dict(), check)


def _check_installed() -> None:
    """Refuse to train without the packages for it."""
    try:
        import_module("ropepatch.training.fine_tuning")
    except ImportError as error:
        hint = 'pip install "ropepatch[train]"'
        raise RopepatchError(f"a training needs {error.name}", hint=hint) from error


def _planned(
    model: str | os.PathLike[str],
    recipe: Recipe,
    to: Length | None,
    method: str | Path | None,
    original: Length | None,
    revision: str | None,
) -> Plan:
    """The plan of a recipe, with another target or method if given."""
    asked: dict[str, Any] = {}
    if method is None or method == recipe.method.name:
        asked = recipe.method.parameters
    name = method or recipe.method.name
    return plan_of(
        model,
        to=to or recipe.to,
        method=name,
        original=original,
        revision=revision,
        **asked,
    )


def _reading(recipe: Recipe, text: Texts) -> Recipe:
    """The recipe with a text in place of its own texts; questions about distant text stay."""
    questions = [
        one
        for one in recipe.data.sources
        if getattr(one, "generated", None) == QUESTIONS
    ]
    data = recipe.data.model_copy(update={"sources": (text, *questions)})
    watch = recipe.watch.model_copy(update={"text": None})
    return recipe.model_copy(update={"data": data, "watch": watch})


def _check_fingerprint(plan: Plan, recipe: Recipe, reading: bool | None) -> None:
    """Refuse a requested fingerprint if none is possible."""
    if reading and recipe.save == "adapter":
        raise RopepatchError(
            f"{argument('reading')}: save: adapter writes no checkpoint",
            hint="leave it out",
        )
    if reading:
        check_fingerprint(plan)


def _dry_run(
    plan: Plan,
    recipe: Recipe,
    place: Path,
    reading: bool | None,
    include: Sequence[str],
) -> Extension:
    """The plan, the forecast, and the errors that would stop the training; loads no weights."""
    prepared = prepare(plan, recipe)
    ahead = forecast(plan, recipe, place, processes=join().count, prepared=prepared)
    checks: list[Callable[[], object]] = [
        partial(_check_fingerprint, plan, recipe, reading),
        partial(check_place, place),
    ]
    if is_here(plan):
        checks.append(partial(_check_source, plan, place, include))
        checks.append(partial(_check_run, plan, recipe, place, prepared))
    obstacles = ahead.obstacles + failures(checks)
    return Extension(place, plan, forecast=ahead, obstacles=obstacles)


def _check_source(plan: Plan, place: Path, include: Sequence[str]) -> None:
    """Refuse a checkpoint whose files cannot be read or copied."""
    source = plan.checkpoint(include)
    writing.check_outside(source, absolute(place))
    _ = source.weights
    check_carried(source, include, lambda line: None)


def _check_run(plan: Plan, recipe: Recipe, place: Path, prepared: Prepared) -> None:
    """Raise the errors of a training that its preparation does not find."""
    from ropepatch.training.run import Run
    from ropepatch.training.supply import check_run

    check_run(Run.of(plan, recipe, place, replace(prepared, obstacles=())))


def _trained(
    plan: Plan,
    recipe: Recipe,
    place: Path,
    prepared: Prepared,
    reading: bool | None,
    say: Say,
    progress: Progress,
) -> FineTuned:
    """Start, resume or find the training, with its fingerprint."""
    from ropepatch.training.fine_tuning import fine_tune

    processes = join()
    trained = fine_tune(
        plan, recipe, place, say=say, progress=progress, prepared=prepared
    )
    if recipe.save == "merged" and reading is not False:
        written, device = (
            writing.Written(trained.folder, records.read(trained.folder)),
            processes.device,
        )
        processes.write_once(
            lambda: add_fingerprint(
                plan,
                written,
                asked=bool(reading),
                device=device,
                say=say,
                progress=progress,
            )
        )
    return trained


def _complete(folder: Path, extra: dict[str, Path], command: str | None) -> None:
    """Add further files, and the command that wrote the checkpoint."""
    writing.copy_files(extra, folder)
    if command and records.read(folder).command is None:
        records.amend(folder, command=command)


def _kept(folder: Path, recipe: Recipe) -> str:
    """What an interrupted call leaves: its checkpoint, or those of the training."""
    if folder.exists():
        return f"{folder} is written; the same command resumes"
    run = folder.with_name(f"{folder.name}.run")
    if not run.is_dir():
        return "nothing is kept; the same command starts again"
    steps = [path.name.rpartition("-")[2] for path in run.glob("checkpoint-*")]
    last = max((int(step) for step in steps if step.isdigit()), default=0)
    return f"{run} keeps step {last} of {recipe.max_steps}; the same command resumes from it"
