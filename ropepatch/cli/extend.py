"""`ropepatch extend`."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropepatch.cli.arguments import (
    AUTO,
    FIT,
    AsJson,
    Model,
    Revision,
    Settings,
    parse_settings,
    parse_share,
    print_warnings,
)
from ropepatch.cli.learned import chosen_plan, fit_settings, fitted_plan
from ropepatch.cli.measured import TextField, TextSource, measure_extension_and_print, named_suite
from ropepatch.cli.running import bytes_progress, is_first
from ropepatch.errors import RopepatchError
from ropepatch.settings import parse_length, relative_length, short_length

if TYPE_CHECKING:
    from ropepatch.cli.learned import Learned
    from ropepatch.evaluation.suites import Suite
    from ropepatch.extension.planning import Plan
    from ropepatch.training.recipe import Recipe
    from ropepatch.training.watching import Gate

EXAMPLES = """\b
Examples:
  ropepatch extend ./llama-2-7b --to 32k
  ropepatch extend ./llama-2-7b --to 16k --method ntk --out ./llama-2-7b-16k
  ropepatch extend meta-llama/Llama-2-7b-hf --to 32k --link-weights
  ropepatch extend ./llama-2-7b --to 16k --method fit --text books.txt --set steps=100
  ropepatch extend tiny --to 2k --recipe tiny --eval demo --push me/tiny-2k
  ropepatch extend ./llama-2-7b --recipe llama2-7b-yarn-32k --max-short-loss-increase 2%"""


def extend(
    model: Model,
    to: Annotated[
        str | None,
        typer.Option(help="The target context, e.g. 32k; that of the recipe or scaling file if not given."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="See `ropepatch methods`; or a scaling file, `fit`, which learns one, or `auto`, which "
            "chooses one. That of the recipe, or yarn, if not given."
        ),
    ] = None,
    settings: Settings = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Train it at the new context; see `ropepatch recipes`."),
    ] = None,
    max_short_loss_increase: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Exit 1 if training raised the loss within the old context by more, e.g. 2%.",
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option("--eval", metavar="SUITE", help="Measure before and after; see `eval/suites`."),
    ] = None,
    text: TextSource = None,
    field: TextField = "text",
    split: Annotated[
        str | None,
        typer.Option(help="Of a `datasets` id or a saved set; test if not given, or train to fit on."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder to make; MODEL-METHOD-TO(-RECIPE) here if not given.")
    ] = None,
    link_weights: Annotated[
        bool,
        typer.Option(
            "--link-weights",
            help="Hard-link the weight files instead of copying them: instant, but a program that later "
            "rewrites one of them in place also changes the source.",
        ),
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(metavar="REPO", help="Push it to the Hub with its card; see `ropepatch push`."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint with a longer context that stock transformers loads.

    Without a recipe it is training-free. With one the model is trained at the new context: the same command
    goes on where it was interrupted, and several processes share the work under torchrun or accelerate.
    """
    from ropepatch.extension.planning import plan as make_plan
    from ropepatch.extension.writing import amend_record
    from ropepatch.files import read_json
    from ropepatch.scaling.file import method_label

    most = None if max_short_loss_increase is None else parse_share(max_short_loss_increase)
    taught = _recipe(recipe, gated=most is not None, link_weights=link_weights)
    asked = None if suite is None else named_suite(suite, text=text, field=field, split=split or "test")
    name = method or (taught.method.name if taught else "yarn")
    given = taught.method.parameters if taught and name == taught.method.name else {}
    parameters = {} if name in (FIT, AUTO) else given | parse_settings(name, settings)
    target = _target(to or (str(taught.to) if taught else None), name, model, revision)
    label = method_label(name)
    parts = [Path(model).name, label, short_length(target), *([Path(recipe).stem] if recipe else [])]
    folder = out or Path("-".join(parts))
    if push and not dry_run:
        from ropepatch.publishing.hub import check_repo

        check_repo(push)
    learned: Learned | None = None
    if name in (FIT, AUTO):
        any_plan = make_plan(model, to=target, method="linear", revision=revision)
        if asked:  # refused before the search, if at all
            _check_suite(asked, any_plan, taught)
        read: dict[str, Any] = {"text": text, "field": field} | ({"split": split} if split else {})
        if name == AUTO and text and asked:
            raise RopepatchError(
                "--text is what --method auto chooses by, and --eval would measure on it",
                hint="leave --eval out, and `ropepatch eval` the checkpoint on another text",
            )
        if name == AUTO:
            read = {"split": "test"} | read
            learned = chosen_plan(model, target, revision, settings, read, folder, keep=not dry_run)
        else:
            fit = fit_settings(given, settings, read, measured=asked is not None, taught=taught is not None)
            learned = fitted_plan(model, target, revision, fit, taught, folder, keep=not dry_run)
    made = (
        learned.plan if learned else make_plan(model, to=target, method=name, revision=revision, **parameters)
    )
    if dry_run:
        print(made.to_json() if as_json else made)
        return
    if made.savable and is_first():
        print_warnings(made)
    if asked:
        _check_suite(asked, made, taught)
    gate, before = None, {}
    if taught:
        with suppress(OSError):  # a name that is too long: the training says so
            if (folder / "ropepatch.json").is_file():
                before = read_json(folder / "ropepatch.json")
        folder, gate = _train(made, taught, folder, most)
    else:
        folder = _write(made, folder, link_weights=link_weights, record=learned.record if learned else {})
    if learned and is_first():
        learned.put_on_record(folder)
    if asked:
        label = f"{label} + {Path(recipe).stem}" if recipe else "adapted"
        _measure(asked, made, folder, trained=taught is not None, label=label, as_json=as_json)
    if not is_first():
        return
    record = read_json(folder / "ropepatch.json")
    if not before or record.get("evaluation") != before.get("evaluation"):
        amend_record(folder, command=shlex.join(["ropepatch", *sys.argv[1:]]))
        record = read_json(folder / "ropepatch.json")
    if not as_json:
        _print_outcome(folder, made, record)
    red = gate is not None and not gate.passed
    if gate is not None:
        print("warning: " if red else "", gate, sep="", file=sys.stderr)
    try:
        if push and red:
            print(f"not pushed: `ropepatch push --force {folder} {push}` does", file=sys.stderr)
        elif push:
            record["pushed"] = _push(folder, push, as_json=as_json)
    finally:
        if as_json:
            print(json.dumps(record, indent=2, ensure_ascii=False))
    if red and (push or most is not None):
        raise typer.Exit(1)


