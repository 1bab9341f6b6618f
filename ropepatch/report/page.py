"""The report: verdict, figures and tables of results in one HTML file."""

from __future__ import annotations

import base64
import importlib.metadata
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import by_place, comparisons
from ropepatch.evaluation.results import Result, results_json
from ropepatch.evaluation.tasks import task_of
from ropepatch.extension.record import shown_command
from ropepatch.files import absent, whole_file
from ropepatch.report.plots.lines import looks_of, pictures_of_results
from ropepatch.report.plots.style import drawn
from ropepatch.report.printers import html_table
from ropepatch.report.tables import tables_of
from ropepatch.report.verdict import (
    measured,
    origin,
    variant,
    verdict_lines,
)
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_report(
    results: Sequence[Result], file: str | Path, *, command: str | None = None
) -> Path:
    """Write results as one self-contained HTML file, without network, other files or fonts."""
    path = absent(file)
    if not results:
        raise RopepatchError(
            "no results to report", hint="measure first, with `ropepatch eval`"
        )
    page = _page(results, command)
    try:
        with whole_file(path, new=True) as partial:
            partial.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise RopepatchError(
            f"cannot write {path}: {error.strerror}", hint="choose another file"
        ) from error
    return path


def _page(results: Sequence[Result], command: str | None) -> str:
    places, look = by_place(comparisons(results)), looks_of(results)
    models, targets = (dict.fromkeys(parts) for parts in zip(*places, strict=True))
    template = _environment().get_template("template.html")
    return template.render(
        title=f"{', '.join(models)} to {', '.join(map(short_length, targets))} tokens",
        origin=origin(results),
        command=command and shown_command(command),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        places=[
            (f"{model} to {short_length(target)}", groups, verdict_lines(groups))
            for (model, target), groups in places.items()
        ],
        provenance=[
            (
                f"{r.model['name']}, {r.label}, {r.task}, {short_length(r.target)}",
                _source(r),
            )
            for r in results
        ],
        version=importlib.metadata.version("ropepatch"),
        measured=measured,
        task_of=task_of,
        variant=variant,
        tables_of=tables_of,
        pictures_of=lambda group: pictures_of_results(group, look),
        image=inline_image,
    )


def _source(result: Result) -> str:
    """All that its file contains, without the rows."""
    content = asdict(result)
    content["rows"] = len(result.rows)
    return results_json(content)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["tabled"] = lambda table: Markup(html_table(table))
    return environment


def inline_image(figure: Figure) -> str:
    """A figure as the address of an image, which a page contains without another file."""
    with warnings.catch_warnings():
        # A letter that matplotlib's font lacks
        warnings.filterwarnings("ignore", message="Glyph")
        content = base64.b64encode(drawn(figure, "svg")).decode()
    return f"data:image/svg+xml;base64,{content}"
