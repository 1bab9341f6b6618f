"""What the commands that measure have in common: their options, and the run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ropepatch.cli.results_text import print_results
from ropepatch.cli.running import device, progress
from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from ropepatch.evaluation.results import Result
    from ropepatch.suites import Suite

TextSource = Annotated[
    str | None,
    typer.Option(
        "--text",
        help="A text or JSONL file, a folder of them, a `datasets` id, or a set saved by `datasets`. "
        "tiny has tales of its own.",
    ),
]
TextField = Annotated[str, typer.Option("--field", help="The column or key of a document's text.")]
TextSplit = Annotated[str, typer.Option("--split", help="Of a `datasets` id or a saved set.")]
OutFolder = Annotated[
    Path | None,
    typer.Option("--out", help="A folder for the results; what it holds already is not measured again."),
]
Report = Annotated[Path | None, typer.Option("--report", help="Write an HTML file with tables and figures.")]


def measure_and_print(
    suite: Suite, *, out: Path | None, report: Path | None, revision: str | None, as_json: bool
) -> None:
    """Measure a suite, print its tables or JSON, and write the report."""
    from ropepatch.evaluation.ranks import is_first_process

    results = measured(suite, out=out, report=report, revision=revision)
    if not is_first_process():
        return
    if as_json:
        print(
            json.dumps([asdict(result) for result in results], indent=2, ensure_ascii=False, allow_nan=False)
        )
    else:
        print_results(results)
    write_report_of(results, report)


def measured(suite: Suite, *, out: Path | None, report: Path | None, revision: str | None) -> list[Result]:
    """The results of a suite; a report that cannot be written is refused before."""
    from ropepatch.evaluation.ranks import is_first_process
    from ropepatch.measuring import measure

    if report is not None and report.exists():
        raise RopepatchError(
            f"{report} already exists", hint="choose another --report; nothing is overwritten"
        )
    if report is not None and not report.absolute().parent.is_dir():
        raise RopepatchError(f"no folder {report.parent} for the report", hint="make it first")
    if out is not None and out.exists() and not out.is_dir():
        raise RopepatchError(f"{out} is a file", hint="--out is a folder")
    results = []
    for result in measure(suite, out=out, revision=revision, device=device(), progress=progress):
        results.append(result)
        if is_first_process() and result.seconds is not None:
            print(f"{result.task}, {result.label}, {result.target} tokens", file=sys.stderr, flush=True)
    return results


def write_report_of(results: Sequence[Result], file: Path | None) -> None:
    """The HTML report, if one is wanted."""
    if file is not None:
        from ropepatch.report import write_report

        print(f"report: {write_report(results, file)}", file=sys.stderr)
