"""Position encodings as curves: distances of vectors, turns of rotary pairs, and decay.

Every plot raises a RopepatchError if matplotlib is not installed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ropepatch.encodings.absolute import Sinusoidal
from ropepatch.encodings.registry import ENCODINGS
from ropepatch.gallery.identity_model import SHAPE, IdentityModel
from ropepatch.gallery.maps import CHANNELS, POSITIONS, write_beside
from ropepatch.report.plots.style import COLOURS, FAINT, GRID, INK, QUIET, canvas
from ropepatch.scaling.rope import Rope

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_distances(origins: Sequence[int] = (1, 48, 96)) -> Figure:
    """Distance and product of a few sinusoidal vectors with those of all positions: one curve, moved."""
    table = Sinusoidal().vectors(torch.arange(POSITIONS), CHANNELS)
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


def plot_decay(
    names: Sequence[str] = ("rope", "xpos", "alibi", "sinusoidal"), tokens: int = 512, head_dim: int = 64
) -> Figure:
    """The mean score of a token with itself by distance, in one layer, over contents of unit variance.

    Args:
        names: The names of encodings.
        tokens: The longest distance, and the window.
        head_dim: D; the score at no distance is its root, without an encoding.

    Raises:
        RopepatchError: If there is no such encoding.
    """
    rope = Rope(head_dim, 10000.0, tokens)
    shape = replace(SHAPE, layers=1, head_dim=head_dim, hidden_size=4 * head_dim, rope=rope)
    with canvas(4.2, width=8.4) as figure:
        panels = figure.subplots(math.ceil(len(names) / 2), 2, sharex=True, squeeze=False).flat
        for axes, name in zip(panels, names, strict=True):
            means = IdentityModel.of(ENCODINGS[name], tokens, shape).mean_scores(1, tokens).tolist()
            axes.plot(means, color=COLOURS[0], linewidth=1)
            axes.axhline(math.sqrt(head_dim), color=FAINT, linewidth=0.9, linestyle=(0, (4, 3)))
            axes.set_title(name, color=INK)
            axes.set_xlim(0, tokens)
            end = (tokens, math.sqrt(head_dim))
            offset, side = ((-2, 3), "bottom") if sum(axes.get_ylim()) / 2 > end[1] else ((-2, -3), "top")
            look: Any = {"ha": "right", "va": side, "color": QUIET, "fontsize": 8}
            axes.annotate("without positions", end, offset, textcoords="offset points", **look)
        figure.supxlabel("distance, tokens", color=QUIET, fontsize=9)
        figure.supylabel("mean score of a token with itself", color=QUIET, fontsize=9)
    return figure
