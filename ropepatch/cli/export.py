"""`ropepatch export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropepatch.cli.arguments import AsJson, Model, Revision
from ropepatch.cli.listing import print_text
from ropepatch.errors import RopepatchError
from ropepatch.files import json_text
from ropepatch.pipeline.running import WEIGHTS, bar

EXAMPLES = """\b
Examples:
  ropepatch export ./llama-2-7b-yarn-32k --fold-attention
  ropepatch export ./llama-2-7b-yarn-32k --fold-attention --out ./llama-2-7b-32k-folded --json"""


def export(
    model: Model,
    fold_attention: Annotated[
        bool,
        typer.Option(
            "--fold-attention",
            help="A checkpoint with the attention factor in its query weights, for engines that ignore it.",
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="What to make; MODEL-folded here if not given.")] = None,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint, extended or not, for software that does not read it as it is."""
    if not fold_attention:
        raise RopepatchError("say what to write", hint="--fold-attention makes a checkpoint for mlx-lm")
    from ropepatch.extension import record as records
    from ropepatch.publishing.folding import fold_attention as fold

    with bar(WEIGHTS) as progress:
        name = out or Path(f"{Path(model).resolve().name}-folded")
        folder = fold(model, name, revision=revision, progress=progress)
    record = records.read(folder)
    if as_json:
        print(json_text(record.to_dict()))
        return
    assert record.verified is not None
    print_text(f"{folder}: attention factor {record.folded_attention_factor:.4f} -> 1")
    print(f"reloaded with stock transformers: logits {record.verified.logits}")
