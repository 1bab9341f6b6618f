"""Changes that a scaling or a position remapping makes: to rotary pairs, and to the distances of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ropepatch.attention import Remapping
from ropepatch.report.plots.lines import add_figure
from ropepatch.report.plots.style import (
    COLOURS,
    DASHED,
    INK,
    PLAIN,
    canvas,
    legend_beside,
    looks,
    plain_log_axis,
)
from ropepatch.scaling.rope import (
    Rope,
    bands,
    divisors,
    rotations,
    wavelengths,
)
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ropepatch.extension.planning import Plan

SHADES = {  # by change: the more a pair is slowed down, the darker
    "kept": (INK, 0.0),
    "blended": (INK, 0.07),
    "interpolated": (INK, 0.15),
    "stretched": (INK, 0.24),
    "sped up": (COLOURS[2], 0.2),
    "stopped": (COLOURS[1], 0.2),
}
POINTS = 256  # the most points of a curve
OVERSHOOT = 2.0  # the greatest distance in the figure of distances, as a multiple of L


def figures_of_plans(plans: Sequence[Plan]) -> dict[str, Figure]:
    """The figures of the changes of plans of one model and target, by file name."""
    drawn = {"distances": plot_effective_distances(plans)}
    for plan in plans:
        if not isinstance(plan.method, Remapping):
            add_figure(drawn, plot_wavelengths(plan), "wavelengths", plan.method.name)
    return drawn


def plot_plan(plan: Plan) -> Figure:
    """A figure of a plan: the tokens per rotation of every rotary pair, or the distances of its remapping."""
    if isinstance(plan.method, Remapping):
        return plot_effective_distances([plan])
    return plot_wavelengths(plan)


def plot_wavelengths(plan: Plan) -> Figure:
    """The tokens per rotation of every pair, before and after, with the bands of the scaling shaded."""
    rope, inv_freq = plan.source.config.rope, plan.frequencies().inv_freq
    with canvas(3.6) as figure:
        axes = figure.subplots()
        axes.set_title("tokens per rotation")
        plain_log_axis(axes)
        axes.set(xlim=(-0.5, rope.num_pairs - 0.5), xlabel="rotary pair")
        for band in bands(rope, inv_freq, plan.factor):
            colour, alpha = SHADES[band.fate]
            shade: Any = {"color": colour, "alpha": alpha, "lw": 0}
            axes.axvspan(band.first - 0.5, band.last + 0.5, label=band.fate, **shade)
        tables = {
            "before": (rope.inv_freq(), PLAIN),
            f"after {plan.method.name}": (inv_freq, COLOURS[0]),
        }
        for name, (table, colour) in tables.items():
            tokens = wavelengths(table)
            # Of a stopped pair infinite
            known = tokens.where(tokens.isfinite(), torch.nan).tolist()
            axes.plot(known, "o", color=colour, markersize=3, label=name)
        lengths = {
            "original length": rope.original_max_position_embeddings,
            "target length": plan.target,
        }
        for name, length in lengths.items():
            axes.axhline(length, **DASHED)
            axes.text(0, length, f"{name} {short_length(length)}", va="bottom")
        legend_beside(axes)
    return figure


def plot_effective_distances(plans: Sequence[Plan]) -> Figure:
    """The effective distance of the last token's keys against the true one.

    Under a remapping the distance is equal for all rotary pairs. A scaling rotates every pair as if the
    distance were D / divisor: the line is the greatest distance over the pairs that do not complete a
    rotation within L, the shade reaches to the least. The plans have the same L and target.
    """
    target = plans[0].target
    window = plans[0].source.config.rope.original_max_position_embeddings
    points = torch.linspace(0, target - 1, min(POINTS, target), dtype=torch.float64)
    true = points.round().long()
    look = looks(plan.method.name for plan in plans)
    with canvas(3.6) as figure:
        axes = figure.subplots()
        axes.set_title("effective distance, tokens")
        axes.plot(true, true, color=PLAIN, label="baseline")
        highest = float(window)
        for plan in plans:
            colour, dash = look[plan.method.name]
            low, high = effective_distances(plan, target - 1 - true)
            axes.plot(true, high, dash, color=colour, label=plan.method.name)
            axes.fill_between(true, low, high, color=colour, alpha=0.1, lw=0)
            highest = max(highest, float(high.nan_to_num(0).max()))
        axes.axhline(window, **DASHED)
        axes.set(xlim=(0, target), ylim=(0, min(1.1 * highest, OVERSHOOT * window)))
        length = short_length(window)
        axes.set_xlabel(
            f"true distance of the last token's keys (dashed: {length} tokens)"
        )
        legend_beside(axes)
    return figure


def effective_distances(plan: Plan, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest effective distance [T] of the last token's keys; NaN if not attended."""
    last = torch.tensor([plan.target - 1])
    if isinstance(plan.method, Remapping):
        distances = plan.method.read_at(last, keys)[0]
        return distances, distances
    rope = plan.source.config.rope
    least, greatest = slow_divisors(rope, plan.frequencies().inv_freq)
    apart = (last - keys).double()
    return apart / greatest, apart / least


def slow_divisors(rope: Rope, inv_freq: Tensor) -> tuple[float, float]:
    """The least and the greatest divisor, theta / theta', of the pairs without a full rotation within L.

    For a pair with a full rotation every angle is in distribution; for the others, angles are new if
    D / divisor exceeds L. If all pairs complete one, the slowest pair is used. Pairs of zero frequency are
    left out.
    """
    before = rope.inv_freq()
    rotated = rotations(before, rope.original_max_position_embeddings)
    slowest = rotated[rotated > 0].min()
    slow = divisors(before, inv_freq)[
        (rotated > 0) & (rotated <= max(1.0, float(slowest)))
    ]
    return float(slow.min()), float(slow.max())
