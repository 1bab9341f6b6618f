"""Retrieval accuracy by length and depth or kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ropepatch.evaluation.results import Row
from ropepatch.report.plots.style import COLOURS, INK, QUIET, WIDTH, canvas, shown
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ropepatch.evaluation.comparisons import Comparison

PER_ROW = 3  # heat maps in a row, at most
CELL = (0.27, 0.15)  # width and height of a number in inches
KEY = (0, 0.25, 0.5, 0.75, 1)  # accuracies of the legend, if cells have no room for numbers
AXES = {  # by key of the rows: the name of the axis, and extra inches for its ticks
    "depth": ("depth of the needle", 0.0),
    "kind": ("kind of question", 0.6),
}


def plot_found(comparison: Comparison, by: Literal["depth", "kind"], of: str | None = None) -> Figure:
    """A heat map per result: the retrieval accuracy by length and depth, or by length and kind."""
    keys = dict.fromkeys(["length", by, *(["kind"] if of else [])])
    found = comparison.rows("found", *keys)
    tables = {
        name: [row for row in rows if row.at.get("kind") == of or by == "kind"]
        for name, rows in found.items()
    }
    cells = [row for rows in tables.values() for row in rows]
    lengths = sorted({row.length for row in cells})
    places = list(dict.fromkeys(row.at[by] for row in cells))
    if by == "depth":
        places.sort(key=float)
    label, extra = AXES[by]
    across = min(len(tables), PER_ROW if len(lengths) * CELL[0] * PER_ROW < WIDTH - 0.6 else 2)
    down = -(-len(tables) // across)
    wide = min(0.62, (WIDTH - 0.6 - extra - 0.2 * across) / across / len(lengths))
    high = 0.23 if len(places) < 8 else 0.18
    written = wide >= CELL[0] and high >= CELL[1]
    width = 0.75 + extra + across * (wide * len(lengths) + 0.2)
    height = 1.05 + down * (high * len(places) + 0.35) + (0 if written else 0.3)
    with canvas(height, max(width, 2.6)) as figure:
        panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flatten()
        for axes, (name, rows) in zip(panels, tables.items(), strict=False):
            _map(axes, [(lengths.index(row.length), places.index(row.at[by]), row) for row in rows], written)
            axes.set(xlim=(-0.55, len(lengths) - 0.45), ylim=(len(places) - 0.5, -0.5))
            axes.set_title(shown(name, max(12, int(12.5 * wide * len(lengths)))), color=INK)
            inside = sum(n <= comparison.trained for n in lengths)
            axes.axvline(inside - 0.5, color=INK, linewidth=1, linestyle=(0, (4, 2)))
        skipped = 2 if len(lengths) > 9 else 1
        ticks = ["" if (len(lengths) - 1 - k) % skipped else short_length(n) for k, n in enumerate(lengths)]
        panels[0].set_xticks(range(len(lengths)), ticks)
        left_out = comparison.not_counted
        names = [
            f"{at:.0%}" if not isinstance(at, str) else f"{at}\n(not counted)" if at in left_out else at
            for at in places
        ]
        panels[0].set_yticks(range(len(places)), names)
        for axes in panels[len(tables) :]:
            axes.set_visible(False)
        for axes in panels[max(0, len(tables) - across) : len(tables)]:
            axes.tick_params(labelbottom=True)
        if not written:
            from matplotlib.patches import Patch

            handles = [Patch(color=COLOURS[0], alpha=_alpha(n), label=f"{n:.0%}", linewidth=0) for n in KEY]
            figure.legend(
                handles=handles, loc="outside upper left", ncols=len(KEY), handlelength=1.2, columnspacing=1
            )
        below = f"prompt, tokens (dashed: the original {short_length(comparison.trained)})"
        figure.supxlabel(below, color=QUIET, fontsize=9)
        figure.supylabel(label, color=QUIET, fontsize=9)
        trials = sorted({row.n for row in cells})
        each = " to ".join(map(str, dict.fromkeys((trials[0], trials[-1]))))
        kind = f" for {of}" if of else ""
        title = f"{shown(comparison.model)}: retrieval accuracy{kind}, {each} answers per cell"
        figure.suptitle(title, x=0.01, ha="left", color=QUIET, fontsize=9)
    return figure


def _map(axes: Axes, cells: Sequence[tuple[int, int, Row]], written: bool) -> None:
    from matplotlib.patches import Rectangle

    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    for x, y, row in cells:
        share = row.value or 0.0
        cell = Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=COLOURS[0], alpha=_alpha(share), linewidth=0)
        axes.add_patch(cell)
        if written:
            colour = "#ffffff" if share > 0.55 else INK
            axes.text(x, y, f"{share:.0%}", ha="center", va="center_baseline", fontsize=6.5, color=colour)


def _alpha(share: float) -> float:
    """The opacity for a share; not quite transparent for 0."""
    return 0.05 + 0.95 * share
