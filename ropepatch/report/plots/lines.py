"""Figures of results: losses, gains and answers by length, position or depth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ropepatch.evaluation.comparisons import Comparison, by_place, comparisons
from ropepatch.evaluation.results import Result, Row, slug
from ropepatch.report.plots.style import (
    FAINT,
    Look,
    canvas,
    legend_beside,
    length_axis,
    looks,
    plain_log_axis,
    shown,
)
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST = 300.0  # nats whose perplexity, with the ticks beyond it, a float can hold
HEADROOM = 1.0  # nats that a figure shows beyond the worst value of the best lines
FLOOR_LOOK = Look(FAINT, ":")
BANDS = "bands: 95 % intervals"
Rows = Mapping[str, Sequence[Row]]  # by name of the result
Looks = Mapping[str, Look]  # by name of the result


class Picture(NamedTuple):
    """A figure with its file name and caption."""

    name: str
    figure: Figure
    caption: str


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """The figures that the results allow, by file name.

    Args:
        results: Results of any models and tasks; those that are not comparable get separate figures.
    """
    places, look = by_place(comparisons(results)), looks_of(results)
    models = {model for model, _ in places}
    targets = {target for _, target in places}
    drawn: dict[str, Figure] = {}
    for (model, target), alike in places.items():
        parts = [Path(model).name] if len(models) > 1 else []
        if len(targets) > 1:
            parts.append(short_length(target))
        for group in alike:
            for picture in pictures_of_results(group, look):
                add_figure(drawn, picture.figure, *parts, picture.name)
    return drawn


def add_figure(drawn: dict[str, Figure], figure: Figure, *parts: str) -> None:
    """Add a figure under a unique name made of these parts."""
    stem = slug("-".join(parts)).strip("-.")
    name, numbers = stem, itertools.count(2)
    while name in drawn:
        name = f"{stem}-{next(numbers)}"
    drawn[name] = figure


def looks_of(results: Sequence[Result]) -> dict[str, Look]:
    """A look for every name in the comparisons of the results."""
    named = [item for group in comparisons(results) for item in group.results.items()]
    unscaled = [name for name, result in named if result.scaling is None]
    return looks((name for name, _ in named), unscaled=unscaled)


def pictures_of_results(comparison: Comparison, look: Looks) -> list[Picture]:
    """The figures that the rows of a comparison allow."""
    present = comparison.kinds_of_rows()
    original = short_length(comparison.trained)
    note = f"{BANDS}; dashed: the original length of {original} tokens."
    pictures = []

    def add(name: str, plot: Callable[..., Figure], caption: str, *of: Any) -> None:
        pictures.append(Picture(name, plot(comparison, *of), caption))

    if ("loss", ("length",)) in present:
        caption = f"Perplexity by length, on logarithmic axes; {note}"
        add("perplexity", plot_perplexity, caption, look)
    if ("loss", ("begin", "end")) in present:
        caption = f"Mean loss of the tokens at these positions; {note}"
        add("positions", plot_positions, caption, look)
    if ("gain", ("begin", "end")) in present:
        caption = f"Gain of a token from the context beyond the original length; {note}"
        add("gain", plot_gain, caption, look)
    if any(series.measure == "found" for series in comparison.series):
        caption = f"Retrieval accuracy by prompt length; {note}"
        add("retrieval", plot_found, caption, look)
    by_depth = "accuracy by prompt length and depth of the needle."
    if ("found", ("length", "depth")) in present:
        add("depths", plot_depths, f"Retrieval {by_depth}")
    if ("found", ("kind", "length", "depth")) in present:
        for kind in comparison.kinds:
            add(f"depths-{kind}", plot_depths, f"{kind}: retrieval {by_depth}", kind)
    return pictures


def plot_perplexity(comparison: Comparison, look: Looks) -> Figure:
    """Perplexity by length, on logarithmic axes, with the intervals as bands."""
    rows = comparison.rows("loss", "length")
    figure = _plot_lines(comparison, look, {"perplexity": rows}, "length", of=np.exp)
    plain_log_axis(figure.axes[0])
    low, high = (math.exp(min(end, LARGEST)) for end in _span(rows))
    figure.axes[0].set_ylim(low, high)
    return figure


def plot_positions(comparison: Comparison, look: Looks) -> Figure:
    """The mean loss by range of positions, with the intervals as bands and the floor dotted."""
    rows = comparison.rows("loss", "begin", "end")
    figure = _plot_lines(comparison, look, {"loss (nats/token)": rows}, "position")
    figure.axes[0].set_ylim(_span(rows))
    return figure


def plot_gain(comparison: Comparison, look: Looks) -> Figure:
    """The gain from the context beyond the original length, in nats per token; below 0 it is harmful."""
    title = "gain from the longer context (nats/token)"
    rows = comparison.rows("gain", "begin", "end")
    figure = _plot_lines(comparison, look, {title: rows}, "position")
    figure.axes[0].axhline(0, color=FAINT, linewidth=0.9)
    return figure


def plot_found(comparison: Comparison, look: Looks) -> Figure:
    """The retrieval accuracy by length, with the intervals as bands; one panel for every kind of question."""
    panels = {}
    for series in comparison.series:
        if series.measure == "found":
            title = f"{series.title.lower()}{comparison.reservation(series)}"
            panels[title] = {
                name: series.of(result) for name, result in comparison.results.items()
            }
    height = 0.4 + 2.4 * len(panels)
    figure = _plot_lines(comparison, look, panels, "length", height=height)
    for axes in figure.axes:
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    return figure


def plot_depths(comparison: Comparison, kind: str | None = None) -> Figure:
    """The retrieval accuracy by length and depth of the needle, a panel for every result."""
    keys = ("length", "depth") if kind is None else ("kind", "length", "depth")
    found = comparison.rows("found", *keys)
    with canvas(0.6 + 1.6 * len(found)) as figure:
        panels = figure.subplots(len(found), sharex=True, squeeze=False).flatten()
        for axes, (name, rows) in zip(panels, found.items(), strict=True):
            of_kind = [row for row in rows if row.at.get("kind") == kind]
            depths = sorted({float(row.at["depth"]) for row in of_kind})
            lengths = sorted({row.length for row in of_kind})
            table = np.full((len(depths), len(lengths)), math.nan)
            for row in of_kind:
                if row.value is not None:
                    place = depths.index(float(row.at["depth"]))
                    table[place, lengths.index(row.length)] = row.value
            image = axes.imshow(table, cmap="Blues", vmin=0, vmax=1, aspect="auto")
            axes.grid(visible=False)
            axes.set_title(shown(name))
            axes.set_xticks(range(len(lengths)), [*map(short_length, lengths)])
            axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
            axes.set_ylabel("depth")
        panels[-1].set_xlabel("length, tokens")
        figure.colorbar(
            image, ax=panels.tolist(), format=lambda share, _: f"{share:.0%}"
        )
    return figure


def _plot_lines(
    comparison: Comparison,
    look: Looks,
    panels: Mapping[str, Rows],
    axis: str,
    *,
    of: Callable[[np.ndarray], np.ndarray] = np.asarray,
    height: float = 3.2,
) -> Figure:
    """A line for every result in panels by title, with the original length marked."""
    with canvas(height) as figure:
        grid = figure.subplots(len(panels), sharex=True, squeeze=False).flatten()
        for axes, (title, rows_by_name) in zip(grid, panels.items(), strict=True):
            axes.set_title(f"{shown(comparison.model)}: {title}")
            for name, rows in rows_by_name.items():
                _draw(axes, rows, name, look[name], of)
            first = next((row for rows in rows_by_name.values() for row in rows), None)
            if comparison.floor is not None and first is not None:
                floor = comparison.floor.of(first.measure, *first.at)
                if floor:
                    _draw(axes, floor, "floor", FLOOR_LOOK, of)
            length_axis(axes, trained=comparison.trained, label=f"{axis}, tokens")
        legend_beside(grid[0])
    return figure


def _draw(
    axes: Axes,
    unordered: Sequence[Row],
    name: str,
    look: Look,
    of: Callable[[np.ndarray], np.ndarray],
) -> None:
    """A line, and its intervals as a band if every row has one; the floor has neither marks nor band."""
    rows = sorted(unordered, key=_place)
    places = [_place(row) for row in rows]
    numbers = [(row.value, row.low, row.high) for row in rows]
    value, low, high = np.array(numbers, dtype=float).reshape(-1, 3).T  # None is NaN
    (line,) = axes.plot(places, of(value), color=look.colour, linestyle=look.dash)
    line.set_label(name)
    if look is FLOOR_LOOK:
        return
    line.set(marker="o", markersize=3)
    if not np.isnan([low, high]).any():
        band: Any = {"color": look.colour, "alpha": 0.12, "linewidth": 0}
        axes.fill_between(places, of(low), of(high), **band)


def _span(rows_by_name: Rows) -> tuple[float, float]:
    """The ends of an axis in nats: the least value, and `HEADROOM` above the greatest of the best lines."""
    best: dict[float, float] = {}
    values = []
    for row in itertools.chain(*rows_by_name.values()):
        if row.value is not None:
            values.append(row.value)
            best[_place(row)] = min(row.value, best.get(_place(row), math.inf))
    if not values:
        return 0.0, HEADROOM
    low, high = min(values), min(max(values), max(best.values()) + HEADROOM)
    margin = 0.1 * max(high - low, 0.1)
    return low - margin, high + margin


def _place(row: Row) -> float:
    """The length of a row, or the middle of its range of positions on a logarithmic axis."""
    if "length" in row.at:
        return float(row.at["length"])
    begin, end = float(row.at["begin"]), float(row.at["end"])
    return (begin * end) ** 0.5 if begin else end / 2
