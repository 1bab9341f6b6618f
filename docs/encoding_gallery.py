"""Figures of position encodings: the sinusoids, biases, rotations, and losses by length.

Every plot raises a RopepatchError if matplotlib is not installed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from encoding_tables import from_scratch
from torch import Tensor

from ropepatch.encodings import ENCODINGS
from ropepatch.encodings.absolute import Sinusoidal
from ropepatch.encodings.relative import buckets_of, slopes
from ropepatch.errors import RopepatchError
from ropepatch.report.plots.style import (
    COLOURS,
    FAINT,
    GRID,
    INK,
    PLAIN,
    QUIET,
    canvas,
    legend_beside,
    length_axis,
    looks,
)
from ropepatch.scaling.rope import Rope

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parents[1] / "eval" / "results" / "encodings.json"
SIGNED, RISING = "RdBu_r", "Blues"
POSITIONS, CHANNELS = 128, 128  # of the tables that are drawn
TRAINED = "learned, untrained"
TRAINED = 128  # tokens, in the study
HEADROOM = 2.5  # nats that the picture shows above its best value

Curve = dict[int, float]


def plot_encoding_gallery() -> dict[str, Figure]:
    """All figures, by names that serve as file names; all computed here, but for what the study measured.

    Raises:
        RopepatchError: If matplotlib is not installed.
    """
    curves, floor = measured_curves()
    return {
        "sinusoidal-table": plot_sinusoidal_table(),
        "sinusoidal-distances": plot_distances(),
        "rope-turns": plot_turns(),
        "biases": plot_biases(),
        "extrapolation": plot_extrapolation(curves, TRAINED, floor),
    }


# Maps of colour


def sinusoids() -> Tensor:
    """The table that is drawn: [POSITIONS, CHANNELS]."""
    return Sinusoidal().vectors(torch.arange(POSITIONS), CHANNELS)


def plot_sinusoidal_table() -> Figure:
    """The sinusoidal table: a row per position, a column per channel."""
    with canvas(4.2) as figure:
        axes = figure.subplots()
        image = _map(axes, sinusoids(), SIGNED, -1, 1)
        axes.set(xlabel="channel: sin in even ones, cos in odd ones", ylabel="position")
        axes.set_title("sinusoidal: every channel is a wave over the positions, the last ones the slowest")
        figure.colorbar(image, ax=axes, ticks=[-1, 0, 1], shrink=0.6)
    return figure


def plot_biases(heads: int = 8, shown: Sequence[int] = (1, 2, 4, 8), tokens: int = 160) -> Figure:
    """Biases that ALiBi and T5 add to the scores of a few heads; of T5, whose numbers are trained, buckets.

    Args:
        heads: H.
        shown: The heads that are drawn, counted from 1.
        tokens: The length of the text.
    """
    positions = torch.arange(tokens)
    distances = positions[:, None] - positions
    buckets = buckets_of(distances.clamp(min=0), 32, 128)
    drawn = torch.randn(32, len(shown) - 1, generator=torch.Generator().manual_seed(0))
    below = 12  # of a score, where colours end
    with canvas(4.6, width=8.4) as figure:
        upper, lower = figure.subplots(2, len(shown), sharex=True, sharey=True)
        for axes, head in zip(upper, shown, strict=True):
            slope = float(slopes(heads)[head - 1])
            image = _map(axes, _behind(-slope * distances, distances), f"{RISING}_r", -below, 0)
            axes.set_title(f"head {head}: −{slope:.2g} a token")
        bar = figure.colorbar(image, ax=upper, ticks=[-below, 0], shrink=0.8)
        bar.set_ticklabels([f"−{below} or less", "0"])
        image = _map(lower[0], _behind(buckets, distances), RISING, 0, 31)
        image.set_cmap(_striped(32))
        lower[0].set_title("the 32 buckets")
        for n, axes in enumerate(lower[1:]):
            image = _map(axes, _behind(drawn[buckets, n], distances), SIGNED, -2.5, 2.5)
            axes.set_title(f"head {n + 1}, untrained")
        bar = figure.colorbar(image, ax=lower, ticks=[-2.5, 0, 2.5], shrink=0.8)
        for axes, name in ((upper[0], "ALiBi"), (lower[0], "T5")):
            axes.set_ylabel("query")
            write_beside(axes, name, -42)
        for axes in lower:
            axes.set_xlabel("key")
    return figure


def write_beside(axes: Axes, words: str, offset: float) -> None:
    """Words at the left of a panel, so many points from its edge."""
    where: Any = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(words, (0, 0.5), (offset, 0), ha="right", va="center", color=INK, **where)


def _map(axes: Axes, values: Tensor, colours: str, low: float, high: float) -> Any:
    axes.grid(visible=False)
    return axes.imshow(
        values.tolist(), cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest"
    )


def _behind(values: Tensor, distances: Tensor) -> Tensor:
    """The values of keys up to the query; nothing after it."""
    return values.double().masked_fill(distances < 0, torch.nan)


def _striped(count: int) -> Any:
    """So many colours, any two neighbours unlike."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    shades = [float(0.15 + 0.7 * k / count + 0.12 * (k % 2)) for k in range(count)]
    return ListedColormap([colormaps[RISING](shade) for shade in shades])


