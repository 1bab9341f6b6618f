"""Losses and perplexities by length and by position."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ropepatch.report.plots.style import (
    DASHES,
    FAINT,
    LABEL,
    Look,
    canvas,
    length_axis,
    looks,
    name_lines,
    shown,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ropepatch.evaluation.comparisons import Comparison
    from ropepatch.evaluation.curves import LossCurve
    from ropepatch.evaluation.results import Row

HEADROOM = 1.0  # nats by which a picture goes on beyond its best line, at most
LARGEST = 700  # nats, whose exponential is a number


class Line(NamedTuple):
    """Values in nats over lengths in tokens; the interval is empty where none is known."""

    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]


def plot_loss(curves: Mapping[str, LossCurve], *, trained: int, floor: LossCurve | None = None) -> Figure:
    """The loss by position of several models over the same documents, in nats per token.

    Args:
        curves: What to draw, by name; the first in grey, as the model that others are compared with.
        trained: The context the model was trained on, in tokens; marked.
        floor: The loss that no model can beat, where it is known; dotted.
    """
    lines = {name: _binned(curve) for name, curve in curves.items()}
    dotted = None if floor is None else _binned(floor)
    look = looks(lines, unscaled=[*lines][:1])
    with canvas(_height(lines)) as figure:
        axes = figure.subplots()
        axes.set_title("loss, nats per token")
        _draw(axes, lines, look, dotted)
        end = max(map(len, next(iter(curves.values())).nll)) + 1
        axes.set_xlim(min(x for line in lines.values() for x in line.x) / 1.04, end)
        length_axis(axes, _doublings(trained, 1, end), trained=trained, label="position, tokens")
        axes.set_ylim(bottom=0)
        _name(axes, lines, look, dotted, _nats)
    return figure


def plot_perplexity(comparison: Comparison, look: Mapping[str, Look]) -> Figure:
    """Perplexity against length, on a logarithmic axis, with the intervals as bands.

    What is far above the best line leaves the picture and is named with its last value.
    """
    lines = {name: _by_length(rows) for name, rows in comparison.rows("loss", "length").items()}
    least = comparison.floor.of("loss", "length") if comparison.floor else []
    floor = _by_length(least) if least else None
    with canvas(_height(lines)) as figure:
        axes = figure.subplots()
        axes.set_title(f"{shown(comparison.model)}: perplexity")
        _limit(axes, lines, floor, worse=1)
        _draw(axes, lines, look, floor, marker="o")
        lengths = comparison.lengths("loss")
        axes.set_xlim(lengths[0] / 1.04, lengths[-1] * 1.04)
        length_axis(axes, lengths, trained=comparison.trained, label="length, tokens")
        ticks = _perplexities(*(math.exp(min(nats, LARGEST)) for nats in axes.get_ylim()))
        axes.set_yticks([math.log(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
        _name(axes, lines, look, floor, lambda nats: _short(math.exp(min(nats, LARGEST))))
    return figure


def plot_positions(comparison: Comparison, look: Mapping[str, Look]) -> Figure:
    """The mean loss of every stretch of positions, with the intervals as bands and the floor dotted.

    What is far above the best line leaves the picture and is named with its last value.
    """
    floor = comparison.floor.of("loss", "begin", "end") if comparison.floor else None
    return _stretches(comparison, "loss", look, "loss, nats per token", 1, floor)


def plot_gain(comparison: Comparison, look: Mapping[str, Look]) -> Figure:
    """What the context beyond the trained one brings, in nats per token; below 0 it does harm."""
    title = "gained from the context beyond the trained one, nats per token"
    figure = _stretches(comparison, "gain", look, title, -1, None)
    figure.axes[0].axhline(0, color=FAINT, linewidth=0.9, zorder=0.9)
    return figure


def _stretches(
    comparison: Comparison,
    measure: str,
    look: Mapping[str, Look],
    title: str,
    worse: int,
    floor: Sequence[Row] | None,
) -> Figure:
    tables, trained = comparison.rows(measure, "begin", "end"), comparison.trained
    lines = {name: _by_position(rows) for name, rows in tables.items()}
    dotted = _by_position(floor) if floor else None
    ends = [int(row.at["end"]) for rows in tables.values() for row in rows]
    with canvas(_height(lines)) as figure:
        axes = figure.subplots()
        axes.set_title(f"{shown(comparison.model)}: {title}")
        _limit(axes, lines, dotted, worse=worse)
        _draw(axes, lines, look, dotted)
        begin, end = min(x for line in lines.values() for x in line.x), max(ends)
        axes.set_xlim(min(begin / 1.04, trained), end)
        length_axis(axes, _doublings(trained, begin, end), trained=trained, label="position, tokens")
        _name(axes, lines, look, dotted, _nats)
    return figure


def _draw(
    axes: Axes,
    lines: Mapping[str, Line],
    look: Mapping[str, Look],
    floor: Line | None,
    marker: str | None = None,
) -> None:
    bottom, top = axes.get_ylim()
    for name, line in lines.items():
        colour, dash = look[name]
        if line.low:
            # The band of a line that has left the picture would stand there alone.
            seen = [bottom <= y <= top for y in line.y]
            alpha = min(0.14, 0.6 / len(lines))
            axes.fill_between(line.x, line.low, line.high, where=seen, color=colour, alpha=alpha, linewidth=0)
        axes.plot(line.x, line.y, color=colour, linestyle=dash, label=name, marker=marker, markersize=3.5)
    if floor is not None:
        axes.plot(floor.x, floor.y, color=FAINT, linestyle=DASHES[2], label="floor")


def _limit(axes: Axes, lines: Mapping[str, Line], floor: Line | None, *, worse: int) -> None:
    """Show the best at every length and HEADROOM beyond the worst of these; worse is up, 1, or down, -1."""
    least: dict[float, float] = {}
    for line in lines.values():
        for x, y in zip(line.x, line.y, strict=True):
            least[x] = min(least.get(x, math.inf), worse * y)
    values = [worse * y for line in lines.values() for y in (*line.y, *line.low, *line.high)]
    values += [worse * y for y in floor.y] if floor is not None else []
    end = min(max(values), max(least.values()) + HEADROOM)
    start = min(values)
    pad = max(0.06 * (end - start), 0.01)
    axes.set_ylim(*sorted((worse * (start - pad), worse * (end + pad))))


def _name(
    axes: Axes,
    lines: Mapping[str, Line],
    look: Mapping[str, Look],
    floor: Line | None,
    value: Callable[[float], str],
) -> None:
    """Names to the right of the lines, joined to their ends; with the last value of what left the picture."""
    drawn = [(name, look[name], line) for name, line in lines.items()]
    if floor is not None:
        drawn.append(("floor", Look(FAINT, DASHES[2]), floor))
    ends = [(name, look, line.x[-1], line.y[-1]) for name, look, line in drawn]
    name_lines(axes, ends, _height(lines) - 0.9, value)


def _doublings(trained: int, begin: float, end: float) -> list[float]:
    """The trained context, halved and doubled, between the two, and the end."""
    near = [trained * 2.0**k for k in range(-20, 21)]
    return [*(length for length in near if begin <= length <= end), end]


def _height(lines: Mapping[str, Line]) -> float:
    return max(3.2, 1.2 + LABEL * (len(lines) + 1))


def _by_length(rows: Sequence[Row]) -> Line:
    return _line(rows, lambda row: float(row.length))


def _by_position(rows: Sequence[Row]) -> Line:
    """At the middles of the stretches, on a logarithmic axis."""
    return _line(rows, lambda row: _middle(float(row.at["begin"]), float(row.at["end"])))


def _line(rows: Sequence[Row], place: Callable[[Row], float]) -> Line:
    """Values over places; with both ends of their intervals where every row has both."""
    ordered = sorted(rows, key=place)
    low, high = (
        [end for end in ends if end is not None]
        for ends in zip(*((r.low, r.high) for r in ordered), strict=True)
    )
    known = len(low) == len(high) == len(ordered)
    return Line(
        list(map(place, ordered)),
        [math.inf if row.value is None else row.value for row in ordered],
        low if known else [],
        high if known else [],
    )


def _middle(begin: float, end: float) -> float:
    return float((begin * end) ** 0.5 if begin else end / 2)


def _binned(curve: LossCurve) -> Line:
    """Middles of stretches of positions, each a quarter longer than the last, and the mean loss in each."""
    end = max(map(len, curve.nll)) + 1
    edges = [1]
    while edges[-1] < end:
        edges.append(min(end, max(edges[-1] + 8, edges[-1] * 5 // 4)))
    spans = list(pairwise(edges))
    return Line(
        [_middle(begin, stop) for begin, stop in spans],
        [curve.between(begin, stop).mean for begin, stop in spans],
        [],
        [],
    )


def _perplexities(low: float, high: float) -> list[float]:
    """Round numbers between the two, about five."""
    lowest, highest = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for ratio, steps in ((1e3, (1,)), (8, (1, 2, 5)), (2.2, (1, 1.5, 2, 3, 4, 5, 7))):
        if high / low > ratio:
            decades = range(lowest, highest + 1, max(1, (highest - lowest) // 6))
            return [step * 10.0**k for k in decades for step in steps if low <= step * 10.0**k <= high]
    size = 10 ** math.floor(math.log10(high - low))
    step = next(s * size for s in (0.1, 0.2, 0.25, 0.5, 1, 2) if (high - low) / (s * size) <= 6)
    return [round(k * step, 10) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _nats(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _short(perplexity: float) -> str:
    if perplexity >= 1e5:
        return f"{perplexity:.1e}".replace("e+0", "e").replace("e+", "e")
    return f"{perplexity:.3g}" if perplexity < 1000 else f"{perplexity:.0f}"
