"""What fitting learned: divisors beside the published ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

from ropepatch.errors import RopepatchError
from ropepatch.report.plots.style import DASHES, FAINT, INK, QUIET, canvas, looks, shown
from ropepatch.scaling import make_scaling
from ropepatch.scaling.rope import Rope, wavelengths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REACH = 8  # the picture ends at divisors of so many times the largest factor, and of 1 over so many


@dataclass(frozen=True)
class LearnedDivisors:
    """One fitted vector.

    Attributes:
        model: The name of the checkpoint.
        rope: Its rope before.
        factor: s.
        seed: Of the fit.
        divisors: theta_i / theta'_i, one per pair, fastest pair first.
        attention_factor: Multiplies cos and sin.
    """

    model: str
    rope: Rope
    factor: float
    seed: int
    divisors: tuple[float, ...]
    attention_factor: float


def plot_divisors(
    curves: Sequence[LearnedDivisors], *, methods: Sequence[str] = ("yarn", "ntk", "linear")
) -> Figure:
    """Learned divisors over wavelength / L, a panel per factor, a line per seed, coloured by checkpoint.

    Dots are rotary pairs; a triangle at the edge is a pair beyond it. Published methods are grey, one line
    per checkpoint. Upright dashes stand where a pair turns once within the trained and the new context.

    Args:
        curves: What was learned.
        methods: Names of the registry, drawn with their defaults.

    Raises:
        RopepatchError: If there are no curves, one has not a divisor per pair, a method is unknown or
            undefined on a rope, or matplotlib is not installed.
    """
    if not curves:
        raise RopepatchError("no vectors to draw", hint="pass at least one")
    for curve in curves:
        if len(curve.divisors) != curve.rope.num_pairs:
            raise RopepatchError(
                f"{curve.model} has {curve.rope.num_pairs} rotary pairs, got {len(curve.divisors)} divisors"
            )
    factors = sorted({curve.factor for curve in curves})
    colours = {name: look.colour for name, look in looks(curve.model for curve in curves).items()}
    dashes: dict[str, Any] = dict(zip(methods, cycle(DASHES), strict=False))
    low, high = _span([divisor for curve in curves for divisor in curve.divisors], factors[-1])
    places = [place for curve in curves for place in _turns(curve.rope) if math.isfinite(place)]
    decades = range(math.floor(math.log10(min(places))), math.ceil(math.log10(max(places))) + 1)
    with canvas(3.7, width=max(4.2, 0.6 + 2.9 * len(factors))) as figure:
        from matplotlib.lines import Line2D

        panels = figure.subplots(1, len(factors), squeeze=False, sharex=True, sharey=True)[0]
        panels[0].set(xscale="log", yscale="log", ylim=(low, high))
        panels[0].set_xticks([10.0**k for k in decades], [f"{10.0**k:g}" for k in decades])
        for axes, factor in zip(panels, factors, strict=True):
            here = [curve for curve in curves if curve.factor == factor]
            axes.set_title(f"{factor:g} ×", color=INK)
            axes.axhline(1, color=FAINT, linewidth=0.6, zorder=0.8)
            _mark(axes, {"L": 1.0, f"{factor:g} L": factor})
            for rope in dict.fromkeys(curve.rope for curve in here):
                for method, dash in dashes.items():
                    divisors = _published(method, rope, factor)
                    axes.plot(_turns(rope), divisors, color=FAINT, linewidth=1, linestyle=dash, label=method)
            for curve in here:
                _draw(axes, curve, colours[curve.model], low, high)
            axes.set_xlim(min(places) / 1.3, max(places) * 1.3)
            _temperatures(axes, here, colours)
        powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
        panels[0].set_yticks([2.0**k for k in powers], [f"{2.0**k:g}" for k in powers])
        panels[0].set_ylabel("divisor")
        for axes in panels:
            axes.minorticks_off()
        handles = [
            Line2D([], [], color=colour, marker="o", markersize=2.5, label=shown(name))
            for name, colour in colours.items()
        ]
        handles += [
            Line2D([], [], color=FAINT, linewidth=1, linestyle=dash, label=method)
            for method, dash in dashes.items()
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=2 + 2 * len(factors))
        figure.supxlabel("wavelength / trained context L", color=QUIET, fontsize=9)
    return figure


def _turns(rope: Rope) -> list[float]:
    """The wavelength of every pair over L."""
    return [
        tokens / rope.original_max_position_embeddings for tokens in wavelengths(rope.inv_freq()).tolist()
    ]


def _span(divisors: Sequence[float], factor: float) -> tuple[float, float]:
    """The axis of divisors: all of them, the factor and 1, with room below, as far as REACH allows."""
    least = max(1 / REACH, min(1.0, *divisors))
    most = min(REACH * factor, max(factor, *divisors))
    return least / 2.6, most * 1.3


def _published(method: str, rope: Rope, factor: float) -> list[float]:
    """The divisors of a method at its target; infinite where it stops a pair."""
    target = round(factor * rope.original_max_position_embeddings)
    after = make_scaling(method, factor=factor).frequencies(rope, target).inv_freq
    divisors: list[float] = (rope.inv_freq().double() / after.double()).tolist()
    return divisors


def _draw(axes: Axes, curve: LearnedDivisors, colour: str, low: float, high: float) -> None:
    places = _turns(curve.rope)
    axes.plot(
        places,
        curve.divisors,
        color=colour,
        linewidth=0.8,
        alpha=0.8,
        marker="o",
        markersize=2.5,
        label=f"{curve.model} {curve.seed}",
    )
    for edge, marker, beyond in (
        (high / 1.15, "^", [divisor > high for divisor in curve.divisors]),
        (low * 1.15, "v", [divisor < low for divisor in curve.divisors]),
    ):
        outside = [place for place, out in zip(places, beyond, strict=True) if out]
        axes.plot(outside, [edge] * len(outside), marker, color=colour, markersize=4, label=f"_{marker}")


def _mark(axes: Axes, lines: dict[str, float]) -> None:
    """Upright lines with their names at the top; the second name stands to the right of its line."""
    for (name, place), side in zip(lines.items(), ("right", "left"), strict=True):
        axes.axvline(place, color=QUIET, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0.9)
        axes.annotate(
            name,
            (place, 1),
            (-2 if side == "right" else 2, 1),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha=side,
            color=QUIET,
            fontsize=8,
        )


def _temperatures(axes: Axes, curves: Sequence[LearnedDivisors], colours: dict[str, str]) -> None:
    """The attention factors of every checkpoint, least and most over its seeds."""
    for line, model in enumerate(reversed(dict.fromkeys(curve.model for curve in curves))):
        found = [curve.attention_factor for curve in curves if curve.model == model]
        ends = dict.fromkeys((f"{min(found):.3f}", f"{max(found):.3f}"))
        axes.annotate(
            f"a = {' to '.join(ends)}",
            (0, 0),
            (4, 4 + 11 * line),
            xycoords="axes fraction",
            textcoords="offset points",
            color=colours[model],
            fontsize=8,
        )
