"""`ropepatch eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropepatch.cli.arguments import (
    AsJson,
    Model,
    Revision,
    Settings,
    parse_length,
    parse_lengths,
    parse_settings,
    print_warnings,
)
from ropepatch.cli.running import device, progress
from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ropepatch.evaluation.curves import LossCurve

UNPATCHED = "as it is"

EXAMPLES = """\b
Examples:
  ropepatch eval ./llama-2-7b --text books/ --lengths 2k,4k,8k
  ropepatch eval tiny --method yarn --to 1k
  ropepatch eval ./llama-2-7b --text books/ --method linear --method yarn --to 32k"""


def evaluate(
    model: Model,
    text: Annotated[
        Path | None,
        typer.Option(help="A text file, or a folder of *.txt files. tiny has tales of its own."),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens to read, e.g. 256,1k,4k; L/2, L, 2L ... --to if not given.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Also measure the model scaled so, in memory; repeatable.")
    ] = None,
    to: Annotated[str | None, typer.Option(help="The target context of --method, e.g. 32k.")] = None,
    settings: Settings = None,
    windows: Annotated[
        int, typer.Option(min=1, help="Read at most so many windows, spread over the text.")
    ] = 24,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Measure perplexity by length in one pass, before and after scaling.

    The documents are joined, each after a beginning-of-sequence token, and cut into windows of the largest
    length; every window is read once, and its first N tokens give the perplexity at length N.
    """
    if text is None and model != "tiny":
        raise RopepatchError("--text is missing", hint="--text FILE, or a folder of *.txt files")
    names = method or []
    if names and to is None:
        raise RopepatchError("--method needs a target", hint="--to 32k")
    if to is not None and not names:
        raise RopepatchError("--to is the target of a --method, and none is given", hint="--method yarn")
    if settings and len(names) != 1:
        raise RopepatchError(
            "--set needs exactly one --method", hint="measure the methods one after the other"
        )
    parameters = {name: parse_settings(name, settings) for name in names}
    target = parse_length(to) if to else None
    reach = parse_lengths(lengths) if lengths else []
    if reach and reach[0] < 2:
        raise RopepatchError(
            f"--lengths must be at least 2 tokens, got {reach[0]}", hint="the first is never scored"
        )
    if reach and target and reach[-1] > target:
        raise RopepatchError(f"--lengths go to {reach[-1]}, beyond --to {target}", hint=f"--to {reach[-1]}")

    from ropepatch.evaluation.perplexity import perplexity
    from ropepatch.evaluation.results import environment
    from ropepatch.evaluation.texts import read_documents
    from ropepatch.evaluation.texts import windows as cut
    from ropepatch.loading import load_model, load_tokenizer
    from ropepatch.patching import patch
    from ropepatch.planning import plan
    from ropepatch.source import find_source
    from ropepatch.survey import survey_folder
    from ropepatch.tiny.held_out import held_out_tales

    documents = read_documents(text) if text else []
    source = find_source(model, revision, weights=True)
    window = survey_folder(source.folder).rope.original_max_position_embeddings
    plans = {
        name: plan(source.folder, to=target or 0, method=name, **values)
        for name, values in parameters.items()
    }
    reach = reach or _doublings(window, target)
    tokenizer, corpus = load_tokenizer(source.folder), str(text or "held-out tales")
    pieces: Sequence[Sequence[int] | Tensor] = (
        cut(tokenizer, documents, length=reach[-1], count=windows)
        if text
        else [tale.ids for tale in held_out_tales(tokenizer, length=reach[-1], count=windows)]
    )
    for made in plans.values():
        print_warnings(made)
    loaded: Any = load_model(source.folder)
    loaded.to(device())
    curves: dict[str, LossCurve] = {}
    with progress(UNPATCHED) as advance:
        curves[UNPATCHED] = perplexity(loaded, None, pieces, progress=advance)
    for name, made in plans.items():
        with patch(loaded, made), progress(name) as advance:
            curves[name] = perplexity(loaded, None, pieces, progress=advance)
    if as_json:
        task = {"task": "perplexity", "protocol": "one-pass", "text": corpus, "windows": len(pieces)}
        shape = {"model": model, "revision": source.revision, "trained": window, "length": reach[-1]}
        scalings = {
            name: made.scaling.parameters() | {"factor": made.scaling.factor} for name, made in plans.items()
        }
        results = {name: _numbers(curve, reach, window) for name, curve in curves.items()}
        record = task | shape | {"scalings": scalings, "results": results, "env": environment(loaded)}
        print(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False))
        return
    print(f"{model} on {corpus}: {len(pieces)} windows of {reach[-1]} tokens; trained on {window}")
    _print_table(curves, reach, window)


def _doublings(window: int, target: int | None) -> list[int]:
    end = target or window
    lengths = [window // 2]
    while lengths[-1] < end:
        lengths.append(min(2 * lengths[-1], end))
    return lengths


def _spans(length: int, window: int) -> dict[str, tuple[int, int]]:
    """The stretches of positions whose mean loss is shown."""
    spans = {"all": (0, length), f"0 to {min(window, length)}": (0, min(window, length))}
    if length > window:
        spans |= {
            f"{window} to {length}": (window, length),
            f"{length * 3 // 4} to {length}": (length * 3 // 4, length),
        }
    return spans


def _numbers(curve: LossCurve, lengths: list[int], window: int) -> dict[str, Any]:
    from ropepatch.evaluation.results import finite

    return {
        "perplexity": {str(length): finite(curve.at(length).value) for length in lengths},
        "tokens": {str(length): curve.at(length).num_tokens for length in lengths},
        "nats": {name: curve.between(*span).mean for name, span in _spans(lengths[-1], window).items()},
    }


def _print_table(curves: dict[str, LossCurve], lengths: list[int], window: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in curves:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("perplexity of the first")
    for length in lengths:
        table.add_row(f"  {length} tokens", *(f"{curve.at(length).value:.2f}" for curve in curves.values()))
    table.add_row("nats per token, positions")
    for name, span in _spans(lengths[-1], window).items():
        table.add_row(f"  {name}", *(f"{curve.between(*span).mean:.3f}" for curve in curves.values()))
    width = 32 + 14 * len(curves)  # cells are never cut: a narrow terminal folds lines instead
    Console(highlight=False, markup=False, emoji=False, width=width).print(table)
