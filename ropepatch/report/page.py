"""The report: verdict, figures and tables of results in one HTML file."""

from __future__ import annotations

import importlib.metadata
import io
import re
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import jinja2
from markupsafe import Markup

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import by_place, comparisons
from ropepatch.evaluation.results import Result
from ropepatch.evaluation.tasks import task_of
from ropepatch.files import absent, whole_file
from ropepatch.model.source import shown_command
from ropepatch.report.plots.pictures import (
    looks_of,
    pictures_of_changes,
    pictures_of_results,
    rescalings,
)
from ropepatch.report.plots.style import COLOURS, FAINT, GRID, INK, PLAIN, QUIET, house_style
from ropepatch.report.printers import html_table
from ropepatch.report.tables import summary_table, tables_of
from ropepatch.report.verdict import measured, origin, provenance, variant, verdict_lines
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {"ink": INK, "quiet": QUIET, "faint": FAINT, "grid": GRID, "plain": PLAIN} | {
    f"series-{number}": colour for number, colour in enumerate(COLOURS)
}
VARIABLES = {colour: f"var(--{name}, {colour})" for name, colour in NAMES.items()}


def write_report(results: Sequence[Result], file: str | Path, *, command: str | None = None) -> Path:
    """Write results as one self-contained HTML file, without network, other files or fonts."""
    path = absent(file)
    if not results:
        raise RopepatchError("no results to report", hint="measure first, with `ropepatch eval`")
    page = _page(results, command)
    try:
        with whole_file(path, new=True) as partial:
            partial.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise RopepatchError(f"cannot write {path}: {error.strerror}", hint="choose another file") from error
    return path


def _page(results: Sequence[Result], command: str | None) -> str:
    places, look, numbers = by_place(comparisons(results)), looks_of(results), count(1)
    models, targets = (dict.fromkeys(parts) for parts in zip(*places, strict=True))
    summary = summary_table([*places.values()])
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
        summary=summary if len(summary.heads) > summary.labels else None,
        provenance=[
            (f"{r.model['name']}, {r.label}, {r.task}, {short_length(r.target)}", provenance(r))
            for r in results
        ],
        version=importlib.metadata.version("ropepatch"),
        measured=measured,
        task_of=task_of,
        variant=variant,
        tables_of=tables_of,
        pictures_of=lambda group: pictures_of_results(group, look),
        changes_of=lambda groups: pictures_of_changes(rescalings(groups, look)),
        svg=lambda picture: inline_svg(picture.figure, f"f{next(numbers)}-", picture.caption),
    )


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


def _unbroken(value: object) -> object:
    """Text whose lines cannot begin with a percent sign."""
    return value.replace(" %", "\u00a0%") if type(value) is str else value


def inline_svg(figure: Figure, prefix: str, label: str) -> str:
    """A figure as a self-contained ``svg`` element, with text as text and the colours of the page.

    The prefix makes its ids unique within the page; the label is for screen readers.
    """
    file = io.StringIO()
    with house_style(), warnings.catch_warnings():
        import matplotlib

        warnings.filterwarnings("ignore", message="Glyph")  # the reader's browser has a font for it
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for child in [child for child in parent if _local(child.tag) in ("metadata", "style")]:
            parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(key): _own(key, value, prefix) for key, value in element.attrib.items()}
    for size in ("width", "height"):
        del root.attrib[size]
    root.attrib |= {"role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _own(key: str, value: str, prefix: str) -> str:
    """An attribute with prefixed ids and the colours of the page."""
    if key == "id":
        return prefix + value
    if _local(key) == "href":
        return value.replace("#", f"#{prefix}", 1)
    if key == "style":
        return re.sub("#[0-9a-f]{6}", lambda colour: VARIABLES.get(colour[0], colour[0]), value)
    return value.replace("url(#", f"url(#{prefix}")
