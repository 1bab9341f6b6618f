"""`ropepatch extend`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropepatch.cli.arguments import (
    SPLIT,
    AsJson,
    Include,
    Limit,
    Model,
    Original,
    Quiet,
    Revision,
    Settings,
    TextField,
    TextSource,
    a_length,
    a_method,
    a_recipe,
    a_suite,
    command_line,
    complete,
    feedback,
    parse_settings,
    parse_share,
)
from ropepatch.cli.listing import print_text
from ropepatch.cli.push import print_pushed, pushed_data
from ropepatch.errors import RopepatchError
from ropepatch.files import json_text
from ropepatch.pipeline.running import is_first, say_on_stderr
from ropepatch.publishing.loading import call

if TYPE_CHECKING:
    from ropepatch.fitting import Fitted
    from ropepatch.pipeline.choice import Choice
    from ropepatch.pipeline.extension import Extension

EXAMPLES = """\b
Examples:
  ropepatch extend ./llama-2-7b --to 32k
  ropepatch extend ./llama-2-7b --to 16k --method ntk --out ./llama-2-7b-16k
  ropepatch extend meta-llama/Llama-2-7b-hf --to 32k --link-weights
  ropepatch extend ./llama-2-7b --to 16k --method fit --text books.txt --set steps=100
  ropepatch extend ./llama-2-7b --to 16k --distil
  ropepatch extend tiny --to 2k --recipe tiny --eval demo --push me/tiny-2k
  ropepatch extend ./llama-2-7b --recipe llama2-7b-yarn-32k --max-short-loss-increase 2%"""


def extend(
    model: Model,
    to: Annotated[
        str | None,
        typer.Option(
            help="The target context: 32k, or 4x what it is; else that of the recipe or scaling file.",
            callback=a_length,
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="See `ropepatch methods`; or a scaling file, `fit`, which learns one, or `auto`, which "
            "chooses one. That of the recipe, or yarn, if not given.",
            callback=a_method,
            autocompletion=complete("methods"),
        ),
    ] = None,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            help="Of --method auto: let it choose an attention map, too, which only transformers runs, with "
            "trust_remote_code=True.",
        ),
    ] = False,
    original: Original = None,
    settings: Settings = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Train it at the new context; see `ropepatch recipes`.",
            callback=a_recipe,
            autocompletion=complete("recipes"),
        ),
    ] = None,
    distil: Annotated[
        bool,
        typer.Option(
            "--distil",
            help="Train it by what it expects itself, on --text or else on what it writes itself; "
            "`ropepatch recipes distil` says how.",
        ),
    ] = False,
    max_short_loss_increase: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Exit 1 if training raised the loss within the old context by more, e.g. 2%.",
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            "--eval",
            metavar="SUITE",
            help="Measure before and after; see `ropepatch suites`.",
            callback=a_suite,
            autocompletion=complete("suites"),
        ),
    ] = None,
    text: TextSource = None,
    field: TextField = "text",
    split: Annotated[
        str | None, typer.Option(help=f"{SPLIT}; test if not given, or train to fit on.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder to make; MODEL-METHOD-TO(-RECIPE) here if not given.")
    ] = None,
    limit: Limit = None,
    link_weights: Annotated[
        bool,
        typer.Option(
            "--link-weights",
            help="Hard-link the weight files instead of copying them: instant, but a program that later "
            "rewrites one of them in place also changes the source.",
        ),
    ] = False,
    reading: Annotated[
        bool | None,
        typer.Option(
            "--reading/--no-reading",
            help="Write reading.json, by which `ropepatch probe` tells whether a server computes the "
            "checkpoint; if not given, where it takes a minute or two at most.",
        ),
    ] = None,
    include: Include = None,
    push: Annotated[
        str | None,
        typer.Option(metavar="REPO", help="Push it to the Hub with its card; see `ropepatch push`."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the plan and what the recipe will do, and write nothing; exit 2 if the recipe cannot "
            "run here. `fit` and `auto` search first, which takes its time.",
        ),
    ] = False,
    revision: Revision = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint with a longer context that stock transformers loads.

    Without a recipe it is training-free. With one, or with --distil, the model is trained at the new context:
    the same command goes on where it was interrupted, and several processes share the work under torchrun or
    accelerate.
    """
    from ropepatch.pipeline.choice import NothingHelpsError
    from ropepatch.pipeline.extension import extend as write_extension
    from ropepatch.pipeline.request import method_of

    share = None if max_short_loss_increase is None else parse_share(max_short_loss_increase)
    screen = _Screen(as_json)
    try:
        extension = write_extension(
            model,
            out,
            to=to,
            method=method,
            original=original,
            allow_code=allow_code,
            settings=parse_settings(method_of(method, recipe), settings, learnable=True)
            if settings
            else None,
            recipe=recipe,
            distil=distil,
            max_short_loss_increase=share,
            evaluate=suite,
            text=text,
            field=field,
            split=split,
            limit=limit,
            link_weights=link_weights,
            reading=reading,
            include=include or (),
            push=push,
            dry_run=dry_run,
            revision=revision,
            record={"command": command_line()},
            show=screen.show,
            **feedback(quiet),
        )
        screen.show_last(extension)
        if extension.record and not as_json and not quiet:
            screen.show_next(extension)
    except NothingHelpsError:
        raise typer.Exit(1) from None
    finally:  # also where the push failed: the checkpoint is written
        screen.close()
    failed = extension.gate is not None and not extension.gate.passed
    if failed and (push or share is not None):
        raise typer.Exit(1)


