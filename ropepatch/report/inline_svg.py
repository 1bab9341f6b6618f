"""Figures as part of an HTML page: nothing to load, ids of their own, and colours that the page sets."""

from __future__ import annotations

import io
import re
import warnings
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from ropepatch.report.plots.style import COLOURS, FAINT, GRID, INK, PLAIN, QUIET, house_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {"ink": INK, "quiet": QUIET, "faint": FAINT, "grid": GRID, "plain": PLAIN} | {
    f"series-{number}": colour for number, colour in enumerate(COLOURS)
}
VARIABLES = {colour: f"var(--{name}, {colour})" for name, colour in NAMES.items()}
OMITTED = ("metadata", "style")


def inline_svg(figure: Figure, prefix: str, label: str) -> str:
    """The figure as an ``svg`` element, with text as text.

    Args:
        figure: What is drawn.
        prefix: What begins every id in it, so that several fit into one page.
        label: What it shows, for those who cannot see it.
    """
    file = io.StringIO()
    with house_style(), warnings.catch_warnings():
        import matplotlib

        warnings.filterwarnings("ignore", message="Glyph")  # the reader's browser has a font for it
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for child in [child for child in parent if _local(child.tag) in OMITTED]:
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
    """An attribute with ids that are the figure's own and colours that are the page's."""
    if key == "id":
        return prefix + value
    if _local(key) == "href":
        return value.replace("#", f"#{prefix}", 1)
    if key == "style":
        return re.sub("#[0-9a-f]{6}", lambda colour: VARIABLES.get(colour[0], colour[0]), value)
    return value.replace("url(#", f"url(#{prefix}")
