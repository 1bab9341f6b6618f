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
    AsJson,
    Model,
    Revision,
    Settings,
    parse_settings,
    parse_share,
    print_warnings,
)
from ropepatch.cli.measured import TextField, TextSource, TextSplit, measure_extension_and_print, named_suite
from ropepatch.cli.running import bytes_progress, is_first
from ropepatch.errors import RopepatchError
from ropepatch.lengths import parse_length, relative_length, short_length

if TYPE_CHECKING:
    from ropepatch.planning import Plan
    from ropepatch.suites import Suite
    from ropepatch.training.recipe import Recipe
    from ropepatch.training.watching import Gate

EXAMPLES = """\b
Examples:
  ropepatch extend ./llama-2-7b --to 32k
  ropepatch extend ./llama-2-7b --to 16k --method ntk --out ./llama-2-7b-16k
  ropepatch extend meta-llama/Llama-2-7b-hf --to 32k --link-weights
  ropepatch extend tiny --to 2k --recipe tiny --eval demo --push me/tiny-2k
  ropepatch extend ./llama-2-7b --recipe llama2-7b-yarn-32k --max-short-loss-increase 2%"""


def extend(
    model: Model,
    to: Annotated[
        str | None, typer.Option(help="The target context, e.g. 32k; that of the recipe if not given.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="See `ropepatch methods`; that of the recipe, or yarn, if not given.")
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
    split: TextSplit = "test",
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
    from ropepatch.checkpoint import amend_record
    from ropepatch.planning import plan as make_plan
    from ropepatch.source import read_json

    most = None if max_short_loss_increase is None else parse_share(max_short_loss_increase)
    taught = _recipe(recipe, gated=most is not None, link_weights=link_weights)
    asked = None if suite is None else named_suite(suite, text=text, field=field, split=split)
    name = method or (taught.method.name if taught else "yarn")
    parameters = parse_settings(name, settings)
    if taught and name == taught.method.name:
        parameters = taught.method.parameters | parameters
    wanted = to or (str(taught.to) if taught else None)
    if wanted is None:
        raise RopepatchError("--to is missing", hint="--to 32k, or a --recipe, which has a target")
    made = make_plan(model, to=_target(wanted, model, revision), method=name, revision=revision, **parameters)
    if dry_run:
        print(made.to_json() if as_json else made)
        return
    if push:
        from ropepatch.hub import check_repo

        check_repo(push)
    if made.exportable and is_first():
        print_warnings(made)
    if asked:
        _check_suite(asked, made, taught)
    parts = [Path(model).name, name, short_length(made.target), *([Path(recipe).stem] if recipe else [])]
    folder = out or Path("-".join(parts))
    gate, before = None, {}
    if taught:
        with suppress(OSError):  # a name that is too long: the training says so
            if (folder / "ropepatch.json").is_file():
                before = read_json(folder / "ropepatch.json")
        folder, gate = _train(made, taught, folder, most)
    else:
        folder = _write(made, folder, link_weights=link_weights)
    if asked:
        label = f"{name} + {Path(recipe).stem}" if recipe else "adapted"
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


def _target(wanted: str, model: str, revision: str | None) -> int:
    """In tokens; a recipe may have a multiple of the model's context."""
    if not wanted.endswith("x"):
        return parse_length(wanted)
    from ropepatch.source import find_source
    from ropepatch.survey import survey_folder

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
    from ropepatch.measuring import measure_extension

    if recipe and recipe.save == "adapter":
        raise RopepatchError(
            "--eval beside save: adapter", hint="a suite measures whole checkpoints: save: merged"
        )
    measure_extension(suite, made)


def _train(made: Plan, recipe: Recipe, folder: Path, most: float | None) -> tuple[Path, Gate]:
    try:
        from ropepatch.training.adapting import adapt
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

    from ropepatch.checkpoint import amend_record
    from ropepatch.evaluation.summaries import summary

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


def _write(made: Plan, folder: Path, *, link_weights: bool) -> Path:
    from ropepatch.checkpoint import extend as write

    with bytes_progress("weights") as progress:
        return write(made, folder, link_weights=link_weights, progress=progress)


def _print_outcome(written: Path, made: Plan, record: dict[str, Any]) -> None:
    window = made.rope.original_max_position_embeddings
    print(f"{written}: {window} -> {made.target} tokens, {made.scaling.name}")
    if "verified" in record:
        print(f"reloaded with stock transformers: frequencies {record['verified']['frequencies']}, ", end="")
        print(f"logits {record['verified']['logits']}")
