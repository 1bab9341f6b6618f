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
FLOOR = Look(FAINT, DASHES[2])


class Line(NamedTuple):
    """Values in nats over lengths in tokens; the interval is empty where none is known."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


class Frame(NamedTuple):
    """The axes around lines."""

    title: str  # with the unit of the values
    label: str  # of the axis of tokens
    trained: int  # the trained context in tokens, marked
    ticks: Sequence[float]  # lengths that may have a tick
    span: tuple[float, float]  # of the axis of tokens
    worse: int = 1  # leaves the picture upwards; -1: downwards; 0: all is drawn, from 0 on
    value: Callable[[float], str] = lambda nats: f"{nats:.2f}".replace("-", "−")
    marker: str | None = None


def plot_loss(curves: Mapping[str, LossCurve], *, trained: int, floor: LossCurve | None = None) -> Figure:
    """The loss by position of several models over the same documents, in nats per token.

    Args:
        curves: What to draw, by name; the first in grey, as the model that others are compared with.
        trained: The context the model was trained on, in tokens; marked.
        floor: The loss that no model can beat, where it is known; dotted.
    """
    lines = {name: _binned(curve) for name, curve in curves.items()}
    end = max(map(len, next(iter(curves.values())).nll)) + 1
    span = min(x for line in lines.values() for x in line.x) / 1.04, end
    ticks = _doublings(trained, 1, end)
    frame = Frame("loss, nats per token", "position, tokens", trained, ticks, span, worse=0)
    return _figure(
        frame, lines, looks(lines, unscaled=[*lines][:1]), None if floor is None else _binned(floor)
    )


def plot_perplexity(comparison: Comparison, look: Mapping[str, Look]) -> Figure:
    """Perplexity against length, on a logarithmic axis, with the intervals as bands.

    What is far above the best line leaves the picture and is named with its last value.
    """
    lines = {name: _line(rows) for name, rows in comparison.rows("loss", "length").items()}
    least = comparison.floor.of("loss", "length") if comparison.floor else []
    lengths = comparison.lengths("loss")
    frame = Frame(
        f"{shown(comparison.model)}: perplexity",
        "length, tokens",
        comparison.trained,
        lengths,
        (lengths[0] / 1.04, lengths[-1] * 1.04),
        value=lambda nats: _short(math.exp(min(nats, LARGEST))),
        marker="o",
    )
    figure = _figure(frame, lines, look, _line(least) if least else None)
    axes = figure.axes[0]
    ticks = _perplexities(*(math.exp(min(nats, LARGEST)) for nats in axes.get_ylim()))
    axes.set_yticks([math.log(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
    return figure


def plot_positions(comparison: Comparison, look: Mapping[str, Look]) -> Figure:
    """The mean loss of every stretch of positions, with the intervals as bands and the floor dotted.

    What is far above the best line leaves the picture and is named with its last value.
    """
    return _stretches(comparison, look, "loss", "loss, nats per token", 1)


def plot_gain(comparison: Comparison, look: Mapping[str, Look]) -> Figure:
    """The gain from the context beyond the trained one, in nats per token; below 0 it does harm."""
    title = "gained from the context beyond the trained one, nats per token"
    figure = _stretches(comparison, look, "gain", title, -1)
    figure.axes[0].axhline(0, color=FAINT, linewidth=0.9, zorder=0.9)
    return figure


def _stretches(
    comparison: Comparison, look: Mapping[str, Look], measure: str, title: str, worse: int
) -> Figure:
    tables, trained = comparison.rows(measure, "begin", "end"), comparison.trained
    lines = {name: _line(rows) for name, rows in tables.items()}
    least = comparison.floor.of(measure, "begin", "end") if comparison.floor else []
    begin = min(x for line in lines.values() for x in line.x)
    end = max(int(row.at["end"]) for rows in tables.values() for row in rows)
    ticks, span = _doublings(trained, begin, end), (min(begin / 1.04, trained), end)
    heading = f"{shown(comparison.model)}: {title}"
    frame = Frame(heading, "position, tokens", trained, ticks, span, worse)
    return _figure(frame, lines, look, _line(least) if least else None)


def _figure(frame: Frame, lines: Mapping[str, Line], look: Mapping[str, Look], floor: Line | None) -> Figure:
    """Lines with their bands in a frame, their names to the right; the floor is dotted."""
    height = max(3.2, 1.2 + LABEL * (len(lines) + 1))
    with canvas(height) as figure:
        axes = figure.subplots()
        axes.set_title(frame.title)
        if frame.worse:
            axes.set_ylim(*_limits(lines, floor, frame.worse))
        for name, line in lines.items():
            _draw(axes, name, line, look[name], min(0.14, 0.6 / len(lines)), frame.marker)
        drawn = [(name, look[name], line) for name, line in lines.items()]
        if floor is not None:
            _draw(axes, "floor", floor._replace(low=()), FLOOR)
            drawn.append(("floor", FLOOR, floor))
        axes.set_xlim(frame.span)
        length_axis(axes, frame.ticks, trained=frame.trained, label=frame.label)
        if not frame.worse:
            axes.set_ylim(bottom=0)
        ends = [(name, look, line.x[-1], line.y[-1]) for name, look, line in drawn]
        name_lines(axes, ends, height - 0.9, frame.value)
    return figure


def _draw(axes: Axes, name: str, line: Line, look: Look, alpha: float = 0, marker: str | None = None) -> None:
    if line.low:
        # The band of a line that has left the picture would stand there alone.
        bottom, top = axes.get_ylim()
        seen = [bottom <= y <= top for y in line.y]
        axes.fill_between(
            line.x, line.low, line.high, where=seen, color=look.colour, alpha=alpha, linewidth=0
        )
    axes.plot(
        line.x, line.y, color=look.colour, linestyle=look.dash, label=name, marker=marker, markersize=3.5
    )


def _limits(lines: Mapping[str, Line], floor: Line | None, worse: int) -> tuple[float, float]:
    """The ends of an axis that shows the best at every length and HEADROOM beyond the worst of these."""
    least: dict[float, float] = {}
    for line in lines.values():
        for x, y in zip(line.x, line.y, strict=True):
            least[x] = min(least.get(x, math.inf), worse * y)
    values = [worse * y for line in lines.values() for y in (*line.y, *line.low, *line.high)]
    values += [worse * y for y in floor.y] if floor is not None else []
    start, end = min(values), min(max(values), max(least.values()) + HEADROOM)
    pad = max(0.06 * (end - start), 0.01)
    low, high = sorted((worse * (start - pad), worse * (end + pad)))
    return low, high


def _doublings(trained: int, begin: float, end: float) -> list[float]:
    """The trained context, halved and doubled, between the two, and the end."""
    near = [trained * 2.0**k for k in range(-20, 21)]
    return [*(length for length in near if begin <= length <= end), end]


def _place(row: Row) -> float:
    """Its length, or the middle of its stretch."""
    return float(row.at["length"]) if "length" in row.at else _middle(row.at["begin"], row.at["end"])


def _middle(begin: int | float | str, end: int | float | str) -> float:
    """The middle of a stretch on a logarithmic axis."""
    return (float(begin) * float(end)) ** 0.5 if begin else float(end) / 2


def _line(rows: Sequence[Row]) -> Line:
    """Values over places; with both ends of their intervals where every row has both."""
    ordered = sorted(rows, key=_place)
    low, high = (
        [end for end in ends if end is not None]
        for ends in zip(*((r.low, r.high) for r in ordered), strict=True)
    )
    known = len(low) == len(high) == len(ordered)
    values = [math.inf if row.value is None else row.value for row in ordered]
    return Line(list(map(_place, ordered)), values, low if known else [], high if known else [])


def _binned(curve: LossCurve) -> Line:
    """Middles of stretches of positions, each a quarter longer than the last, and the mean loss in each."""
    end = max(map(len, curve.nll)) + 1
    edges = [1]
    while edges[-1] < end:
        edges.append(min(end, max(edges[-1] + 8, edges[-1] * 5 // 4)))
    spans = list(pairwise(edges))
    return Line([_middle(*span) for span in spans], [curve.between(*span).mean for span in spans])


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


def _short(perplexity: float) -> str:
    if perplexity >= 1e5:
        return f"{perplexity:.1e}".replace("e+0", "e").replace("e+", "e")
    return f"{perplexity:.3g}" if perplexity < 1000 else f"{perplexity:.0f}"
