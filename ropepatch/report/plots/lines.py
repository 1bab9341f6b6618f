"""Figures of losses, gains and answers, by length, position or depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ropepatch.report.plots.style import (
    FAINT,
    Look,
    canvas,
    legend_beside,
    length_axis,
    plain_log_axis,
    shown,
)
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ropepatch.evaluation.comparisons import Comparison
    from ropepatch.evaluation.results import Row

LARGEST = 300.0  # nats whose perplexity, with the ticks beyond it, a float can hold
HEADROOM = 1.0  # nats that a figure shows beyond the worst value of the best lines
FLOOR_LOOK = Look(FAINT, ":")
Rows = Mapping[str, Sequence["Row"]]  # by name of the result


def plot_perplexity(comparison: Comparison, look: Mapping[str, Look]) -> Figure:
    """Perplexity by length, on logarithmic axes, with the intervals as bands."""
    with canvas() as figure:
        axes = figure.subplots()
        axes.set_title(f"{shown(comparison.model)}: perplexity")
        plain_log_axis(axes)
        rows = comparison.rows("loss", "length")
        _draw(axes, comparison, rows, look, of=np.exp)
        low, high = _span(rows)
        axes.set_ylim(*(math.exp(min(end, LARGEST)) for end in (low, high)))
        length_axis(axes, trained=comparison.trained, label="length, tokens")
        legend_beside(axes)
    return figure


def plot_positions(comparison: Comparison, look: Mapping[str, Look]) -> Figure:
    """The mean loss by range of positions, with the intervals as bands and the floor dotted."""
    with canvas() as figure:
        axes = figure.subplots()
        axes.set_title(f"{shown(comparison.model)}: loss (nats/token)")
        rows = comparison.rows("loss", "begin", "end")
        _draw(axes, comparison, rows, look)
        axes.set_ylim(_span(rows))
        length_axis(axes, trained=comparison.trained, label="position, tokens")
        legend_beside(axes)
    return figure


def plot_gain(comparison: Comparison, look: Mapping[str, Look]) -> Figure:
    """The gain from the context beyond the original length, in nats per token; below 0 it is harmful."""
    with canvas() as figure:
        axes = figure.subplots()
        axes.set_title(
            f"{shown(comparison.model)}: gain from the longer context (nats/token)"
        )
        _draw(axes, comparison, comparison.rows("gain", "begin", "end"), look)
        axes.axhline(0, color=FAINT, linewidth=0.9)
        length_axis(axes, trained=comparison.trained, label="position, tokens")
        legend_beside(axes)
    return figure


def plot_found(comparison: Comparison, look: Mapping[str, Look]) -> Figure:
    """The retrieval accuracy by length, with the intervals as bands; one panel for every kind of question."""
    series = [one for one in comparison.series if one.measure == "found"]
    with canvas(0.4 + 2.4 * len(series)) as figure:
        panels = figure.subplots(len(series), sharex=True, squeeze=False).flatten()
        for axes, one in zip(panels, series, strict=True):
            axes.set_title(
                f"{shown(comparison.model)}: {one.title.lower()}{comparison.reservation(one)}"
            )
            rows = {name: one.of(result) for name, result in comparison.results.items()}
            _draw(axes, comparison, rows, look)
            axes.set_ylim(-0.03, 1.03)
            axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
            length_axis(axes, trained=comparison.trained, label="length, tokens")
        legend_beside(panels[0])
    return figure


def plot_depths(comparison: Comparison, kind: str | None = None) -> Figure:
    """The retrieval accuracy by length and depth of the needle, a panel for every result."""
    keys = ("length", "depth") if kind is None else ("kind", "length", "depth")
    found = comparison.rows("found", *keys)
    with canvas(0.6 + 1.6 * len(found)) as figure:
        panels = figure.subplots(len(found), sharex=True, squeeze=False).flatten()
        for axes, (name, rows) in zip(panels, found.items(), strict=True):
            shares = {
                (float(row.at["depth"]), row.length): row.value
                for row in rows
                if kind is None or row.at["kind"] == kind
            }
            depths = sorted({depth for depth, _ in shares})
            lengths = sorted({length for _, length in shares})
            table = [
                [shares.get((depth, length), math.nan) for length in lengths]
                for depth in depths
            ]
            image = axes.imshow(
                np.array(table, dtype=float),
                cmap="Blues",
                vmin=0,
                vmax=1,
                aspect="auto",
            )
            axes.grid(visible=False)
            axes.set_title(shown(name))
            axes.set_xticks(
                range(len(lengths)), [short_length(length) for length in lengths]
            )
            axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
            axes.set_ylabel("depth")
        panels[-1].set_xlabel("length, tokens")
        figure.colorbar(
            image, ax=panels.tolist(), format=lambda share, _: f"{share:.0%}"
        )
    return figure


def _draw(
    axes: Axes,
    comparison: Comparison,
    rows_by_name: Rows,
    look: Mapping[str, Look],
    of: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> None:
    """A line for every result, and its intervals as a band if every row has one; the floor is dotted."""
    for name, unordered in rows_by_name.items():
        rows = sorted(unordered, key=_place)
        places = [_place(row) for row in rows]
        value = np.array([row.value for row in rows], dtype=float)  # None is NaN
        low = np.array([row.low for row in rows], dtype=float)
        high = np.array([row.high for row in rows], dtype=float)
        colour, dash = look[name]
        axes.plot(
            places,
            of(value),
            color=colour,
            linestyle=dash,
            label=name,
            marker="o",
            markersize=3,
        )
        if not np.isnan([low, high]).any():
            axes.fill_between(
                places, of(low), of(high), color=colour, alpha=0.12, linewidth=0
            )
    if comparison.floor is not None and rows_by_name:
        first = next(iter(rows_by_name.values()))[0]
        bounds = sorted(comparison.floor.of(first.measure, *first.at), key=_place)
        if bounds:
            values = of(np.array([row.value for row in bounds], dtype=float))
            colour, dash = FLOOR_LOOK
            axes.plot(
                [_place(row) for row in bounds],
                values,
                color=colour,
                linestyle=dash,
                label="floor",
            )


def _span(rows_by_name: Rows) -> tuple[float, float]:
    """The ends of an axis in nats: the least value, and `HEADROOM` above the greatest of the best lines."""
    best: dict[float, float] = {}
    values = []
    for rows in rows_by_name.values():
        for row in rows:
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
