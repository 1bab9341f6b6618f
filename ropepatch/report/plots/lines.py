"""Figures of results: losses, gains and answers by length, position or depth."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ropepatch.evaluation.results import (
    FLOOR,
    Comparison,
    Result,
    Row,
    by_place,
    comparisons,
    slug,
)
from ropepatch.report.plots.style import (
    DASHED,
    FAINT,
    PLAIN,
    Look,
    canvas,
    legend_beside,
    looks,
    plain_log_axis,
    shown,
)
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST = 300.0  # nats whose perplexity, with the ticks beyond it, a float can hold
HEADROOM = 1.0  # nats that a figure shows beyond the worst value of the best line
CURVES = {  # by name: the measure, the keys of its places, the title of the axis, the caption
    "perplexity": (
        "loss",
        ("length",),
        "perplexity",
        "Perplexity by length, on logarithmic axes",
    ),
    "positions": (
        "loss",
        ("begin", "end"),
        "loss (nats/token)",
        "Mean loss of the tokens at these positions",
    ),
    "gain": (
        "gain",
        ("begin", "end"),
        "gain (nats/token)",
        "Gain of a token from the context beyond the original length",
    ),
}
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
    drawn: dict[str, Figure] = {}
    for (model, target), alike in places.items():
        place = [Path(model).name, short_length(target)] if len(places) > 1 else []
        for group in alike:
            for picture in pictures_of_results(group, look):
                add_figure(drawn, picture.figure, *place, picture.name)
    return drawn


def add_figure(drawn: dict[str, Figure], figure: Figure, *parts: str) -> None:
    """Add a figure under a unique name made of these parts."""
    stem = slug("-".join(parts)).strip("-.")
    name, numbers = stem, itertools.count(2)
    while name in drawn:
        name = f"{stem}-{next(numbers)}"
    drawn[name] = figure


def looks_of(results: Sequence[Result]) -> dict[str, Look]:
    """A look for every name in the comparisons of the results; baselines are grey, the floor is dotted."""
    fixed, names = {FLOOR: Look(FAINT, ":")}, []
    for group in comparisons(results):
        for name, result in group.results.items():
            if result.scaling is None:
                fixed[name] = Look(PLAIN)
            names.append(name)
    return looks(name for name in names if name not in fixed) | fixed


def pictures_of_results(comparison: Comparison, look: Looks) -> list[Picture]:
    """The figures that the rows of a comparison allow."""
    original = short_length(comparison.trained)
    note = f"bands: 95 % intervals; dashed: the original length of {original} tokens."
    pictures = []
    for name, (measure, keys, title, caption) in CURVES.items():
        rows = comparison.rows(measure, *keys)
        if rows:
            of = _perplexity if name == "perplexity" else np.asarray
            figure = _plot_lines(comparison, look, {title: rows}, of)
            if name == "perplexity":
                plain_log_axis(figure.axes[0])
            if measure == "loss":
                _limit(figure.axes[0], rows, of)
            pictures.append(Picture(name, figure, f"{caption}; {note}"))
    answers = {}
    for series in comparison.series:
        if series.measure == "found":
            title = f"{series.title.lower()}{comparison.reservation(series)}"
            named = comparison.results.items()
            answers[title] = {name: series.of(result) for name, result in named}
    if answers:
        figure = _plot_lines(comparison, look, answers)
        for axes in figure.axes:
            axes.set_ylim(-0.03, 1.03)
            axes.yaxis.set_major_formatter("{x:.0%}")
        caption = f"Retrieval accuracy by prompt length; {note}"
        pictures.append(Picture("retrieval", figure, caption))
    return pictures


def _perplexity(nats: np.ndarray) -> np.ndarray:
    perplexity: np.ndarray = np.exp(nats.clip(max=LARGEST))
    return perplexity


def _plot_lines(
    comparison: Comparison,
    look: Looks,
    panels: Mapping[str, Rows],
    of: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> Figure:
    """A line for every result in panels by title, with the original length marked."""
    with canvas(0.8 + 2.4 * len(panels)) as figure:
        grid = figure.subplots(len(panels), sharex=True, squeeze=False).flatten()
        for axes, (title, rows_by_name) in zip(grid, panels.items(), strict=True):
            axes.set_title(f"{shown(comparison.model)}: {title}")
            for name, rows in rows_by_name.items():
                _draw(axes, rows, name, look[name], of)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda n, _: short_length(round(n)))
            axes.set_xlabel("tokens")
            axes.axvline(comparison.trained, **DASHED)
        legend_beside(grid[0])
    return figure


def _draw(
    axes: Axes,
    unordered: Sequence[Row],
    name: str,
    look: Look,
    of: Callable[[np.ndarray], np.ndarray],
) -> None:
    """A line, and its intervals as a band if every row has one."""
    rows = sorted(unordered, key=_place)
    places = [_place(row) for row in rows]
    numbers = [(row.value, row.low, row.high) for row in rows]
    value, low, high = np.array(numbers, dtype=float).reshape(-1, 3).T  # None is NaN
    style: Any = {"color": look.colour, "linestyle": look.dash, "markersize": 3}
    axes.plot(places, of(value), marker="o", label=name, **style)
    if not np.isnan([low, high]).any():
        band: Any = {"color": look.colour, "alpha": 0.12, "linewidth": 0}
        axes.fill_between(places, of(low), of(high), **band)


def _limit(axes: Axes, losses: Rows, of: Callable[[np.ndarray], np.ndarray]) -> None:
    """End the axis `HEADROOM` above the worst value of the best line, beyond which lines leave the figure."""
    worst = []
    for name, rows in losses.items():
        values = [row.value for row in rows if row.value is not None]
        if values and name != FLOOR:
            worst.append(max(values))
    if worst:
        top = float(of(np.array(min(worst) + HEADROOM)))
        axes.set_ylim(top=min(top, axes.get_ylim()[1]))


def _place(row: Row) -> float:
    """The length of a row, or the middle of its range of positions on a logarithmic axis."""
    if "length" in row.at:
        return float(row.at["length"])
    begin, end = float(row.at["begin"]), float(row.at["end"])
    return (begin * end) ** 0.5 if begin else end / 2