# Curves


def plot_distances(origins: Sequence[int] = (1, 48, 96)) -> Figure:
    """Distance and product of a few sinusoidal vectors with those of all positions: one curve, moved."""
    table = sinusoids()
    with canvas(2.7, width=8.4) as figure:
        left, right = figure.subplots(1, 2)
        for origin, colour in zip(origins, COLOURS, strict=False):
            distances = (table - table[origin]).norm(dim=1)
            products = table @ table[origin]
            for axes, values in ((left, distances), (right, products)):
                axes.plot(values.tolist(), color=colour, linewidth=1.3, label=f"position {origin}")
        left.set_title("distance between the sinusoidal vectors")
        right.set_title(f"their product: {CHANNELS // 2} with itself")
        for axes in (left, right):
            axes.set(xlim=(0, POSITIONS - 1), ylim=(0, None), xlabel="the other position")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, [f"from {label}" for label in labels], loc="outside upper left", ncols=3)
    return figure


def plot_turns(positions: Sequence[int] = (1, 8, 64), head_dim: int = 16) -> Figure:
    """How far the rotary pairs have turned at some positions, the fastest pair on the left."""
    inv_freq = Rope(head_dim, 10000.0, 128).inv_freq().tolist()
    with canvas(0.55 + 1.2 * len(positions), width=8.4) as figure:
        grid = figure.subplots(len(positions), len(inv_freq), squeeze=False)
        for row, position in zip(grid, positions, strict=True):
            for axes, frequency in zip(row, inv_freq, strict=True):
                _dial(axes, position * frequency)
            write_beside(row[0], f"p = {position}", -8)
        for pair, (axes, frequency) in enumerate(zip(grid[0], inv_freq, strict=True)):
            axes.set_title(f"pair {pair}\n{_tokens(2 * math.pi / frequency)}", loc="center")
        where: Any = {"xycoords": "axes fraction", "textcoords": "offset points"}
        grid[0][0].annotate("tokens per turn", (0, 1), (-8, 5), ha="right", color=QUIET, **where)
    return figure


def _dial(axes: Axes, angle: float) -> None:
    """A hand that has turned by an angle from the right, and its way of less than a turn."""
    circle = [2 * math.pi * k / 90 for k in range(91)]
    way = [angle % (2 * math.pi) * k / 60 for k in range(61)]
    axes.plot([math.cos(a) for a in circle], [math.sin(a) for a in circle], color=GRID, linewidth=1)
    axes.plot([0, 1], [0, 0], color=FAINT, linewidth=0.8)
    x, y = ([0, *(0.55 * part(a) for a in way)] for part in (math.cos, math.sin))
    axes.fill(x, y, color=COLOURS[0], alpha=0.25, linewidth=0)
    axes.plot([0, math.cos(angle)], [0, math.sin(angle)], color=COLOURS[0], linewidth=1.8)
    axes.set(xlim=(-1.12, 1.12), ylim=(-1.12, 1.12), aspect="equal")
    axes.set_axis_off()
    turns = angle / (2 * math.pi)
    words = f"{turns:.1f} turns" if turns >= 1 else f"{_tokens(math.degrees(angle))}°"
    axes.text(0, -1.45, words, ha="center", va="center", color=QUIET, fontsize=8)


