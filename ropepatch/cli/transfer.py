"""`ropepatch transfer`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropepatch.cli.arguments import (
    SPLIT,
    AsJson,
    Device,
    Quiet,
    TextField,
    command_line,
    feedback,
    parse_share,
)
from ropepatch.cli.listing import print_text
from ropepatch.files import json_text

EXAMPLES = """\b
Examples:
  ropepatch transfer ./llama-32k ./llama ./llama-instruct --text books/
  ropepatch transfer ./llama-32k-adapter ./llama ./llama-chat --text books/ --out ./llama-chat-32k"""


def transfer(
    adapted: Annotated[
        Path, typer.Argument(metavar="ADAPTED", help="A checkpoint or an adapter that a recipe made.")
    ],
    base: Annotated[str, typer.Argument(metavar="BASE", help="What it was made from.")],
    instruct: Annotated[
        str, typer.Argument(metavar="INSTRUCT", help="A model that was fine-tuned from the same base.")
    ],
    text: Annotated[
        str,
        typer.Option("--text", help="Held-out text, as `eval` takes it, on which both losses are measured."),
    ],
    field: TextField = "text",
    split: Annotated[str, typer.Option(help=f"{SPLIT}.")] = "test",
    out: Annotated[
        Path | None, typer.Option(help="The folder to make; INSTRUCT-METHOD-TO here if not given.")
    ] = None,
    max_short_loss_increase: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Exit 1 if the loss within the old context rose by more, e.g. 2%.",
        ),
    ] = None,
    device: Device = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Give a fine-tuned model the longer context that its base was trained to: INSTRUCT + (ADAPTED - BASE).

    Nothing is trained. The loss within the old context and at the target is measured before and after.
    """
    from ropepatch.extension import record as records
    from ropepatch.training.transfer import transfer as put_onto

    share = None if max_short_loss_increase is None else parse_share(max_short_loss_increase)
    done = put_onto(
        adapted,
        base,
        instruct,
        out,
        text=text,
        field=field,
        split=split,
        max_short_loss_increase=share,
        device=device,
        record={"command": command_line()},
        say=feedback(quiet)["say"],
    )
    if as_json:
        print(json_text(records.read(done.folder).to_dict()))
    else:
        print_text(f"{done.folder}\n{done}")
    if share is not None and not done.gate.passed:
        raise typer.Exit(1)
