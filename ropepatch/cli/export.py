"""`ropepatch export`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ropepatch.cli.arguments import AsJson, Model, Revision
from ropepatch.errors import RopepatchError
from ropepatch.pipeline.running import WEIGHTS, bar

if TYPE_CHECKING:
    from ropepatch.publishing.gguf import GgufFile

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
        from ropepatch.extension import record as records

        folder = _fold(model, out or Path(f"{name}-folded"), revision)
        record = records.read(folder)
        if as_json:
            print(json.dumps(record.to_dict(), indent=2, ensure_ascii=False))
        else:
            assert record.verified is not None
            print(f"{folder}: attention factor {record.folded_attention_factor:.4f} -> 1")
            print(f"reloaded with stock transformers: logits {record.verified.logits}")
        return
    written = _write_gguf(model, out or Path(f"{name}.gguf"), revision)
    for note in written.notes:
        print(f"warning: {note}", file=sys.stderr)
    if as_json:
        print(json.dumps(asdict(written) | {"file": str(written.file)}, indent=2, ensure_ascii=False))
    else:
        _print_outcome(written)


def _fold(model: str, out: Path, revision: str | None) -> Path:
    from ropepatch.publishing.folding import fold_attention

    with bar(WEIGHTS) as progress:
        return fold_attention(model, out, revision=revision, progress=progress)


def _write_gguf(model: str, out: Path, revision: str | None) -> GgufFile:
    from ropepatch.publishing.gguf import export_gguf

    with bar(WEIGHTS) as progress:
        return export_gguf(model, out, revision=revision, progress=progress)


def _print_outcome(written: GgufFile) -> None:
    rope = (
        f"frequencies in rope_freqs, attention factor {written.attention_factor:.4f}"
        if written.scaled
        else "plain rope"
    )
    print(f"{written.file}: {written.num_bytes / 1e6:.1f} MB, {written.context_length} tokens, {rope}")
    print(f"tokenizer: {written.tokenizer}")
