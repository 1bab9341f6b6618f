"""The style of all figures: colours, an empty canvas, lengths on axes, files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ropepatch.errors import printable, requiring
from ropepatch.report.printers import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 6.4  # inches
SHOWN = 30  # characters of a name
INK, QUIET, FAINT, GRID = "#333333", "#6b6b6b", "#999999", "#e6e6e6"
PLAIN = "#444444"  # the baseline
# Okabe and Ito's
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
)
# A length
DASHED: Any = {"color": FAINT, "linewidth": 0.9, "linestyle": "--"}
STYLE: Any = {
    "figure.facecolor": "white",
    "savefig.dpi": 200,
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # a $ in a name is a $
    "axes.labelcolor": QUIET,
    "axes.edgecolor": FAINT,
    "axes.titlecolor": QUIET,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "legend.frameon": False,
    "svg.hashsalt": "ropepatch",  # makes files reproducible
}


class Look(NamedTuple):
    """The colour and dash of a model, the same in every figure of some results."""

    colour: str
    dash: str = "-"


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """A look for every label, in order; unique for up to 24."""
    free = (
        Look(colour, dash) for dash, colour in product(("-", "--", ":", "-."), COLOURS)
    )
    return dict(zip(dict.fromkeys(labels), cycle(free), strict=False))


def shown(text: str) -> str:
    """The text on one line, without the middle of a long one."""
    return printable(one_line(text), SHOWN)


def plain_log_axis(axes: Axes) -> None:
    """A logarithmic vertical axis with plain numbers."""
    from matplotlib.ticker import LogFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter())


def legend_beside(axes: Axes) -> None:
    """The names of the lines, each once, to the right of the axes."""
    handles, names = axes.get_legend_handles_labels()
    once = dict(zip(map(shown, names), handles, strict=True))
    axes.legend(once.values(), once, loc="upper left", bbox_to_anchor=(1, 1))


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write the figure as ``stem``.png and ``stem``.svg, and return the two files."""
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    for file in files:
        file.write_bytes(drawn(figure, file.suffix[1:]))
    return files


def drawn(figure: Figure, kind: str) -> bytes:
    """The figure as a png or svg file, reproducible, because it has no date."""
    file = BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with house_style():
        figure.savefig(file, format=kind, metadata=metadata)
    return file.getvalue()


@contextmanager
def house_style() -> Iterator[None]:
    """Apply the style within the block, and restore matplotlib's settings afterwards."""
    with requiring("a figure", "ropepatch[plot]"):
        import matplotlib
    with matplotlib.rc_context(STYLE):
        yield


@contextmanager
def canvas(height: float, width: float = WIDTH) -> Iterator[Figure]:
    """An empty figure in the style, with its size in inches, that belongs to no window.

    A notebook also shows it if pyplot is not imported.
    """
    with house_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained")
        figure._repr_png_ = lambda: drawn(figure, "png")  # type: ignore[attr-defined]  # a notebook's method
        yield figure
