"""Figures of position encodings: the sinusoids, biases and rotations.

Every plot raises a RopepatchError if matplotlib is not installed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ropepatch.encodings.absolute import Sinusoidal
from ropepatch.encodings.relative import buckets_of, slopes
from ropepatch.report.plots.style import (
    COLOURS,
    FAINT,
    GRID,
    INK,
    QUIET,
    canvas,
)
from ropepatch.scaling.rope import Rope

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIGNED, RISING = "RdBu_r", "Blues"
POSITIONS, CHANNELS = 128, 128  # of the tables that are drawn


def plot_encoding_gallery() -> dict[str, Figure]:
    """All figures, by names that serve as file names.

    Raises:
        RopepatchError: If matplotlib is not installed.
    """
    return {
        "sinusoidal-table": plot_sinusoidal_table(),
        "sinusoidal-distances": plot_distances(),
        "rope-turns": plot_turns(),
        "rope-arcs": plot_arcs(),
        "biases": plot_biases(),
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
        axes.set_title(
            "sinusoidal: every channel is a wave over the positions, the last ones the slowest"
        )
        figure.colorbar(image, ax=axes, ticks=[-1, 0, 1], shrink=0.6)
    return figure


def plot_biases(
    heads: int = 8, shown: Sequence[int] = (1, 2, 4, 8), tokens: int = 160
) -> Figure:
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
            image = _map(
                axes, _behind(-slope * distances, distances), f"{RISING}_r", -below, 0
            )
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
    axes.annotate(
        words, (0, 0.5), (offset, 0), ha="right", va="center", color=INK, **where
    )


def _map(axes: Axes, values: Tensor, colours: str, low: float, high: float) -> Any:
    axes.grid(visible=False)
    return axes.imshow(
        values.tolist(),
        cmap=colours,
        vmin=low,
        vmax=high,
        aspect="auto",
        interpolation="nearest",
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
                axes.plot(
                    values.tolist(),
                    color=colour,
                    linewidth=1.3,
                    label=f"position {origin}",
                )
        left.set_title("distance between the sinusoidal vectors")
        right.set_title(f"their product: {CHANNELS // 2} with itself")
        for axes in (left, right):
            axes.set(
                xlim=(0, POSITIONS - 1), ylim=(0, None), xlabel="the other position"
            )
        handles, labels = left.get_legend_handles_labels()
        figure.legend(
            handles,
            [f"from {label}" for label in labels],
            loc="outside upper left",
            ncols=3,
        )
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
            axes.set_title(
                f"pair {pair}\n{_tokens(2 * math.pi / frequency)}", loc="center"
            )
        where: Any = {"xycoords": "axes fraction", "textcoords": "offset points"}
        grid[0][0].annotate(
            "tokens per turn", (0, 1), (-8, 5), ha="right", color=QUIET, **where
        )
    return figure


def plot_arcs(
    pairs: Sequence[int] = (32, 45, 46, 52, 58, 63),
    length: int = 4096,
    target: int = 16384,
) -> Figure:
    """The angles of some pairs (head of 128) up to the original length, and new ones up to the target."""
    inv_freq = Rope(128, 10000.0, length).inv_freq().tolist()
    words = (
        f"angles at distances up to {length:,} tokens",
        f"first met between {length:,} and {target:,}",
    )
    with canvas(2.1, width=8.4) as figure:
        for axes, pair in zip(figure.subplots(1, len(pairs)), pairs, strict=True):
            seen = min(length * inv_freq[pair], 2 * math.pi)
            reached = min(target * inv_freq[pair], 2 * math.pi)
            _circle(axes)
            for start, end, colour, label in (
                (0.0, seen, COLOURS[0], words[0]),
                (seen, reached, COLOURS[1], words[1]),
            ):
                _sector(axes, start, end, radius=1.0, color=colour, label=label)
            axes.set_title(f"pair {pair}", loc="center")
            turns = length * inv_freq[pair] / (2 * math.pi)
            below = f"{turns:#.2g} rotations"
            axes.text(
                0, -1.45, below, ha="center", va="center", color=QUIET, fontsize=8
            )
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=2)
    return figure


def _dial(axes: Axes, angle: float) -> None:
    """A hand that has turned by an angle from the right, and its way of less than a turn."""
    _circle(axes)
    axes.plot([0, 1], [0, 0], color=FAINT, linewidth=0.8)
    _sector(axes, 0.0, angle % (2 * math.pi), radius=0.55, color=COLOURS[0])
    axes.plot(
        [0, math.cos(angle)], [0, math.sin(angle)], color=COLOURS[0], linewidth=1.8
    )
    turns = angle / (2 * math.pi)
    words = f"{turns:.1f} turns" if turns >= 1 else f"{_tokens(math.degrees(angle))}°"
    axes.text(0, -1.45, words, ha="center", va="center", color=QUIET, fontsize=8)


def _circle(axes: Axes) -> None:
    circle = [2 * math.pi * k / 90 for k in range(91)]
    axes.plot(
        [math.cos(a) for a in circle],
        [math.sin(a) for a in circle],
        color=GRID,
        linewidth=1,
    )
    axes.set(xlim=(-1.12, 1.12), ylim=(-1.12, 1.12), aspect="equal")
    axes.set_axis_off()


def _sector(
    axes: Axes, start: float, end: float, *, radius: float, **style: Any
) -> None:
    """The angles between two, filled."""
    way = [start + (end - start) * k / 60 for k in range(61)]
    x, y = ([0, *(radius * part(a) for a in way)] for part in (math.cos, math.sin))
    axes.fill(x, y, alpha=0.25, linewidth=0, **style)


def _tokens(count: float) -> str:
    """To two digits, in full."""
    rounded = float(f"{count:.2g}")
    return f"{rounded:g}" if rounded < 1000 else f"{rounded:,.0f}"
