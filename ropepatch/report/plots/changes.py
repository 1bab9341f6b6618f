"""Changes that a scaling or a position remapping makes: to rotary pairs, and to the distances of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropepatch.attention import Remapping
from ropepatch.report.plots.lines import add_figure
from ropepatch.report.plots.style import (
    COLOURS,
    DASHED,
    INK,
    PLAIN,
    Look,
    canvas,
    legend_beside,
    looks,
    plain_log_axis,
)
from ropepatch.scaling.rope import (
    Frequencies,
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
BLUE = Look(COLOURS[0])
POINTS = 256  # the most points of a curve
OVERSHOOT = 2.0  # the greatest distance in the figure of distances, as a multiple of L


@dataclass(frozen=True)
class Rescaling:
    """The change of RoPE frequencies, or of the distances between tokens."""

    name: str  # of the method
    rope: Rope  # before
    after: Frequencies
    factor: float  # s, the target length over the original length
    target: int  # tokens
    distances: Remapping | None = None  # of a remapping, which keeps the frequencies

    @classmethod
    def planned(cls, plan: Plan) -> Rescaling:
        """The change of a plan."""
        distances = plan.method if isinstance(plan.method, Remapping) else None
        rope = plan.source.config.rope
        return cls(
            plan.method.name,
            rope,
            plan.frequencies(),
            plan.factor,
            plan.target,
            distances,
        )


def figures_of_plans(plans: Sequence[Plan]) -> dict[str, Figure]:
    """The figures of the changes of plans of one model and target, by file name."""
    changes = _with_looks(plans)
    drawn = {"distances": plot_effective_distances(changes)}
    for change, look in changes:
        if change.distances is None:
            figure = plot_wavelengths(change, look)
            add_figure(drawn, figure, "wavelengths", change.name)
    return drawn


def plot_plan(plan: Plan) -> Figure:
    """A figure of a plan: the tokens per rotation of every rotary pair, or the distances of its remapping."""
    ((change, look),) = _with_looks([plan])
    if change.distances is None:
        return plot_wavelengths(change, look)
    return plot_effective_distances([(change, look)])


def _with_looks(plans: Sequence[Plan]) -> list[tuple[Rescaling, Look]]:
    changes = [Rescaling.planned(plan) for plan in plans]
    look = looks(change.name for change in changes)
    return [(change, look[change.name]) for change in changes]


def plot_wavelengths(change: Rescaling, look: Look = BLUE) -> Figure:
    """The tokens per rotation of every pair, before and after, with the bands of the scaling shaded."""
    rope, inv_freq = change.rope, change.after.inv_freq
    with canvas(3.6) as figure:
        axes = figure.subplots()
        axes.set_title("tokens per rotation")
        plain_log_axis(axes)
        axes.set(xlim=(-0.5, rope.num_pairs - 0.5), xlabel="rotary pair")
        for band in bands(rope, inv_freq, change.factor):
            colour, alpha = SHADES[band.fate]
            axes.axvspan(
                band.first - 0.5,
                band.last + 0.5,
                color=colour,
                alpha=alpha,
                lw=0,
                label=band.fate,
            )
        # Of a stopped pair infinite
        before, after = (
            wavelengths(rope.inv_freq()),
            wavelengths(inv_freq),
        )
        for name, tokens, colour in (
            ("before", before, PLAIN),
            (f"after {change.name}", after, look.colour),
        ):
            drawn = tokens.where(tokens.isfinite(), torch.nan)
            axes.plot(
                drawn.tolist(),
                "o",
                color=colour,
                markersize=3,
                fillstyle="none",
                label=name,
            )
        for name, length in (
            ("original length", rope.original_max_position_embeddings),
            ("target length", change.target),
        ):
            axes.axhline(length, **DASHED)
            axes.text(0, length, f"{name} {short_length(length)}", va="bottom")
        legend_beside(axes)
    return figure


def plot_effective_distances(changes: Sequence[tuple[Rescaling, Look]]) -> Figure:
    """The effective distance of the last token's keys against the true one.

    Under a remapping the distance is equal for all rotary pairs. A scaling rotates every pair as if the
    distance were D / divisor: the line is the greatest distance over the pairs that do not complete a
    rotation within L, the shade reaches to the least. The changes have the same L and target.
    """
    window, target = (
        changes[0][0].rope.original_max_position_embeddings,
        changes[0][0].target,
    )
    keys = (
        torch.linspace(target - 1, 0, min(POINTS, target), dtype=torch.float64)
        .round()
        .long()
    )
    true = target - 1 - keys
    with canvas(3.6) as figure:
        axes = figure.subplots()
        axes.set_title("effective distance, tokens")
        axes.plot(true.tolist(), true.tolist(), color=PLAIN, label="baseline")
        highest = float(window)
        for change, (colour, dash) in changes:
            low, high = effective_distances(change, keys)
            axes.plot(
                true.tolist(),
                high.tolist(),
                color=colour,
                linestyle=dash,
                label=change.name,
            )
            axes.fill_between(
                true.tolist(),
                low.tolist(),
                high.tolist(),
                color=colour,
                alpha=0.1,
                lw=0,
            )
            highest = max(highest, float(high.nan_to_num(0).max()))
        axes.axhline(window, **DASHED)
        axes.set(xlim=(0, target), ylim=(0, min(1.1 * highest, OVERSHOOT * window)))
        axes.set_xlabel(
            f"true distance of the last token's keys (dashed: {short_length(window)} tokens)"
        )
        legend_beside(axes)
    return figure


def effective_distances(change: Rescaling, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest effective distance [T] of the last token's keys; NaN if not attended."""
    last = torch.tensor([change.target - 1])
    if change.distances is not None:
        distances = change.distances.read_at(last, keys)[0]
        return distances, distances
    least, greatest = slow_divisors(change.rope, change.after.inv_freq)
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
