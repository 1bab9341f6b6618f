"""The style of all figures: colours, an empty canvas, lengths on axes, files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from ropepatch.attention import REMAPPINGS
from ropepatch.errors import RopepatchError
from ropepatch.report.printers import one_line
from ropepatch.scaling import METHODS
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 6.4  # inches
LABEL = 0.145  # inches between the names of lines
INK, QUIET, FAINT, GRID = "#333333", "#6b6b6b", "#999999", "#e6e6e6"
PLAIN = "#444444"  # the baseline
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)), (0, (6, 1.5, 1, 1.5, 1, 1.5)))
DASHED: Any = {
    "color": FAINT,
    "linewidth": 0.9,
    "linestyle": (0, (4, 3)),
    "zorder": 0.9,
}  # the original length
SOLID = ("yarn", "ntk", "linear", "llama3", "custom", "ntk-by-parts")  # in the order of COLOURS

STYLE: Any = {
    "figure.dpi": 100,
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
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": QUIET,
    "ytick.labelcolor": QUIET,
    "legend.frameon": False,
    "lines.solid_capstyle": "butt",
    "svg.hashsalt": "ropepatch",  # makes files reproducible
}


class Look(NamedTuple):
    """The colour and dash of a model, the same in every figure."""

    colour: str
    dash: Any = "-"


def looks(labels: Iterable[str], *, unscaled: Iterable[str] = ()) -> dict[str, Look]:
    """A look for every label, unique for up to 30.

    A method looks the same in every figure. The same method with other parameters has its colour, as long as
    there are dashes; other names get the remaining looks, in order.

    Args:
        labels: Names that begin with that of a method, and others.
        unscaled: The labels of baselines, which are grey.
    """
    plain = set(unscaled)
    chosen = {label: Look(PLAIN) for label in dict.fromkeys(labels)}
    free = [Look(colour, dash) for dash in DASHES for colour in COLOURS]
    own = dict(zip(dict.fromkeys([*SOLID, *METHODS, *REMAPPINGS]), free, strict=False))
    wanted = {label: own.get(re.split("[ ,]", label)[0]) for label in chosen if label not in plain}
    for exact in (True, False):
        for label, look in wanted.items():
            if (label in own) == exact and free:
                like = [other for other in free if look and other.colour == look.colour]
                chosen[label] = look if look in free else (like or free)[0]
                free.remove(chosen[label])
    return chosen


def shown(text: str, limit: int = 30) -> str:
    """The text on one line, shortened in the middle if it is longer than `limit`."""
    line = one_line(text)
    tail = (limit - 1) // 2
    return line if len(line) <= limit else f"{line[: limit - 1 - tail]}…{line[-tail:]}"


def length_axis(axes: Axes, lengths: Iterable[float], *, trained: int, label: str) -> None:
    """A logarithmic axis of tokens with the original length marked.

    As many of the lengths as fit have a tick, the original length and the greatest ones first.
    """
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    axes.minorticks_off()
    room = math.log(high / low) / 12
    ticks: list[float] = []
    for length in (trained, *sorted(set(lengths), reverse=True)):
        if low <= length <= high and all(abs(math.log(length / tick)) >= room for tick in ticks):
            ticks.append(length)
    names = [f"{short_length(round(t))}\ntrained" if t == trained else short_length(round(t)) for t in ticks]
    axes.set_xticks(ticks, names)
    axes.set_xlabel(label)
    axes.axvline(trained, **DASHED)


def name_lines(
    axes: Axes, ends: Iterable[tuple[str, Look, float, float]], room: float, value: Callable[[float], str]
) -> None:
    """Write names to the right of lines, joined to their ends; with the last value of lines that are cut off.

    Args:
        axes: The axes of the lines, with their limits set.
        ends: The name, look and last point of every line.
        room: The approximate height of the axes in inches.
        value: Formats a last value.
    """
    drawn = sorted(ends, key=lambda end: end[-1])
    to_axes = axes.transScale + axes.transLimits
    points = [[float(part) for part in to_axes.transform((x, y))] for _, _, x, y in drawn]
    places = spread([min(max(height, 0.0), 1.0) for _, height in points], LABEL / room)
    for (name, (colour, dash), _, last), (x, height), place in zip(drawn, points, places, strict=True):
        inside = 0 <= height <= 1
        axes.plot(
            [x, 1.01, 1.035, 1.06] if inside else [1.035, 1.06],
            [height, height, place, place] if inside else [place, place],
            transform=axes.transAxes,
            color=colour,
            linestyle=dash,
            linewidth=1,
            clip_on=False,
            scalex=False,
            scaley=False,
        )
        arrow = "" if inside else f" {'↑' if height > 1 else '↓'} {value(last)}"
        axes.text(1.07, place, shown(name) + arrow, transform=axes.transAxes, va="center_baseline")


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Places from 0 to 1 at least `gap` apart, close to the wanted ones and in their order.

    If there is no room for all, they continue beyond 1.
    """
    order = sorted(range(len(wanted)), key=lambda k: wanted[k])
    # Neighbours that overlap share the mean of the places at which they would start.
    pools: list[list[float]] = []
    for rank, k in enumerate(order):
        pools.append([wanted[k] - rank * gap])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    starts = [fmean(pool) for pool in pools for _ in pool]
    highest, places = max(0.0, 1 - (len(wanted) - 1) * gap), [0.0] * len(wanted)
    for rank, (k, start) in enumerate(zip(order, starts, strict=True)):
        places[k] = min(max(start, 0.0), highest) + rank * gap
    return places


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write the figure as ``stem``.png and ``stem``.svg, and return the two files."""
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    with house_style():
        for file in files:
            # Without the date, files are reproducible.
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


@contextmanager
def house_style() -> Iterator[None]:
    """Apply the style within the block, and restore matplotlib's settings afterwards."""
    try:
        import matplotlib
    except ImportError as error:
        raise RopepatchError("figures need matplotlib", hint='pip install "ropepatch[plot]"') from error
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
        figure._repr_png_ = lambda: _png(figure)  # type: ignore[attr-defined]
        yield figure


def _png(figure: Figure) -> bytes:
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    return drawn.getvalue()
