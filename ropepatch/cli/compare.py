"""`ropepatch compare`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from ropepatch.cli.arguments import AUTO, AsJson, Model, Revision
from ropepatch.cli.auto import announced, print_left_out
from ropepatch.cli.measured import (
    OutFolder,
    Report,
    TextField,
    TextSource,
    TextSplit,
    check_places,
    measured,
    write_report_of,
)
from ropepatch.cli.running import device
from ropepatch.settings import parse_length

if TYPE_CHECKING:
    from ropepatch.evaluation.suites import Method

ALL = "all"

EXAMPLES = """\b
Examples:
  ropepatch compare tiny --to 1k
  ropepatch compare ./llama-2-7b --methods yarn,ntk,linear --to 8k --text books/
  ropepatch compare ./llama-2-7b --methods all,fit --to 8k --text books/ --out results
  ropepatch compare ./llama-2-7b --to 32k --text books/ --out results --report report.html"""


def compare(
    model: Model,
    to: Annotated[str, typer.Option(help="The target context, e.g. 8k.")],
    methods: Annotated[
        str,
        typer.Option(
            help="Separated by commas: names (see `ropepatch methods`), files that `fit` wrote, `all` for "
            "every static method that needs no parameters, `fit` for divisors fitted to the model.",
        ),
    ] = "linear,ntk,ntk-by-parts,llama3,yarn",
    text: TextSource = None,
    field: TextField = "text",
    split: TextSplit = "test",
    windows: Annotated[int, typer.Option(min=1, help="Read at most so many windows of the text.")] = 24,
    trials: Annotated[int, typer.Option(min=0, help="Passkeys per length and depth; 0 for none.")] = 4,
    out: OutFolder = None,
    report: Report = None,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Rank scalings on a model, training-free: the loss over the target, short-range loss and passkeys.

    The ranking is by loss, with 95 % intervals; methods that the text does not tell apart are called tied.
    The last lines are the recommendation, which may be not to extend at all. A fit learns from that part of
    the text which is not read for the ranking.
    """
    from ropepatch.evaluation.comparisons import FLOOR
    from ropepatch.evaluation.measuring import AS_IT_IS
    from ropepatch.evaluation.processes import is_first_process
    from ropepatch.evaluation.ranking import RULE, rank
    from ropepatch.evaluation.tasks import check_text
    from ropepatch.fitting.choosing import FIT, fit_beside, ranking_suite
    from ropepatch.report.terminal import print_ranking

    check_text(text, model)
    check_places(out, report)
    target = parse_length(to)
    names = dict.fromkeys(name.strip() for name in methods.split(","))
    suite, reason = ranking_suite(
        model,
        _methods(names, model, target, revision),
        to=target,
        text=text,
        field=field,
        split=split,
        windows=windows,
        trials=trials,
        revision=revision,
    )
    if reason is not None:
        print(f"warning: no passkeys are asked for: {reason}", file=sys.stderr)
    with TemporaryDirectory(prefix="ropepatch-") as place:
        if FIT in names:
            folder = Path(place) if out is None else out / FIT
            fitted, _ = fit_beside(suite, folder, revision=revision, device=device(), progress=announced)
            suite = replace(suite, methods=(*suite.methods, fitted))
        results = measured(suite, out=out, report=report, revision=revision)
    if not is_first_process():
        return
    ranking = rank(results, base=AS_IT_IS, ignored=[FLOOR])
    if as_json:
        record = {
            "rule": RULE,
            "ranking": ranking.record(),
            "results": [asdict(result) for result in results],
        }
        print(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print_ranking(ranking, results)
        words = {method.label: [method.name] for method in suite.methods}
        if FIT in names and out is None:  # what it found is gone
            words[FIT] = [AUTO, *(["--text", text, "--field", field, "--split", split] if text else [])]
        if ranking.recommended is not None:
            print(_command(model, revision, to, words[ranking.recommended]), end="")
    write_report_of(results, report)


def _methods(names: Iterable[str], model: str, to: int, revision: str | None) -> list[Method]:
    """Those that need no fit; of `all` what the model allows."""
    from ropepatch.fitting.choosing import FIT, allowed, candidates

    methods = []
    for name in names:
        if name != FIT:
            listed = candidates() if name == ALL else [name]
            found, left_out = allowed(model, listed, to=to, revision=revision)
            print_left_out(left_out)
            methods += found
    return list({method.name: method for method in methods}.values())


def _command(model: str, revision: str | None, to: str, method: list[str]) -> str:
    """The line that makes the recommended checkpoint, where a checkpoint can hold the method."""
    from ropepatch.extension.planning import plan

    name = method[0]
    if name != AUTO and not plan(model, to=parse_length(to), method=name, revision=revision).savable:
        return ""
    words = ["ropepatch", "extend", model, "--to", to, "--method", *method]
    return f"  {shlex.join([*words, *(['--revision', revision] if revision else [])])}\n"
