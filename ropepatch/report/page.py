"""The report: verdict, figures and tables of results in one HTML file."""

from __future__ import annotations

import base64
import importlib.metadata
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import jinja2

from ropepatch.evaluation.results import Result, by_place, comparisons
from ropepatch.evaluation.tasks import TASKS
from ropepatch.files import whole_file
from ropepatch.report.plots.lines import looks_of, pictures_of_results
from ropepatch.report.plots.style import drawn
from ropepatch.report.tables import tables_of, verdict_lines
from ropepatch.settings import short_length


def write_report(results: Sequence[Result], file: str | Path) -> Path:
    """Write results as one self-contained HTML file, without network, other files or fonts."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    look = looks_of(results)
    places = []
    for (model, target), groups in by_place(comparisons(results)).items():
        sections = []
        for group in groups:
            pictures = []
            for picture in pictures_of_results(group, look):
                image = base64.b64encode(drawn(picture.figure, "svg")).decode()
                pictures.append((picture.caption, f"data:image/svg+xml;base64,{image}"))
            sections.append((group, TASKS.find(group.task), pictures, tables_of(group)))
        title = f"{model} to {short_length(target)} tokens"
        places.append((title, verdict_lines(groups), sections))
    page = environment.get_template("template.html").render(
        places=places,
        # All that their files contain, without the rows
        provenance=[replace(result, rows=[]) for result in results],
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        version=importlib.metadata.version("ropepatch"),
    )
    Path(file).absolute().parent.mkdir(parents=True, exist_ok=True)
    with whole_file(Path(file), new=True) as partial:
        partial.write_text(page, encoding="utf-8", errors="replace")
    return Path(file)