@dataclass
class _Screen:
    """Where the outcome of `extend` is printed, as text as it comes or as JSON in the end."""

    as_json: bool
    record: dict[str, Any] | None = None

    def show(self, outcome: Choice | Fitted | Extension) -> None:
        """Print where the method comes from on stderr, and the checkpoint on stdout."""
        from ropepatch.pipeline.choice import Choice
        from ropepatch.pipeline.extension import Extension
        from ropepatch.report import print_ranking, print_results

        if isinstance(outcome, Choice):
            print_ranking(outcome.ranking, outcome.results, on_stderr=True)
        elif not isinstance(outcome, Extension):
            say_on_stderr(str(outcome))
        elif is_first():
            self.record = outcome.record
            if not self.as_json:
                if outcome.results:
                    print_results(outcome.results)
                print_text(outcome.outcome())

    def show_next(self, extension: Extension) -> None:
        """Say on stderr how the checkpoint is loaded, measured and published."""
        folder = str(extension.folder)
        if not is_first() or not (extension.folder / "config.json").exists():
            return
        loading = call("pipeline", "text-generation", folder, code=extension.plan.distances is not None)
        code = f'from transformers import pipeline; print({loading}("Once"))'
        say_on_stderr(f"load:    python -c {shlex.quote(code)}")
        say_on_stderr(f"measure: ropepatch eval {shlex.quote(folder)} --text FILE")
        if not extension.pushed:
            say_on_stderr(f"publish: ropepatch push {shlex.quote(folder)} ME/NAME")

    def show_last(self, extension: Extension) -> None:
        """Print what is known when all is done: the plan of a dry run, or what was pushed."""
        if not extension.record:
            print(extension.to_json()) if self.as_json else print_text(extension.outcome())
            if found := extension.obstacles:
                hints = dict.fromkeys(obstacle.hint for obstacle in found if obstacle.hint)
                raise RopepatchError("; ".join(map(str, found)), hint="; ".join(hints))
        elif extension.pushed and self.record is not None:
            self.record |= {"pushed": pushed_data(extension.pushed)}
            if not self.as_json:
                print_pushed(extension.pushed)

    def close(self) -> None:
        """Print the record, if JSON is wanted."""
        if self.as_json and self.record is not None:
            print(json_text(self.record))
