"""Results with a table, a pandas frame, figures and a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Protocol

from ropepatch.columns import data_frame
from ropepatch.errors import RopepatchError, argument
from ropepatch.evaluation.comparisons import few, first_figure
from ropepatch.evaluation.measuring import Machine
from ropepatch.evaluation.results import Result, read_result, results_json
from ropepatch.extension.planning import Plan
from ropepatch.progress import interruptible
from ropepatch.report.tables import results_text
from ropepatch.settings import refuse_unknown, short_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


class Results(tuple[Result, ...]):
    """Results that were measured together, in order."""

    __slots__ = ()

    def to_json(self) -> str:
        """The results as a JSON list."""
        return results_json([asdict(result) for result in self])

    def to_pandas(self, measure: str | None = None) -> DataFrame:
        """A pandas frame: a row for every number, with its model, target, task and label.

        Args:
            measure: A name such as `loss`, `found` or `log_prob`; None for all.

        Raises:
            RopepatchError: If pandas is not installed.
        """
        rows = []
        for result in self:
            for row in result.rows:
                if measure in (None, row.measure):
                    columns: dict[str, Any] = {
                        "model": result.model["name"],
                        "target": result.target,
                        "task": result.task,
                        "label": result.label,
                        **asdict(row),
                        "clusters": len(row.clusters),
                    }
                    rows.append(columns | columns.pop("at"))
        return data_frame(rows)

    def plot(self, name: str | None = None) -> Figure:
        """A figure of the results.

        Args:
            name: A name such as `perplexity`, `positions` or `retrieval`; None for the first available.

        Raises:
            RopepatchError: If there are no results, no figure of that name, or no matplotlib.
        """
        from ropepatch.report.plots.lines import figures

        drawn = figures(self)
        if not drawn:
            raise RopepatchError(
                "no results to draw", hint="measure first, with evaluate=SUITE"
            )
        chosen = name or next(iter(drawn))
        refuse_unknown([chosen], drawn, "figure")
        return drawn[chosen]

    def __repr__(self) -> str:
        return results_text(self)


class Measured(Protocol):
    """`Results`, or the `Choice` of `compare`."""

    def plot(self, name: str | None = None) -> Figure:
        """Draw the measurements."""


def plot(what: Plan | Measured | str | Path, name: str | None = None) -> Figure:
    """Draw a plan, measurements, or the results in a folder or a file; see `read_results`.

    Args:
        what: A `Plan`, a `Choice`, `Results`, or a folder or file of results.
        name: The name of the figure, as in `Results.plot`; a plan has only one.

    Raises:
        RopepatchError: If there is nothing to draw, no figure of that name, or no matplotlib.
    """
    if isinstance(what, Plan):
        from ropepatch.report.plots.changes import plot_plan

        return plot_plan(what)
    return (read_results(what) if isinstance(what, str | Path) else what).plot(name)


def read_results(place: str | Path) -> Results:
    """Read the results of `evaluate` or `compare` from a folder or a file.

    Args:
        place: A folder in which every JSON file is a result; a checkpoint with an `evaluation` folder; or one
            result file.

    Raises:
        RopepatchError: If there is no such place, it contains no results, or a file is not a result.
    """
    folder = Path(place)
    folder = folder / "evaluation" if (folder / "evaluation").is_dir() else folder
    files = sorted(folder.glob("*.json")) if folder.is_dir() else [folder]
    if not files:
        raise RopepatchError(f"no results in {place}", hint="pass a folder of results")
    return Results(map(read_result, files))


def reported(
    results: Iterator[Result],
    folder: Path | None,
    page: Path | None,
    machine: Machine,
    command: str | None,
) -> Results:
    """All results, each announced when finished, and their report."""
    measured: list[Result] = []
    with interruptible(machine.say, lambda: _kept(folder)):
        for result in results:
            if not any(other.task == result.task for other in measured):
                for warning in few(result):
                    machine.say(f"warning: {warning}")
            measured.append(result)
            if result.seconds is not None:
                target = f" to {short_length(result.target)}" if result.scaling else ""
                outcome = first_figure(result)
                machine.say(f"{result.task}, {result.label}{target}{outcome}")
        if page is not None:
            report = partial(_report, measured, page, folder, command)
            machine.say(f"report: {machine.processes.write_once(report)}")
    return Results(measured)


def _kept(folder: Path | None) -> str:
    """What an interrupted measurement leaves."""
    if folder is None:
        return (
            f"nothing is kept; with {argument('out', 'DIR')} the same command resumes"
        )
    return f"finished results are kept in {folder}; the same command resumes"


def _report(
    results: Sequence[Result], file: Path, folder: Path | None, command: str | None
) -> Path:
    """Write the report; if that fails, results in no folder are kept in a new one."""
    from ropepatch.report.page import write_report

    try:
        return write_report(results, file, command=command)
    except (OSError, RopepatchError) as error:
        if folder is None:
            folder = Path(mkdtemp(prefix="ropepatch-results-"))
            for number, result in enumerate(results):
                result.write(folder / f"{number:03}.json")
        raise RopepatchError(
            f"cannot write the report: {error}",
            hint=f"the results are in {folder}",
        ) from error
