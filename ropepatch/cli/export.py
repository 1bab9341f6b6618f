"""`ropepatch export`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ropepatch.cli.arguments import AsJson, Model, Revision
from ropepatch.cli.listing import print_text
from ropepatch.errors import RopepatchError
from ropepatch.files import json_text
from ropepatch.pipeline.running import WEIGHTS, bar, say_on_stderr

EXAMPLES = """\b
Examples:
  ropepatch export ./llama-2-7b-yarn-32k --gguf
  ropepatch export ./llama-2-7b-yarn-32k --gguf --out ./models/llama-2-7b-32k.gguf
  ropepatch export ./llama-2-7b-yarn-32k --fold-attention --out ./llama-2-7b-32k-folded
  ropepatch export tiny --gguf --json"""


def export(
    model: Model,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="One file for llama.cpp, with the rope's frequencies in it.")
    ] = False,
    fold_attention: Annotated[
        bool,
        typer.Option(
            "--fold-attention",
            help="A checkpoint with the attention factor in its query weights, for engines that ignore it.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="What to make; MODEL.gguf or MODEL-folded here if not given.")
    ] = None,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint, extended or not, for software that does not read it as it is."""
    if gguf == fold_attention:
        raise RopepatchError(
            "say what to write" if not gguf else "--gguf beside --fold-attention, which are two outputs",
            hint="--gguf makes a file for llama.cpp, attention factor and all; --fold-attention a checkpoint",
        )
    name = Path(model).resolve().name
    if fold_attention:
        _fold(model, out or Path(f"{name}-folded"), revision, as_json)
    else:
        _write_gguf(model, out or Path(f"{name}.gguf"), revision, as_json)


def _fold(model: str, out: Path, revision: str | None, as_json: bool) -> None:
    from ropepatch.extension import record as records
    from ropepatch.publishing.folding import fold_attention

    with bar(WEIGHTS) as progress:
        folder = fold_attention(model, out, revision=revision, progress=progress)
    record = records.read(folder)
    if as_json:
        print(json_text(record.to_dict()))
        return
    assert record.verified is not None
    print_text(f"{folder}: attention factor {record.folded_attention_factor:.4f} -> 1")
    print(f"reloaded with stock transformers: logits {record.verified.logits}")


def _write_gguf(model: str, out: Path, revision: str | None, as_json: bool) -> None:
    from ropepatch.publishing.gguf import export_gguf

    with bar(WEIGHTS) as progress:
        written = export_gguf(model, out, revision=revision, progress=progress)
    for note in written.notes:
        say_on_stderr(f"warning: {note}")
    if as_json:
        print(json_text(asdict(written) | {"file": str(written.file)}))
        return
    factor = f"frequencies in rope_freqs, attention factor {written.attention_factor:.4f}"
    rope = factor if written.scaled else "plain rope"
    size = f"{written.num_bytes / 1e6:.1f} MB"
    print_text(f"{written.file}: {size}, {written.context_length} tokens, {rope}")
    print(f"tokenizer: {written.tokenizer}")
