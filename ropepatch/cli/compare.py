"""`ropepatch compare`."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropepatch.cli.arguments import AsJson, Model, Revision
from ropepatch.cli.measured import (
    OutFolder,
    Report,
    TextField,
    TextSource,
    TextSplit,
    measured,
    write_report_of,
)
from ropepatch.lengths import parse_length

if TYPE_CHECKING:
    from ropepatch.evaluation.ranking import Ranking

EXAMPLES = """\b
Examples:
  ropepatch compare tiny --to 1k
  ropepatch compare ./llama-2-7b --methods yarn,ntk,linear --to 8k --text books/
  ropepatch compare ./llama-2-7b --to 32k --text books/ --out results --report report.html"""


def compare(
    model: Model,
    to: Annotated[str, typer.Option(help="The target context, e.g. 8k.")],
    methods: Annotated[
        str, typer.Option(help="Separated by commas; see `ropepatch methods`.")
    ] = "linear,ntk,ntk-by-parts,llama3,yarn",
    text: TextSource = None,
    field: TextField = "text",
    split: TextSplit = "test",
    windows: Annotated[int, typer.Option(min=1, help="Read at most so many windows of the text.")] = 24,
    trials: Annotated[int, typer.Option(min=0, help="Pass keys per length and depth; 0 for none.")] = 4,
    out: OutFolder = None,
    report: Report = None,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Rank scalings on a model, training-free: the loss over the whole target and the pass keys found there.

    The ranking is by loss, with 95 % intervals; methods that the text does not tell apart are called tied.
    The last lines are the recommendation, which may be not to extend at all.
    """
    from ropepatch.evaluation.comparisons import FLOOR
    from ropepatch.evaluation.ranking import rank
    from ropepatch.evaluation.ranks import is_first_process
    from ropepatch.measuring import AS_IT_IS
    from ropepatch.suites import Method, PasskeyTask, PerplexityTask, Suite, Task, check_text

    check_text(text, model)
    names = tuple(Method(name=name.strip()) for name in methods.split(","))
    tasks: list[Task] = [PerplexityTask(text=text, field=field, split=split, windows=windows)]
    target = parse_length(to)
    if trials and (lengths := _askable_lengths(model, revision, target)):
        tasks.append(PasskeyTask(lengths=lengths, trials=trials))
    suite = Suite(models=(model,), methods=names, to=(target,), tasks=tuple(tasks))
    results = measured(suite, out=out, report=report, revision=revision)
    if not is_first_process():
        return
    ranking = rank(results, base=AS_IT_IS, ignored=[FLOOR])
    if as_json:
        record = {"ranking": _finite(asdict(ranking)), "results": [asdict(result) for result in results]}
        print(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        first = next(result for result in results if result.task == "perplexity")
        floor = [r.tables["by_length"][-1]["nats"] for r in results if r.label == FLOOR]
        _print_ranking(ranking, first.target, first.model["trained"], floor)
        print("\n".join(["", *ranking.advice, *_command(model, revision, to, ranking.recommended)]))
    write_report_of(results, report)


def _askable_lengths(model: str, revision: str | None, to: int) -> tuple[int, ...]:
    """The lengths at which the tokenizer can write a pass key prompt; says so if there is none."""
    from ropepatch.evaluation.templates import PasskeyTemplate
    from ropepatch.loading import load_tokenizer
    from ropepatch.source import find_source
    from ropepatch.suites import PasskeyTask
    from ropepatch.survey import survey_folder
    from ropepatch.tasks import askable, doublings

    folder = find_source(model, revision, weights=True).folder
    lengths = doublings(survey_folder(folder).rope.original_max_position_embeddings, to)
    written, reason = askable(PasskeyTask(), PasskeyTemplate(), load_tokenizer(folder), lengths)
    if not written:
        print(f"warning: no pass keys are asked for: {reason}", file=sys.stderr)
    return tuple(written)


def _command(model: str, revision: str | None, to: str, method: str | None) -> list[str]:
    """The line that makes the recommended checkpoint, where a checkpoint can hold the method."""
    from ropepatch.planning import plan

    if method is None or not plan(model, to=parse_length(to), method=method, revision=revision).exportable:
        return []
    words = ["ropepatch", "extend", model, "--to", to, "--method", method]
    return [f"  {shlex.join([*words, *(['--revision', revision] if revision else [])])}"]


def _finite(value: Any) -> Any:
    """The same with None for what JSON cannot say: the interval of a single text is infinite."""
    from ropepatch.evaluation.results import finite

    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return finite(value) if isinstance(value, float) else value


def _print_ranking(ranking: Ranking, to: int, trained: int, floor: list[float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    heads = ("", f"nats to {to}", "95 %", "behind", "95 %", f"nats to {trained}", f"keys at {to}")
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    for row in ranking.rows:
        behind = "" if row is ranking.rows[0] else f"{row.behind:.3f}"
        doubt = (
            "" if row is ranking.rows[0] else ("tied " if row.tied else "") + _interval(row.behind_interval)
        )
        keys = "" if row.keys is None else f"{row.keys[0]}/{row.keys[1]}"
        table.add_row(
            row.label, f"{row.nats:.3f}", _interval(row.interval), behind, doubt, f"{row.inside:.3f}", keys
        )
    for value in floor:
        table.add_row("floor", f"{value:.3f}")
    Console(highlight=False, markup=False, emoji=False, width=120).print(table)


def _interval(interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{low:.3f} to {high:.3f}"
