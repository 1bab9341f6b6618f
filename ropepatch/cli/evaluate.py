"""`ropepatch eval`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ropepatch.cli.arguments import (
    METHODS_OPTION,
    AsJson,
    Device,
    DType,
    Limit,
    Original,
    Out,
    Quiet,
    Report,
    Revision,
    Seed,
    Settings,
    TextField,
    TextSource,
    TextSplit,
    a_length,
    a_suite,
    command_line,
    complete,
    feedback,
    parse_settings,
    some_lengths,
    some_methods,
    split_names,
)
from ropepatch.errors import RopepatchError
from ropepatch.pipeline.running import is_first

EXAMPLES = """\b
Examples:
  ropepatch eval tiny --method yarn --to 1k
  ropepatch eval tiny --suite demo --out demo-results --report demo.html
  ropepatch eval ./llama-2-7b --text books/ --lengths 2k,4k,8k
  ropepatch eval ./llama-2-7b --text books/ --method linear --method yarn --to 32k
  ropepatch eval ./llama-2-7b --text books/ --lengths 2k,4k --stride 256"""


def evaluate(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A checkpoint folder, a Hub id, or tiny.")
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="Run a suite: its name, or a YAML file. See `ropepatch suites`.",
            callback=a_suite,
            autocompletion=complete("suites"),
        ),
    ] = None,
    text: TextSource = None,
    field: TextField = "text",
    split: TextSplit = "test",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens to read, e.g. 256,1k,4x; L/2, L, 2L ... --to if not given.", callback=some_lengths
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            *METHODS_OPTION,
            help="Also measure the model scaled so, in memory; repeated or separated by commas; all, maps. "
            "With --to alone, yarn.",
            callback=some_methods,
            autocompletion=complete("methods"),
        ),
    ] = None,
    to: Annotated[
        str | None, typer.Option(help="The target context of --method, e.g. 32k.", callback=a_length)
    ] = None,
    original: Original = None,
    settings: Settings = None,
    windows: Annotated[
        int | None,
        typer.Option(min=1, help="Join the documents and read at most so many windows [default: 24]."),
    ] = None,
    documents: Annotated[
        int | None,
        typer.Option(min=1, help="Do not join: read so many, the first that have the greatest length."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Slide windows of each length, so many tokens at a time; one pass without."),
    ] = None,
    bos: Annotated[
        bool, typer.Option("--bos/--no-bos", help="A beginning-of-sequence token before each document.")
    ] = True,
    gain: Annotated[
        bool,
        typer.Option("--gain", help="Also measure what tokens beyond the trained context bring."),
    ] = False,
    scorer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="With --gain: a checkpoint that chooses the key tokens of LongPPL.",
        ),
    ] = None,
    out: Out = None,
    report: Report = None,
    revision: Revision = None,
    device: Device = None,
    dtype: DType = None,
    limit: Limit = None,
    seed: Seed = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure a model unscaled and scaled: perplexity by length in one pass, or a whole suite.

    Without a suite, the documents of --text are joined, each after a beginning-of-sequence token, and cut
    into windows of the largest length; every window is read once, and its first N tokens give the perplexity
    at length N. (The tales of tiny are read one by one.)
    """
    from ropepatch.pipeline.evaluation import evaluate as measure
    from ropepatch.report import print_results

    task: dict[str, Any] = {
        "lengths": lengths,
        "windows": windows,
        "documents": documents,
        "stride": stride,
        "bos": None if bos else False,
        "gain": gain or None,
        "scorer": scorer,
    }
    results = measure(
        model,
        suite,
        methods=_methods(split_names(method), settings),
        to=to,
        original=original,
        text=text,
        field=field,
        split=split,
        out=out,
        report=report,
        revision=revision,
        device=device,
        dtype=dtype,
        limit=limit,
        seed=seed,
        command=command_line(),
        **feedback(quiet),
        **{key: value for key, value in task.items() if value is not None},
    )
    if is_first() and as_json:
        print(results.to_json())
    elif is_first():
        print_results(results)


def _methods(names: list[str], settings: list[str] | None) -> list[str | dict[str, Any]]:
    if not settings:
        return [*names]
    if len(names) > 1:
        raise RopepatchError(
            "--set needs exactly one --method", hint="measure the methods one after the other"
        )
    name = names[0] if names else "yarn"
    return [{"name": name} | parse_settings(name, settings)]
