"""`train`: fine-tune a model at its target length, and write the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ropepatch.data.texts import Texts
from ropepatch.errors import RopepatchError, argument
from ropepatch.extension import record as records
from ropepatch.extension import writing
from ropepatch.extension.planning import Plan
from ropepatch.extension.planning import plan as plan_of
from ropepatch.model.gguf import GgufModel
from ropepatch.probing.making import add_fingerprint, check_fingerprint
from ropepatch.progress import (
    Progress,
    Say,
    bar,
    interruptible,
    say_on_stderr,
    silent,
)
from ropepatch.settings import Length, name_of
from ropepatch.training.forecast import forecast, other_model, sized
from ropepatch.training.recipe import QUESTIONS, Recipe, read_recipe
from ropepatch.training.run import Run, checkpoints, checks
from ropepatch.training.supply import check_run
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
    _check_installed()
    settings = recipe if isinstance(recipe, Recipe) else read_recipe(os.fspath(recipe))
    named = "recipe" if isinstance(recipe, Recipe) else name_of(os.fspath(recipe))
    if isinstance(model, Plan):
        plan = model
        check_unchanged(plan)
    else:
        plan = _planned(model, settings, to, method, original, revision)
    if isinstance(plan.source, GgufModel):
        raise RopepatchError(
            f"{plan.source.name} is a GGUF file, which cannot be trained",
            hint="train the checkpoint that it was made from",
        )
    if text is not None:
        source = Texts(text=os.fspath(text), field=field, split=split)
        settings = _reading(settings, source)
    if settings.distil is not None and settings.distil.auto_size:
        settings, note = sized(settings, plan.source, plan.target)
        say(note)
    place = output_of(plan, out, method, named)
    run = Run(plan, settings, absolute(place), include, say, progress)
    if dry_run:
        return _dry_run(run, place, reading)
    if not isinstance(model, Plan):
        say_warnings(plan, say)
    for warning in other_model(plan, settings):
        say(f"warning: {warning}")
    _check_fingerprint(plan, settings, reading)
    check_place(place)
    for check_one in checks(run):
        check_one()
    from ropepatch.training.fine_tuning import fine_tune

    with interruptible(say, lambda: _kept(run)):
        extra = check_carried(run.source, include, say)
        written = fine_tune(run)
        record = run.processes.write_once(
            lambda: _complete(run, written, reading, extra, command)
        )
    assert record.training is not None
    check = record.training.short_context
    say(str(check) if check.passed else f"warning: {check}")
    return Extension(run.out, plan, record.to_dict(), check)


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


def _dry_run(run: Run, place: Path, reading: bool | None) -> Extension:
    """The plan, the forecast, and the errors that would stop the training; loads no weights."""
    found: list[Callable[[], object]] = [
        *checks(run),
        partial(_check_fingerprint, run.plan, run.recipe, reading),
        partial(check_place, place),
    ]
    if is_here(run.plan):
        found += [run.check_out, partial(_check_source, run)]
        if not failures([run.check_out]):
            found.append(partial(check_run, run))
    obstacles = failures(found)
    return Extension(place, run.plan, forecast=forecast(run), obstacles=obstacles)


def _check_source(run: Run) -> None:
    """Refuse a checkpoint whose files cannot be read or copied."""
    _ = run.source.weights
    check_carried(run.source, run.include, silent)


def _complete(
    run: Run,
    written: writing.Written,
    reading: bool | None,
    extra: dict[str, Path],
    command: str | None,
) -> records.Record:
    """Add the fingerprint, further files, and the command that wrote the checkpoint."""
    if run.recipe.save == "merged" and reading is not False:
        add_fingerprint(
            run.plan,
            written,
            asked=bool(reading),
            device=run.processes.device,
            say=run.say,
            progress=run.progress,
        )
    writing.copy_files(extra, written.path)
    if command and written.record.command is None:
        return records.amend(written.path, command=command)
    return written.record


def _kept(run: Run) -> str:
    """What an interrupted call leaves: its checkpoint, or those of the training."""
    if run.out.exists():
        return f"{run.out} is written; the same command resumes"
    if not run.folder.is_dir():
        return "nothing is kept; the same command starts again"
    saved = checkpoints(run.folder)
    step = saved[-1].name.rpartition("-")[2] if saved else 0
    return f"{run.folder} keeps step {step} of {run.recipe.max_steps}; the same command resumes from it"
