"""What measuring several models has in common: the methods, and a line and a report of the results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from ropepatch.attention import REMAPPINGS
from ropepatch.errors import RopepatchError, argument
from ropepatch.evaluation.comparisons import comparisons, few
from ropepatch.evaluation.results import Result, measure_of, slug
from ropepatch.evaluation.suites import Method, read_method
from ropepatch.extension.planning import Plan, plan_method
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.loading import AUTO
from ropepatch.model.precision import check_device
from ropepatch.processes import Processes, join
from ropepatch.progress import Say, interruptible
from ropepatch.scaling import formulas
from ropepatch.settings import Length, short_length
from ropepatch.verbs.results import Results

ALL = "all"  # all candidates that the model allows
EVERY_REMAPPING = "remappings"  # all position remappings that the model allows


def candidates() -> tuple[str, ...]:
    """The methods that `all` stands for: static ones without required parameters.

    A length-dependent method is measured at a fixed target, where it equals its static counterpart, which is
    among them. With a changing length it would not match the keys in the cache.
    """
    return tuple(name for name in formulas() if name != "none")  # the baseline


def participants(
    source: Checkpoint, methods: Iterable[str | dict[str, Any] | Method], *, to: Length
) -> tuple[list[tuple[Method, Plan]], dict[str, str]]:
    """The methods of a comparison with their plans, and those that `all` and `remappings` leave out."""
    groups = {ALL: candidates(), EVERY_REMAPPING: tuple(REMAPPINGS)}
    found: dict[str, tuple[Method, Plan]] = {}
    errors: dict[str, RopepatchError] = {}
    for entry in methods:
        group = groups.get(entry) if isinstance(entry, str) else None
        for candidate in [entry] if group is None else group:
            try:
                method = (
                    candidate
                    if isinstance(candidate, Method)
                    else read_method(candidate)
                )
                found[method.label] = (
                    method,
                    plan_method(source, method.name, method.parameters, to),
                )
            except RopepatchError as error:
                if group is None:
                    raise
                errors[str(candidate)] = error
    if errors and not found:
        raise next(iter(errors.values()))
    return list(found.values()), {name: str(error) for name, error in errors.items()}


def without(
    entrants: tuple[list[tuple[Method, Plan]], dict[str, str]], say: Say
) -> list[Method]:
    """The methods of `participants`, with a warning for each that is left out."""
    planned, left_out = entrants
    for name, reason in left_out.items():
        say(f"warning: without {name}: {reason}")
    return [method for method, _ in planned]


def sharing(device: str | None) -> Processes:
    """The processes that share a measurement, on devices that exist."""
    processes = join(device)
    if processes.device != AUTO:
        check_device(processes.device)
    return processes


def reported(
    results: Iterator[Result],
    folder: Path | None,
    page: Path | None,
    processes: Processes,
    say: Say,
    command: str | None,
) -> Results:
    """All results, each announced when finished, and their report."""
    measured: list[Result] = []
    with interruptible(say, lambda: _kept(folder)):
        for result in results:
            if not any(other.task == result.task for other in measured):
                for warning in few(result):
                    say(f"warning: {warning}")
            measured.append(result)
            if result.seconds is not None:
                target = (
                    ""
                    if result.scaling is None
                    else f" to {short_length(result.target)}"
                )
                say(f"{result.task}, {result.label}{target}{_first_figure(result)}")
        if page is not None:
            written = processes.write_once(lambda: _report(measured, page, command))
            say(f"report: {written}")
    return Results(measured)


def _kept(folder: Path | None) -> str:
    """What an interrupted measurement leaves."""
    if folder is None:
        return (
            f"nothing is kept; with {argument('out', 'DIR')} the same command resumes"
        )
    return f"finished results are kept in {folder}; the same command resumes"


def _report(results: Sequence[Result], file: Path, command: str | None) -> Path:
    from ropepatch.report import write_report

    try:
        return write_report(results, file, command=command)
    except (OSError, RopepatchError) as error:
        hint = f"the results are in {_saved(results)}"
        raise RopepatchError(f"cannot write the report: {error}", hint=hint) from error


def _first_figure(result: Result) -> str:
    """The first measure at its greatest length, with its interval, of every kind of question."""
    (group,) = comparisons([result])
    named = (
        (series.kind, group.last(result.label, series))
        for series in group.main
        if group.results
    )
    lasts = [(kind, row) for kind, row in named if row is not None]
    if not lasts:
        return ""
    values = (
        " ".join(filter(None, [kind, row.text, row.interval and f"({row.interval})"]))
        for kind, row in lasts
    )
    first = lasts[0][1]
    return f" at {first.length:,} tokens: {measure_of(first.measure).title.lower()} {', '.join(values)}"


def _saved(results: Sequence[Result]) -> Path:
    """A new temporary folder with the results."""
    folder = Path(mkdtemp(prefix="ropepatch-results-"))
    for number, result in enumerate(results):
        result.write(folder / f"{number:03}-{result.task}-{slug(result.label)}.json")
    return folder
