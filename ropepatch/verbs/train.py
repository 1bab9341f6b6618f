"""`train`: fine-tune a model at its target length, and write the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from ropepatch.data.sources import local_files
from ropepatch.data.texts import Texts
from ropepatch.errors import RopepatchError, argument, requiring
from ropepatch.extension.planning import Plan, check_bare
from ropepatch.extension.planning import plan as plan_of
from ropepatch.files import check_writable
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
from ropepatch.training.forecast import forecast, sized
from ropepatch.training.recipe import QUESTIONS, Recipe, read_recipe
from ropepatch.training.run import Run
from ropepatch.verbs.extend import (
    Extension,
    absolute,
    check_carried,
    check_unchanged,
    output_of,
    say_warnings,
)


def train(
    model: str | os.PathLike[str] | Plan,
    out: str | Path | None = None,
    *,
    recipe: str | Path | Recipe,
    to: Length | None = None,
    method: str | None = None,
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
        method: A scaling from `ropepatch methods`. Default: that of the recipe.
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
    with requiring("a training", "ropepatch[train]"):
        from ropepatch.training.fine_tuning import fine_tune
    named, settings = "recipe", recipe
    if not isinstance(settings, Recipe):
        file = os.fspath(settings)
        named, settings = name_of(file), read_recipe(file)
    if not isinstance(model, Plan):
        name = method or settings.method.name
        stated = name == settings.method.name
        plan = plan_of(
            model,
            to=to or settings.to,
            method=name,
            original=original,
            revision=revision,
            **settings.method.parameters if stated else {},
        )
        say_warnings(plan, silent if dry_run else say)
    else:
        check_bare(to, method, original, revision)
        plan = model
        check_unchanged(plan)
    plan.config.check_generates()
    if text is not None:
        source = Texts(text=os.fspath(text), field=field, split=split)
        settings = _reading(settings, source)
    if settings.distil is not None and settings.distil.auto_size:
        settings, note = sized(settings, plan)
        say(note)
    place = output_of(plan, out, named)
    run = Run(plan, settings, absolute(place), include, command, say, progress)
    checks: list[Callable[[], object]] = [
        run.check,
        partial(check_writable, run.out, f"choose another {argument('out')}"),
    ]
    if reading:
        checks.append(partial(_check_fingerprint, run))
    if dry_run:
        # Of a Hub id only config.json is read
        if plan.source.name == "tiny" or Path(plan.source.name).is_dir():
            checks += [
                run.check_out,
                lambda: run.source.weights,
                partial(_check_source, run),
            ]
        expected = None
        with suppress(RopepatchError):  # one of the obstacles
            expected = forecast(settings, plan, run.counted, run.processes.count)
        return Extension(place, plan, forecast=expected, obstacles=_failures(checks))
    for check in checks:
        check()
    with interruptible(say, lambda: _kept(run)):
        check_carried(run.source, include, say)
        written = fine_tune(run)
        if settings.save == "merged" and reading is not False:
            run.processes.write_once(
                lambda: add_fingerprint(
                    plan,
                    written,
                    asked=bool(reading),
                    device=run.processes.device,
                    say=say,
                    progress=progress,
                )
            )
    assert written.record.training is not None
    found = written.record.training.short_context
    say(str(found) if found.passed else f"warning: {found}")
    return Extension(run.out, plan, written.record.to_dict(), found)


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


def _check_fingerprint(run: Run) -> None:
    """Refuse a requested fingerprint if none is possible."""
    if run.recipe.save == "adapter":
        raise RopepatchError(
            f"{argument('reading')}: save: adapter writes no checkpoint",
            hint="leave it out",
        )
    check_fingerprint(run.plan)


def _failures(checks: Iterable[Callable[[], object]]) -> tuple[RopepatchError, ...]:
    """The errors of several checks, each once."""
    found: dict[str, RopepatchError] = {}
    for check in checks:
        try:
            check()
        except RopepatchError as error:
            found.setdefault(str(error), error)
    return tuple(found.values())


def _check_source(run: Run) -> None:
    """Refuse a checkpoint or a text whose files cannot be read or copied."""
    _ = run.source.tokenizer
    check_carried(run.source, run.include, silent)
    for source in run.recipe.data.sources:
        if isinstance(source, Texts):
            local_files(source.text)


def _kept(run: Run) -> str:
    """What an interrupted call leaves: its checkpoint, or the folder of the run."""
    kept = [str(place) for place in (run.out, run.folder) if place.exists()]
    return f"{' and '.join(kept) or 'nothing'} is kept; the same command resumes"
