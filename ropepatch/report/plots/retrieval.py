"""Answers found, by length and depth or kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ropepatch.evaluation.results import Row
from ropepatch.evaluation.tasks.retrieval import retrieval_rows
from ropepatch.report.plots.style import COLOURS, INK, QUIET, WIDTH, canvas, shown
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ropepatch.evaluation.comparisons import Comparison
    from ropepatch.evaluation.retrieval import Retrieval

PER_ROW = 3  # maps beside each other, at most
CELL = (0.27, 0.15)  # inches that a number needs


def plot_retrieval(retrievals: Mapping[str, Retrieval], *, trained: int) -> Figure:
    """The share of answers found by length and depth, one map per model.

    Args:
        retrievals: What to draw, by name.
        trained: The context the model was trained on, in tokens; marked.
    """
    rows = {name: _depth_rows(retrieval_rows(retrieval)) for name, retrieval in retrievals.items()}
    return _maps(rows, trained, "answers found")


def plot_depths(comparison: Comparison) -> Figure:
    """The same of results."""
    title = f"{shown(comparison.model)}: answers found"
    return _maps(comparison.rows("found", "length", "depth"), comparison.trained, title)


def plot_kinds(comparison: Comparison) -> Figure:
    """The share of each kind of question that is found by length, one map per model."""
    title = f"{shown(comparison.model)}: answers found"
    return _maps(comparison.rows("found", "kind", "length"), comparison.trained, title, by="kind")


def _depth_rows(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.measure == "found" and row.at.keys() == {"length", "depth"}]


def _maps(tables: Mapping[str, Sequence[Row]], trained: int, title: str, *, by: str = "depth") -> Figure:
    lengths = sorted({row.length for rows in tables.values() for row in rows})
    depths = list(dict.fromkeys(row.at[by] for rows in tables.values() for row in rows))  # or kinds
    if by == "depth":
        depths.sort(key=float)
    wide = 0.0 if by == "depth" else 0.6  # inches that a kind's name needs beyond a depth
    across = min(len(tables), PER_ROW if len(lengths) * CELL[0] * PER_ROW < WIDTH - 0.6 else 2)
    down = -(-len(tables) // across)
    cell = (
        min(0.62, (WIDTH - 0.6 - wide - 0.2 * across) / across / len(lengths)),
        0.23 if len(depths) < 8 else 0.18,
    )
    size = 0.75 + wide + across * (cell[0] * len(lengths) + 0.2), 1.05 + down * (cell[1] * len(depths) + 0.35)
    written = cell[0] >= CELL[0] and cell[1] >= CELL[1]
    with canvas(size[1] + (0 if written else 0.3), max(size[0], 2.6)) as figure:
        grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
        panels = [axes for row in grid for axes in row]
        for axes, (name, rows) in zip(panels, tables.items(), strict=False):
            _map(axes, rows, lengths, depths, by=by, written=written)
            axes.set_title(shown(name, max(12, int(12.5 * cell[0] * len(lengths)))), color=INK)
            axes.axvline(
                sum(n <= trained for n in lengths) - 0.5, color=INK, linewidth=1, linestyle=(0, (4, 2))
            )
        for axes in panels[len(tables) :]:
            axes.set_visible(False)
        for axes in panels[max(0, len(tables) - across) : len(tables)]:
            axes.tick_params(labelbottom=True)
        if not written:
            _key(figure)
        figure.supxlabel(
            f"prompt, tokens (dashed: the trained {short_length(trained)})", color=QUIET, fontsize=9
        )
        label = "depth of the needle" if by == "depth" else "kind of question"
        figure.supylabel(label, color=QUIET, fontsize=9)
        trials = sorted({row.n for rows in tables.values() for row in rows})
        asked = f"{trials[0]}" if len(trials) == 1 else f"{trials[0]} to {trials[-1]}"
        figure.suptitle(f"{title}, of {asked} in each cell", x=0.01, ha="left", color=QUIET, fontsize=9)
    return figure


def _map(
    axes: Axes,
    rows: Sequence[Row],
    lengths: Sequence[int],
    depths: Sequence[int | float | str],
    *,
    by: str,
    written: bool,
) -> None:
    from matplotlib.patches import Rectangle

    for row in rows:
        x, y = lengths.index(row.length), depths.index(row.at[by])
        share = row.value or 0.0
        axes.add_patch(
            Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=COLOURS[0], alpha=_alpha(share), linewidth=0)
        )
        if written:
            colour = "#ffffff" if share > 0.55 else INK
            axes.text(x, y, f"{share:.0%}", ha="center", va="center_baseline", fontsize=6.5, color=colour)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xlim(-0.55, len(lengths) - 0.45)
    axes.set_ylim(len(depths) - 0.5, -0.5)
    crowded = len(lengths) > 9
    axes.set_xticks(
        range(len(lengths)),
        ["" if crowded and (len(lengths) - 1 - k) % 2 else short_length(n) for k, n in enumerate(lengths)],
    )
    axes.set_yticks(range(len(depths)), [at if isinstance(at, str) else f"{at:.0%}" for at in depths])


def _key(figure: Figure) -> None:
    from matplotlib.patches import Patch

    shares = (0, 0.25, 0.5, 0.75, 1)
    handles = [
        Patch(color=COLOURS[0], alpha=_alpha(share), label=f"{share:.0%}", linewidth=0) for share in shares
    ]
    figure.legend(
        handles=handles, loc="outside upper left", ncols=len(shares), handlelength=1.2, columnspacing=1
    )


def _alpha(share: float) -> float:
    """How much of the colour stands for a share: a trace of it for 0."""
    return 0.05 + 0.95 * share