def _push(folder: Path, repo: str, *, as_json: bool) -> dict[str, Any]:
    from ropepatch.cli.push import print_pushed, push_folder, pushed_data

    try:
        pushed = push_folder(folder, repo)
    except RopepatchError as error:
        again = f"the checkpoint is written: `ropepatch push {folder} {repo}` goes on"
        raise RopepatchError(str(error), hint=f"{error.hint}; {again}" if error.hint else again) from error
    if not as_json:
        print_pushed(pushed)
    return pushed_data(pushed)


def _target(wanted: str | None, method: str, model: str, revision: str | None) -> int:
    """In tokens; a recipe may have a multiple of the model's context."""
    from ropepatch.scaling.file import is_scaling_file, read_scaling

    if wanted is None and is_scaling_file(method):
        return read_scaling(method).target
    if wanted is None:
        raise RopepatchError("--to is missing", hint="--to 32k, or a --recipe, which has a target")
    if not wanted.endswith("x"):
        return parse_length(wanted)
    from ropepatch.model.source import find_source
    from ropepatch.model.survey import survey_folder

    found = survey_folder(find_source(model, revision, weights=False).folder)
    return relative_length(wanted, found.rope.original_max_position_embeddings)


def _recipe(name: str | None, *, gated: bool, link_weights: bool) -> Recipe | None:
    if name is None:
        if gated:
            raise RopepatchError("--max-short-loss-increase needs a --recipe", hint="see `ropepatch recipes`")
        return None
    if link_weights:
        raise RopepatchError("--link-weights beside --recipe, which makes new weights", hint="leave one out")
    from ropepatch.training.recipe import read_recipe

    return read_recipe(name)


def _check_suite(suite: Suite, made: Plan, recipe: Recipe | None) -> None:
    """Refuse now what could not be measured after the training."""
    from ropepatch.evaluation.measuring import measure_extension

    if recipe and recipe.save == "adapter":
        raise RopepatchError(
            "--eval beside save: adapter", hint="a suite measures whole checkpoints: save: merged"
        )
    measure_extension(suite, made)


def _train(made: Plan, recipe: Recipe, folder: Path, most: float | None) -> tuple[Path, Gate]:
    try:
        from ropepatch.training.adaptation import adapt
    except ImportError as error:
        raise RopepatchError(f"a recipe needs {error.name}", hint='pip install "ropepatch[train]"') from error

    def say(line: str) -> None:
        if is_first():
            print(line, file=sys.stderr, flush=True)

    adapted = adapt(made, recipe, folder, max_short_loss_increase=most, say=say)
    return adapted.folder, adapted.gate


def _measure(suite: Suite, made: Plan, folder: Path, *, trained: bool, label: str, as_json: bool) -> None:
    """Before and after; results, report and a summary go into the checkpoint's folder."""
    from importlib.util import find_spec

    from ropepatch.evaluation.summaries import summary
    from ropepatch.extension.writing import amend_record

    drawable = find_spec("matplotlib") and find_spec("jinja2")
    report = folder / "evaluation.html"
    if is_first():
        report.unlink(missing_ok=True)  # of an earlier call, which was interrupted
    results = measure_extension_and_print(
        suite,
        made,
        folder if trained else None,
        label=label,
        out=folder / "evaluation",
        report=report if drawable and is_first() else None,
        as_json=as_json,
    )
    if is_first():
        amend_record(folder, evaluation=summary(results))
        if not drawable:
            print('no report: pip install "ropepatch[plot]"', file=sys.stderr)


def _write(made: Plan, folder: Path, *, link_weights: bool, record: dict[str, Any]) -> Path:
    from ropepatch.extension.writing import extend as write

    with bytes_progress("weights") as progress:
        return write(made, folder, link_weights=link_weights, progress=progress, record=record)


def _print_outcome(written: Path, made: Plan, record: dict[str, Any]) -> None:
    window = made.rope.original_max_position_embeddings
    print(f"{written}: {window} -> {made.target} tokens, {made.scaling.name}")
    if "verified" in record:
        print(f"reloaded with stock transformers: frequencies {record['verified']['frequencies']}, ", end="")
        print(f"logits {record['verified']['logits']}")
