"""Figures of losses and perplexities, by length and by position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ropepatch.evaluation.results import Series
from ropepatch.report.plots.style import DASHES, FAINT, LABEL, Look, canvas, length_axis, name_lines, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ropepatch.evaluation.comparisons import Comparison
    from ropepatch.evaluation.results import Row

HEADROOM = 1.0  # nats that a figure shows above its best line, at most
LARGEST = 700  # nats; beyond it the perplexity overflows
FLOOR = Look(FAINT, DASHES[2])


class Line(NamedTuple):
    """Values in nats over lengths in tokens; the interval is empty if unknown."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Line:
        """The values of rows, with their intervals if every row has one."""
        ordered = sorted(rows, key=_place)
        low = [row.low for row in ordered if row.low is not None]
        high = [row.high for row in ordered if row.high is not None]
        known = len(low) == len(high) == len(ordered)
        values = [math.inf if row.value is None else row.value for row in ordered]
        return cls([*map(_place, ordered)], values, low if known else [], high if known else [])


def plot_perplexity(comparison: Comparison, look: Mapping[str, Look]) -> Figure:
    """Perplexity against length, on a logarithmic axis, with the intervals as bands.

    Values far above the best line are cut off, and the label of the line has its last value.
    """
    lengths = comparison.lengths(Series("loss"))
    figure = _figure(
        comparison,
        look,
        ("loss", "length"),
        title="perplexity",
        label="length, tokens",
        ticks=lengths,
        span=(lengths[0] / 1.04, lengths[-1] * 1.04),
        value=lambda nats: _short(math.exp(min(nats, LARGEST))),
        marker="o",
    )
    axes = figure.axes[0]
    ticks = _perplexities(*(math.exp(min(nats, LARGEST)) for nats in axes.get_ylim()))
    axes.set_yticks([math.log(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
    return figure


def plot_positions(comparison: Comparison, look: Mapping[str, Look]) -> Figure:
    """The mean loss by range of positions, with the intervals as bands and the floor dotted.

    Values far above the best line are cut off, and the label of the line has its last value.
    """
    return _stretches(comparison, look, "loss", "loss (nats/token)")


def plot_gain(comparison: Comparison, look: Mapping[str, Look]) -> Figure:
    """The gain from the context beyond the original length, in nats per token; below 0 it is harmful."""
    title = "gain from the context beyond the original length (nats/token)"
    figure = _stretches(comparison, look, "gain", title, worse=-1)
    figure.axes[0].axhline(0, color=FAINT, linewidth=0.9, zorder=0.9)
    return figure


def _stretches(
    comparison: Comparison, look: Mapping[str, Look], measure: str, title: str, worse: int = 1
) -> Figure:
    stretches = [row for rows in comparison.rows(measure, "begin", "end").values() for row in rows]
    begin, end = min(map(_place, stretches)), max(int(row.at["end"]) for row in stretches)
    doublings = (comparison.trained * 2.0**k for k in range(-20, 21))
    return _figure(
        comparison,
        look,
        (measure, "begin", "end"),
        title=title,
        label="position, tokens",
        ticks=[*(length for length in doublings if begin <= length <= end), end],
        span=(min(begin / 1.04, comparison.trained), end),
        worse=worse,
    )


def _figure(
    comparison: Comparison,
    look: Mapping[str, Look],
    rows: tuple[str, ...],
    *,
    title: str,
    label: str,
    ticks: Iterable[float],
    span: tuple[float, float],
    worse: int = 1,
    value: Callable[[float], str] = lambda nats: f"{nats:.2f}".replace("-", "−"),
    marker: str | None = None,
) -> Figure:
    """Lines with their bands, their names to the right; the floor is dotted.

    Args:
        comparison: The results.
        look: The look of each, by name.
        rows: A measure and the keys of its places.
        title: The measure in words.
        label: The label of the axis of tokens.
        ticks: The lengths that may have a tick.
        span: The ends of the axis of tokens.
        worse: 1 if higher values are worse and cut off, -1 if lower ones are.
        value: Formats the last value of a line that is cut off.
        marker: The marker of single points.
    """
    lines = {name: Line.of(found) for name, found in comparison.rows(*rows).items()}
    bounds = comparison.floor.of(*rows) if comparison.floor else []
    floor = {"floor": Line.of(bounds)._replace(low=(), high=())} if bounds else {}
    look = {**look, "floor": FLOOR} if floor else look
    height = max(3.2, 1.2 + LABEL * (len(lines) + 1))
    with canvas(height) as figure:
        axes = figure.subplots()
        axes.set_title(f"{shown(comparison.model)}: {title}")
        axes.set_ylim(*_limits(lines.values(), floor.values(), worse))
        for name, line in lines.items():
            _draw(axes, name, line, look[name], min(0.14, 0.6 / len(lines)), marker)
        for name, line in floor.items():
            _draw(axes, name, line, FLOOR)
        axes.set_xlim(span)
        length_axis(axes, ticks, trained=comparison.trained, label=label)
        ends = [(name, look[name], line.x[-1], line.y[-1]) for name, line in {**lines, **floor}.items()]
        name_lines(axes, ends, height - 0.9, value)
    return figure


def _draw(axes: Axes, name: str, line: Line, look: Look, alpha: float = 0, marker: str | None = None) -> None:
    if line.low:
        # Without the line, its band would be misleading.
        bottom, top = axes.get_ylim()
        seen = [bottom <= y <= top for y in line.y]
        axes.fill_between(
            line.x, line.low, line.high, where=seen, color=look.colour, alpha=alpha, linewidth=0
        )
    axes.plot(
        line.x, line.y, color=look.colour, linestyle=look.dash, label=name, marker=marker, markersize=3.5
    )


def _limits(lines: Iterable[Line], floor: Iterable[Line], worse: int) -> tuple[float, float]:
    """The ends of an axis that shows the best values at every length, and HEADROOM beyond the worst."""
    best: dict[float, float] = {}
    values = [worse * y for line in floor for y in line.y]
    for line in lines:
        values += [worse * y for y in (*line.y, *line.low, *line.high)]
        for x, y in zip(line.x, line.y, strict=True):
            best[x] = min(best.get(x, math.inf), worse * y)
    start, end = min(values), min(max(values), max(best.values()) + HEADROOM)
    pad = max(0.06 * (end - start), 0.01)
    low, high = sorted((worse * (start - pad), worse * (end + pad)))
    return low, high


def _place(row: Row) -> float:
    """The length of a row, or the middle of its range of positions on a logarithmic axis."""
    if "length" in row.at:
        return float(row.at["length"])
    begin, end = float(row.at["begin"]), float(row.at["end"])
    return (begin * end) ** 0.5 if begin else end / 2


def _perplexities(low: float, high: float) -> list[float]:
    """About five round numbers between the two."""
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
