"""The page: what is said, drawn and tabled of some results, in one file."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import NamedTuple

import jinja2
from markupsafe import Markup

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import Comparison, by_place, comparisons
from ropepatch.evaluation.results import Result
from ropepatch.evaluation.table import Table
from ropepatch.evaluation.tasks import task_of
from ropepatch.files import absent, whole_file
from ropepatch.report.html import html_table
from ropepatch.report.inline_svg import inline_svg
from ropepatch.report.plots import (
    Picture,
    looks_of,
    pictures_of_distances,
    pictures_of_rescaling,
    pictures_of_results,
    rescalings,
)
from ropepatch.report.tables import summary_table, tables_of
from ropepatch.report.words import origin, outcome, provenance, variants, verdict, warnings
from ropepatch.settings import short_length


class InlineFigure(NamedTuple):
    """A figure as HTML, and what stands below it."""

    svg: str
    caption: str


class ReportPart(NamedTuple):
    """One comparison."""

    title: str
    method: str
    figures: list[InlineFigure]
    tables: list[Table]


class Section(NamedTuple):
    """One model and target."""

    title: str
    verdict: list[tuple[str, str]]
    warnings: list[str]
    outcome: list[str]
    parts: list[ReportPart]
    distances: list[InlineFigure]
    scalings: list[tuple[str, list[InlineFigure]]]  # by label: what each does to the rotary pairs


def write_report(
    results: Sequence[Result], file: str | Path, *, title: str | None = None, command: str | None = None
) -> Path:
    """Write results as one HTML file that needs nothing else: no network, no other file, no font.

    Args:
        results: Of any models and tasks; what cannot be compared stands apart.
        file: Where to; it must not exist.
        title: The title of the page; the models and targets if None.
        command: The command line that measured them, to be shown.

    Returns:
        The file as an absolute path.

    Raises:
        RopepatchError: No results, a file that exists or cannot be written, or no matplotlib.
    """
    path = absent(file)
    if not results:
        raise RopepatchError("no results to report", hint="measure first: ropepatch eval MODEL --report FILE")
    page = _page(results, title, command)
    try:
        with whole_file(path) as partial:
            partial.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise RopepatchError(f"cannot write {path}: {error.strerror}", hint="choose another file") from error
    return path


def _page(results: Sequence[Result], title: str | None, command: str | None) -> str:
    places = by_place(comparisons(results))
    apart = {key: words for groups in places.values() for key, words in variants(groups).items()}
    numbers, look = count(1), looks_of(results)
    sections = [
        Section(
            f"{model} to {short_length(target)}",
            verdict(groups),
            warnings(groups),
            outcome(groups),
            [
                _part(group, apart[id(group)], _drawn(pictures_of_results(group, look), numbers))
                for group in groups
            ],
            _drawn(pictures_of_distances(rescalings(groups, look)), numbers),
            [
                (change.name, _drawn(pictures_of_rescaling(change, colour), numbers))
                for change, colour in rescalings(groups, look)
                if change.distances is None
            ],
        )
        for (model, target), groups in places.items()
    ]
    template = _environment().get_template("template.html")
    return template.render(
        title=title or _title([*places]),
        origin=origin(results),
        command=command,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        sections=sections,
        summary=summary_table([*places.values()], apart),
        provenance=[
            (f"{r.model['name']}, {r.label}, {r.task}, {short_length(r.target)}", provenance(r))
            for r in results
        ],
        version=importlib.metadata.version("ropepatch"),
    )


def _part(group: Comparison, apart: str, figures: list[InlineFigure]) -> ReportPart:
    task = task_of(group.task)
    title = (task.title or group.task) + (f": {apart}" if apart else "")
    return ReportPart(title, task.method(group.parameters), figures, tables_of(group))


def _drawn(pictures: Sequence[Picture], numbers: Iterator[int]) -> list[InlineFigure]:
    """Pictures as parts of the page, every id in them its own."""
    return [InlineFigure(inline_svg(p.figure, f"f{next(numbers)}-", p.caption), p.caption) for p in pictures]


def _title(places: Sequence[tuple[str, int]]) -> str:
    models = dict.fromkeys(model for model, _ in places)
    targets = dict.fromkeys(short_length(target) for _, target in places)
    return f"{', '.join(models)} to {', '.join(targets)} tokens"


def _unbroken(value: object) -> object:
    """Text in which no line begins with a percent sign."""
    return value.replace(" %", "\u00a0%") if type(value) is str else value


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_unbroken,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["tabled"] = lambda table: Markup(html_table(table))
    return environment
