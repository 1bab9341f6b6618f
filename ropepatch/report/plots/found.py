"""Answers found, by length and depth or kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ropepatch.evaluation.results import Row
from ropepatch.evaluation.tasks import retrieval_rows
from ropepatch.report.plots.style import COLOURS, INK, QUIET, WIDTH, canvas, shown
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ropepatch.evaluation.comparisons import Comparison
    from ropepatch.evaluation.retrieval import Retrieval

PER_ROW = 3  # maps beside each other, at most
CELL = (0.27, 0.15)  # inches that a number needs
KEY = (0, 0.25, 0.5, 0.75, 1)  # shares, where cells have no room for numbers


def plot_retrieval(retrievals: Mapping[str, Retrieval], *, trained: int) -> Figure:
    """The share of answers found by length and depth, one map per model.

    Args:
        retrievals: What to draw, by name.
        trained: The context the model was trained on, in tokens; marked.
    """
    rows = {
        name: [
            row
            for row in retrieval_rows(retrieval)
            if row.measure == "found" and row.at.keys() == {"length", "depth"}
        ]
        for name, retrieval in retrievals.items()
    }
    return _maps(rows, trained, "answers found", by="depth")


def plot_found(comparison: Comparison, by: str) -> Figure:
    """The share of answers found of results, by length and ``depth`` or ``kind``."""
    title = f"{shown(comparison.model)}: answers found"
    return _maps(comparison.rows("found", "length", by), comparison.trained, title, by=by)


def _maps(tables: Mapping[str, Sequence[Row]], trained: int, title: str, *, by: str) -> Figure:
    lengths = sorted({row.length for rows in tables.values() for row in rows})
    places = list(dict.fromkeys(row.at[by] for rows in tables.values() for row in rows))
    label, beside = "kind of question", 0.6  # inches that a kind's name needs beyond a depth
    if by == "depth":
        label, beside = "depth of the needle", 0.0
        places.sort(key=float)
    across = min(len(tables), PER_ROW if len(lengths) * CELL[0] * PER_ROW < WIDTH - 0.6 else 2)
    down = -(-len(tables) // across)
    wide = min(0.62, (WIDTH - 0.6 - beside - 0.2 * across) / across / len(lengths))
    high = 0.23 if len(places) < 8 else 0.18
    written = wide >= CELL[0] and high >= CELL[1]
    width = 0.75 + beside + across * (wide * len(lengths) + 0.2)
    height = 1.05 + down * (high * len(places) + 0.35) + (0 if written else 0.3)
    with canvas(height, max(width, 2.6)) as figure:
        panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flatten()
        for axes, (name, rows) in zip(panels, tables.items(), strict=False):
            _map(axes, rows, lengths, places, by=by, written=written)
            axes.set_title(shown(name, max(12, int(12.5 * wide * len(lengths)))), color=INK)
            inside = sum(n <= trained for n in lengths)
            axes.axvline(inside - 0.5, color=INK, linewidth=1, linestyle=(0, (4, 2)))
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
        below = f"prompt, tokens (dashed: the trained {short_length(trained)})"
        figure.supxlabel(below, color=QUIET, fontsize=9)
        figure.supylabel(label, color=QUIET, fontsize=9)
        trials = sorted({row.n for rows in tables.values() for row in rows})
        each = " to ".join(map(str, dict.fromkeys((trials[0], trials[-1]))))
        figure.suptitle(f"{title}, of {each} in each cell", x=0.01, ha="left", color=QUIET, fontsize=9)
    return figure


def _map(
    axes: Axes,
    rows: Sequence[Row],
    lengths: Sequence[int],
    places: Sequence[int | float | str],
    *,
    by: str,
    written: bool,
) -> None:
    from matplotlib.patches import Rectangle

    for row in rows:
        x, y, share = lengths.index(row.length), places.index(row.at[by]), row.value or 0.0
        cell = Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=COLOURS[0], alpha=_alpha(share), linewidth=0)
        axes.add_patch(cell)
        if written:
            colour = "#ffffff" if share > 0.55 else INK
            axes.text(x, y, f"{share:.0%}", ha="center", va="center_baseline", fontsize=6.5, color=colour)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set(xlim=(-0.55, len(lengths) - 0.45), ylim=(len(places) - 0.5, -0.5))
    skipped = 2 if len(lengths) > 9 else 1
    ticks = ["" if (len(lengths) - 1 - k) % skipped else short_length(n) for k, n in enumerate(lengths)]
    axes.set_xticks(range(len(lengths)), ticks)
    axes.set_yticks(range(len(places)), [at if isinstance(at, str) else f"{at:.0%}" for at in places])


def _alpha(share: float) -> float:
    """The opacity that stands for a share: a trace of it for 0."""
    return 0.05 + 0.95 * share
