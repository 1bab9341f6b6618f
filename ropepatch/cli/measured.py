"""What the commands that measure have in common: their options, and the run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ropepatch.cli.running import device, progress
from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from ropepatch.evaluation.results import Result
    from ropepatch.evaluation.suites import Suite
    from ropepatch.extension.planning import Plan

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


def named_suite(name: str, *, model: str | None = None, text: str | None, field: str, split: str) -> Suite:
    """A suite, with the model and the text of the command line, if given, in place of its own.

    Raises:
        RopepatchError: No such suite, or a field or a split of no text.
    """
    from ropepatch.evaluation.suites import read_suite
    from ropepatch.evaluation.tasks import LmEvalTask, PerplexityTask, Task

    if text is None and (field, split) != ("text", "test"):
        raise RopepatchError(
            "--field and --split are of --text, which is missing", hint="a suite says them of its own text"
        )

    def with_text(planned: Task) -> Task:
        if text and isinstance(planned, PerplexityTask):
            return replace(planned, text=text, field=field, split=split)
        if text and isinstance(planned, LmEvalTask):
            return replace(planned, metadata=planned.metadata | {"text": text})
        return planned

    suite = read_suite(name)
    models = (model,) if model else suite.models
    return replace(suite, tasks=tuple(map(with_text, suite.tasks)), models=models)


def measure_and_print(
    suite: Suite, *, out: Path | None, report: Path | None, revision: str | None, as_json: bool
) -> None:
    """Measure a suite, print its tables or JSON, and write the report."""
    from ropepatch.evaluation.processes import is_first_process
    from ropepatch.report.terminal import print_results

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
    from ropepatch.evaluation.measuring import measure

    check_places(out, report)
    return _announced(measure(suite, out=out, revision=revision, device=device(), progress=progress))


def measure_extension_and_print(
    suite: Suite,
    plan: Plan,
    adapted: Path | None,
    *,
    label: str = "adapted",
    out: Path | None,
    report: Path | None,
    as_json: bool = False,
) -> list[Result]:
    """Measure an extension before and after, print its tables unless JSON is wanted, and write the report.

    Args:
        suite: Its tasks; see `named_suite`.
        plan: What the rope was scaled by.
        adapted: The folder of the weights that were trained under it; None where there are none.
        label: What these are called.
        out: A folder for the results; what it holds already is not measured again.
        report: An HTML file to write.
        as_json: Print nothing: the command prints what is returned.
    """
    from ropepatch.evaluation.measuring import measure_extension
    from ropepatch.evaluation.processes import is_first_process
    from ropepatch.report.terminal import print_results

    check_places(out, report)
    results = _announced(
        measure_extension(suite, plan, adapted, label=label, out=out, device=device(), progress=progress)
    )
    if is_first_process():
        if not as_json:
            print_results(results)
        write_report_of(results, report)
    return results


def check_places(out: Path | None, report: Path | None) -> None:
    """Refuse a folder for results that is none, and a report that cannot be written."""
    if report is not None and report.exists():
        raise RopepatchError(
            f"{report} already exists", hint="choose another --report; nothing is overwritten"
        )
    if report is not None and not report.absolute().parent.is_dir():
        raise RopepatchError(f"no folder {report.parent} for the report", hint="make it first")
    if out is not None and out.exists() and not out.is_dir():
        raise RopepatchError(f"{out} is a file", hint="--out is a folder")


def _announced(measuring: Iterator[Result]) -> list[Result]:
    """All results, each announced on stderr as it comes."""
    from ropepatch.evaluation.processes import is_first_process

    results = []
    for result in measuring:
        results.append(result)
        if is_first_process() and result.seconds is not None:
            print(f"{result.task}, {result.label}, {result.target} tokens", file=sys.stderr, flush=True)
    return results


def write_report_of(results: Sequence[Result], file: Path | None) -> None:
    """The HTML report, if one is wanted."""
    if file is not None:
        from ropepatch.report import write_report

        print(f"report: {write_report(results, file)}", file=sys.stderr)
