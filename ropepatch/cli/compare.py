"""`ropepatch compare`."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from ropepatch.cli.arguments import (
    METHODS_OPTION,
    AsJson,
    Device,
    DType,
    Model,
    Original,
    Out,
    Quiet,
    Report,
    Revision,
    Seed,
    TextField,
    TextSource,
    TextSplit,
    a_length,
    command_line,
    complete,
    feedback,
    some_methods,
    split_names,
)
from ropepatch.pipeline.running import is_first

EXAMPLES = """\b
Examples:
  ropepatch compare tiny --to 1k
  ropepatch compare ./llama-2-7b --methods yarn,ntk,linear --to 8k --text books/
  ropepatch compare ./llama-2-7b --methods yarn,maps --to 8k --text books/
  ropepatch compare ./llama-2-7b --methods all,fit --to 8k --text books/ --out results
  ropepatch compare ./llama-2-7b --to 32k --text books/ --out results --report report.html"""


def compare(
    model: Model,
    to: Annotated[str, typer.Option(help="The target context, e.g. 8k.", callback=a_length)],
    methods: Annotated[
        list[str] | None,
        typer.Option(
            *METHODS_OPTION,
            help="Repeated or separated by commas: names (see `ropepatch methods`), files that `fit` wrote, "
            "`all` for every static scaling that needs no parameters, `maps` for every attention map, "
            "`fit` for one fitted to the model; linear,ntk,ntk-by-parts,llama3,yarn if not given.",
            callback=some_methods,
            autocompletion=complete("methods"),
        ),
    ] = None,
    original: Original = None,
    text: TextSource = None,
    field: TextField = "text",
    split: TextSplit = "test",
    windows: Annotated[int, typer.Option(min=1, help="Read at most so many windows of the text.")] = 24,
    haystacks: Annotated[
        int | None,
        typer.Option(min=0, help="Long texts to find keys in; 0 for none [default: 10, or 20 for tiny]."),
    ] = None,
    keys: Annotated[
        int | None,
        typer.Option(min=1, help="Questions of each kind, haystack and length [default: 8, or 1 for tiny]."),
    ] = None,
    out: Out = None,
    report: Report = None,
    revision: Revision = None,
    device: Device = None,
    dtype: DType = None,
    seed: Seed = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Rank methods on a model, training-free: retrieval at the target, loss over it, short-context loss.

    The ranking is by the log-probability of the answers, if the model finds any within its trained context,
    then by loss. The last lines are the recommendation, which may be not to extend at all: a method must be
    significantly better than the baseline by one of both, and not significantly worse by the other (paired
    t-tests; 5 % over all methods, by Holm). --json holds the whole rule. A fit learns from that part of the
    text which is not read for the ranking.
    """
    from ropepatch.pipeline.choice import COMPARED
    from ropepatch.pipeline.choice import compare as compare_methods
    from ropepatch.report import print_ranking
    from ropepatch.scaling.file import FIT

    choice = compare_methods(
        model,
        to=to,
        original=original,
        methods=split_names(methods) or COMPARED,
        text=text,
        field=field,
        split=split,
        windows=windows,
        haystacks=haystacks,
        keys=keys,
        out=out,
        report=report,
        revision=revision,
        device=device,
        dtype=dtype,
        seed=seed,
        command=command_line(),
        **feedback(quiet),
    )
    if not is_first():
        return
    if as_json:
        print(choice.to_json())
        return
    again: list[str] = []
    if choice.ranking.recommended == FIT and choice.fitted:
        reading = ["--text", text, "--field", field, "--split", split] if text else []
        again = [FIT, *reading] if out is None else [str(out / FIT / f"{FIT}.json")]
    elif choice.method is not None:
        again = [choice.method]
    command = _command(model, revision, to, original, again) if again else ""
    print_ranking(choice.ranking, choice.results, command=command)


def _command(model: str, revision: str | None, to: str, original: str | None, method: list[str]) -> str:
    """The line that makes the recommended checkpoint."""
    words = ["ropepatch", "extend", model, "--to", to, "--method", *method]
    for option, value in (("--original", original), ("--revision", revision)):
        words += [option, value] if value else []
    return shlex.join(words)
