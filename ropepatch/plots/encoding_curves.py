"""Position encodings as curves: distances of vectors, turns of rotary pairs, decay, and loss by length."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ropepatch.encodings.absolute import Sinusoidal
from ropepatch.encodings.bench import SHAPE, Bench
from ropepatch.encodings.registry import ENCODINGS
from ropepatch.errors import RopepatchError
from ropepatch.lengths import short_length
from ropepatch.plots.encoding_maps import CHANNELS, POSITIONS
from ropepatch.plots.style import (
    COLOURS,
    FAINT,
    GRID,
    INK,
    PLAIN,
    QUIET,
    Look,
    canvas,
    length_axis,
    looks,
    spread,
)
from ropepatch.rope import Rope

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADROOM = 2.5  # nats by which the picture of extrapolation goes on above its best value
LABEL = 0.14  # inches between the names beside the lines


def plot_distances(origins: Sequence[int] = (1, 48, 96)) -> Figure:
    """Distance and product of a few sinusoidal vectors with those of all positions: one curve, moved.

    Raises:
        RopepatchError: If matplotlib is not installed.
    """
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
    """How far the rotary pairs have turned at some positions, the fastest pair on the left.

    Raises:
        RopepatchError: If matplotlib is not installed.
    """
    inv_freq = Rope(head_dim, 10000.0, 128).inv_freq().tolist()
    with canvas(0.55 + 1.2 * len(positions), width=8.4) as figure:
        grid = figure.subplots(len(positions), len(inv_freq), squeeze=False)
        for row, position in zip(grid, positions, strict=True):
            for axes, frequency in zip(row, inv_freq, strict=True):
                _dial(axes, position * frequency)
            row[0].annotate(
                f"p = {position}",
                (0, 0.5),
                (-8, 0),
                xycoords="axes fraction",
                textcoords="offset points",
                ha="right",
                va="center",
                color=INK,
            )
        for pair, (axes, frequency) in enumerate(zip(grid[0], inv_freq, strict=True)):
            axes.set_title(f"pair {pair}\n{_tokens(2 * math.pi / frequency)}", loc="center")
        grid[0][0].annotate(
            "tokens per turn",
            (0, 1),
            (-8, 5),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            color=QUIET,
        )
    return figure


def _dial(axes: Axes, angle: float) -> None:
    """A hand that has turned by an angle from the right, and its way of less than a turn."""
    circle = [2 * math.pi * k / 90 for k in range(91)]
    way = [angle % (2 * math.pi) * k / 60 for k in range(61)]
    axes.plot([math.cos(a) for a in circle], [math.sin(a) for a in circle], color=GRID, linewidth=1)
    axes.plot([0, 1], [0, 0], color=FAINT, linewidth=0.8)
    axes.fill(
        [0, *(0.55 * math.cos(a) for a in way)],
        [0, *(0.55 * math.sin(a) for a in way)],
        color=COLOURS[0],
        alpha=0.25,
        linewidth=0,
    )
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
        names: Of encodings.
        tokens: The longest distance, and the window.
        head_dim: D; the score at no distance is its root, without an encoding.

    Raises:
        RopepatchError: If there is no such encoding, or matplotlib is not installed.
    """
    shape = replace(
        SHAPE,
        layers=1,
        heads=4,
        key_value_heads=4,
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        rope=Rope(head_dim, 10000.0, tokens),
    )
    with canvas(4.2, width=8.4) as figure:
        panels = figure.subplots(math.ceil(len(names) / 2), 2, sharex=True, squeeze=False).flat
        for axes, name in zip(panels, names, strict=True):
            means = Bench.of(ENCODINGS[name], tokens, shape).mean_scores(1, tokens).tolist()
            axes.plot(means, color=COLOURS[0], linewidth=1)
            axes.axhline(math.sqrt(head_dim), color=FAINT, linewidth=0.9, linestyle=(0, (4, 3)))
            axes.set_title(name, color=INK)
            axes.set_xlim(0, tokens)
            above = sum(axes.get_ylim()) / 2 > math.sqrt(head_dim)
            axes.annotate(
                "without positions",
                (tokens, math.sqrt(head_dim)),
                (-2, 3 if above else -3),
                textcoords="offset points",
                ha="right",
                va="bottom" if above else "top",
                color=QUIET,
                fontsize=8,
            )
        figure.supxlabel("distance, tokens", color=QUIET, fontsize=9)
        figure.supylabel("mean score of a token with itself", color=QUIET, fontsize=9)
    return figure