def _tokens(count: float) -> str:
    """To two digits, in full."""
    rounded = float(f"{count:.2g}")
    return f"{rounded:g}" if rounded < 1000 else f"{rounded:,.0f}"


# Losses by length


def measured_curves() -> tuple[dict[str, Curve], Curve]:
    """Measured nats per token by length for every encoding, and the floor of the text."""
    return mean_curves(json.loads(RESULTS.read_text(encoding="utf-8"))["rows"])


def mean_curves(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Curve], Curve]:
    """The losses of runs from scratch, means over their seeds in the order of the registry, and the floor."""
    means = {
        name: {
            int(length): sum(run["nats"][length] for run in runs) / len(runs) for length in runs[0]["nats"]
        }
        for name, runs in from_scratch(rows)
    }
    return means, {int(length): value for length, value in rows[0]["floor"]["nats"].items()}


def plot_extrapolation(
    curves: Mapping[str, Mapping[int, float]], trained: int, floor: Mapping[int, float] | None = None
) -> Figure:
    """Train short, test long: the loss by length, a panel per family with all others in grey.

    What is far above the best value leaves the picture; a line that ends early, because the encoding is not
    defined any further, ends with a cross.

    Args:
        curves: Nats per token by length in tokens, by name of a registered encoding.
        trained: The length of training, in tokens; marked.
        floor: The loss that no model can beat, where it is known; dotted.

    Raises:
        RopepatchError: If there are no losses, or matplotlib is not installed.
    """
    lines = {name: _line(curve) for name, curve in curves.items()}
    if not lines or not all(lines.values()):
        raise RopepatchError("no losses to draw", hint="pass a loss by length for every encoding")
    groups: dict[str, list[str]] = {}
    for name in curves:
        groups.setdefault(ENCODINGS[name].family, []).append(name)
    low, high = _span([y for line in lines.values() for y in line.values()], floor)
    lengths = sorted({length for line in lines.values() for length in line})
    rows = math.ceil(len(groups) / 2)
    with canvas(0.4 + 2.3 * rows, width=8.4) as figure:
        grid = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False)
        for axes in grid.flat[len(groups) :]:
            axes.set_visible(False)
        for axes, (family, names) in zip(grid.flat, groups.items(), strict=False):
            axes.set_title(family, color=INK)
            axes.set(xlim=(lengths[0] / 1.04, lengths[-1] * 1.04), ylim=(low, high))
            for name in (name for name in lines if name not in names):
                axes.plot(*_points(lines[name]), color=GRID, linewidth=0.9, zorder=1.5, label="_other")
            _draw(axes, {name: lines[name] for name in names}, _line(floor or {}), lengths[-1])
            length_axis(axes, trained=trained, label="")
            axes.tick_params(labelbottom=True, labelleft=axes in grid[:, 0])
        figure.supxlabel("length of the text, tokens", color=QUIET, fontsize=9)
        figure.supylabel("loss, nats per token", color=QUIET, fontsize=9)
    return figure


def _line(curve: Mapping[int, float]) -> dict[int, float]:
    """The numbers of a curve by ascending length."""
    return {length: curve[length] for length in sorted(curve) if math.isfinite(curve[length])}


def _points(line: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return list(line), list(line.values())


def _span(losses: Sequence[float], floor: Mapping[int, float] | None) -> tuple[float, float]:
    """The axis: from the best loss, or the floor, to `HEADROOM` above, or to the worst loss."""
    least = min([*losses, *_line(floor or {}).values()])
    greatest = min(max(losses), least + HEADROOM)
    margin = 0.04 * (greatest - least or 1)
    return least - margin, greatest + margin


def _draw(axes: Axes, lines: Mapping[str, Mapping[int, float]], floor: Mapping[int, float], end: int) -> None:
    """Lines in colours and the floor, named at the right."""
    styles = looks(lines)
    for name, line in lines.items():
        colour, dash = styles[name]
        axes.plot(*_points(line), "o", color=colour, ls=dash, linewidth=1.6, markersize=2.5, label=name)
        if max(line) < end:
            axes.plot(max(line), line[max(line)], "x", color=colour, markersize=7, label="_end")
    if floor:
        axes.plot(*_points(floor), color=PLAIN, linestyle=":", linewidth=1.2, label="floor")
    legend_beside(axes)
