"""`ropepatch extend`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ropepatch.cli.arguments import (
    AsJson,
    Model,
    Revision,
    Settings,
    parse_settings,
    print_warnings,
)
from ropepatch.lengths import parse_length, short_length

EXAMPLES = """\b
Examples:
  ropepatch extend ./llama-2-7b --to 32k
  ropepatch extend ./llama-2-7b --to 16k --method ntk --out ./llama-2-7b-16k
  ropepatch extend meta-llama/Llama-2-7b-hf --to 32k --link-weights"""


def extend(
    model: Model,
    to: Annotated[str, typer.Option(help="The target context, e.g. 32k.")],
    method: Annotated[str, typer.Option(help="See `ropepatch methods`.")] = "yarn",
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder to make; MODEL-METHOD-TO here if not given.")
    ] = None,
    link_weights: Annotated[
        bool,
        typer.Option(
            "--link-weights",
            help="Hard-link the weight files instead of copying them: instant, but a program that later "
            "rewrites one of them in place also changes the source.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint with a longer context, training-free, that stock transformers loads."""
    parameters = parse_settings(method, settings)
    target = parse_length(to)

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from ropepatch.checkpoint import extend as write
    from ropepatch.planning import plan as make_plan
    from ropepatch.source import read_json

    made = make_plan(model, to=target, method=method, revision=revision, **parameters)
    if dry_run:
        print(made.to_json() if as_json else made)
        return
    folder = out or Path(f"{Path(model).name}-{method}-{short_length(target)}")
    if made.exportable:
        print_warnings(made)
    columns = (
        TextColumn("weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("weights", total=None)
        written = write(
            made,
            folder,
            link_weights=link_weights,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    record = read_json(written / "ropepatch.json")
    if as_json:
        print(json.dumps(record, indent=2, ensure_ascii=False))
        return
    window = made.rope.original_max_position_embeddings
    print(f"{written}: {window} -> {made.target} tokens, {made.scaling.name}")
    print(f"reloaded with stock transformers: frequencies {record['verified']['frequencies']}, ", end="")
    print(f"logits {record['verified']['logits']}")