def plot_extrapolation(
    curves: Mapping[str, Mapping[int, float]],
    trained: int,
    floor: Mapping[int, float] | None = None,
    families: Mapping[str, str] | None = None,
) -> Figure:
    """Train short, test long: the loss by length, a panel per family with all others in grey.

    What is far above the best value leaves the picture and is named there with its last value; a line that
    ends early, because the encoding is not defined any further, ends with a cross.

    Args:
        curves: Nats per token by length in tokens, by name of the encoding.
        trained: The length of training, in tokens; marked.
        floor: The loss that no model can beat, where it is known; dotted.
        families: Of the encodings, by name; of the registry if None.

    Raises:
        RopepatchError: If there are no curves, or matplotlib is not installed.
    """
    lines = {name: _line(curve) for name, curve in curves.items()}
    if not lines or not all(lines.values()):
        raise RopepatchError("no losses to draw", hint="pass a loss by length for every encoding")
    families = families or {name: ENCODINGS[name].family for name in curves}
    groups: dict[str, list[str]] = {}
    for name in curves:
        groups.setdefault(families[name], []).append(name)
    low, high = _span([y for line in lines.values() for y in line.values()], floor)
    lengths = sorted({length for line in lines.values() for length in line})
    rows = math.ceil(len(groups) / 2)
    with canvas(0.4 + 2.3 * rows, width=8.4) as figure:
        grid = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False)
        room = 2.3 - 0.5  # inches of an axis, about
        for axes in grid.flat[len(groups) :]:
            axes.set_visible(False)
        for axes, (family, names) in zip(grid.flat, groups.items(), strict=False):
            axes.set_title(family, color=INK)
            axes.set(xlim=(lengths[0] / 1.04, lengths[-1] * 1.04), ylim=(low, high))
            for name in (name for name in lines if name not in names):
                axes.plot(*_points(lines[name]), color=GRID, linewidth=0.9, zorder=1.5, label="_other")
            _draw(axes, {name: lines[name] for name in names}, _line(floor or {}), lengths[-1], LABEL / room)
            length_axis(axes, lengths, trained=trained, label="")
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
    most = min(max(losses), least + HEADROOM)
    return least - 0.04 * (most - least or 1), most + 0.04 * (most - least or 1)


def _draw(
    axes: Axes, lines: Mapping[str, Mapping[int, float]], floor: Mapping[int, float], end: int, gap: float
) -> None:
    """Lines in colours and the floor, named at the right in the order of their last values."""
    low, high = axes.get_ylim()
    found = looks(lines)
    for name, line in lines.items():
        style = found[name]
        axes.plot(
            *_points(line),
            color=style.colour,
            linestyle=style.dash,
            linewidth=1.6,
            marker="o",
            markersize=2.5,
            label=name,
        )
        if max(line) < end:
            axes.plot(max(line), line[max(line)], "x", color=style.colour, markersize=7, label="_end")
    if floor:
        axes.plot(*_points(floor), color=PLAIN, linestyle=":", linewidth=1.2, label="floor")
        lines, found = {**lines, "floor": floor}, {**found, "floor": Look(PLAIN)}
    last = {name: line[max(line)] for name, line in lines.items()}
    wanted = [min(max((value - low) / (high - low), 0), 1) for value in last.values()]
    for (name, value), place in zip(last.items(), spread(wanted, gap), strict=True):
        words = f"{name}, to {short_length(max(lines[name]))}" if max(lines[name]) < end else name
        words += f" ↑ {value:.1f}" if value > high else ""
        axes.text(
            1.02,
            place,
            words,
            transform=axes.transAxes,
            va="center_baseline",
            color=found[name].colour,
            clip_on=False,
        )
