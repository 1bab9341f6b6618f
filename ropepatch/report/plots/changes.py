"""Changes that a scaling or a position remapping makes: to rotary pairs, and to the distances of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropepatch.attention import Remapping
from ropepatch.report.plots.style import (
    COLOURS,
    DASHED,
    PLAIN,
    canvas,
    legend_beside,
    looks,
    plain_log_axis,
)
from ropepatch.scaling.rope import divisors, rotations, wavelengths
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ropepatch.extension.planning import Plan

POINTS = 256  # the most points of a curve


def plot_plan(plan: Plan) -> Figure:
    """A figure of a plan: the tokens per rotation of every rotary pair, or the distances of its remapping."""
    if isinstance(plan.method, Remapping):
        return plot_effective_distances([plan])
    return plot_wavelengths(plan)


def plot_wavelengths(plan: Plan) -> Figure:
    """The tokens per rotation of every pair, before and after."""
    config = plan.source.config
    tables = {
        "before": (config.rope.inv_freq(), PLAIN),
        f"after {plan.method.name}": (plan.frequencies().inv_freq, COLOURS[0]),
    }
    lengths = {"original length": config.window, "target length": plan.target}
    with canvas(3.6) as figure:
        axes = figure.subplots()
        axes.set(title="tokens per rotation", xlabel="rotary pair")
        plain_log_axis(axes)
        for name, (table, colour) in tables.items():
            axes.plot(wavelengths(table), "o", color=colour, markersize=3, label=name)
        for name, length in lengths.items():
            axes.axhline(length, **DASHED)
            axes.text(0, length, f"{name} {short_length(length)}", va="bottom")
        legend_beside(axes)
    return figure


def plot_effective_distances(plans: Sequence[Plan]) -> Figure:
    """The effective distance of the last token's keys against the true one, of plans of one target."""
    target, window = plans[0].target, plans[0].source.config.window
    points = torch.linspace(0, target - 1, min(POINTS, target), dtype=torch.float64)
    true = points.round().long()
    with canvas(3.6) as figure:
        axes = figure.subplots()
        axes.set_title("effective distance, tokens")
        axes.plot(true, true, color=PLAIN, label="baseline")
        look = looks(plan.method.name for plan in plans)
        for plan, (colour, dash) in zip(plans, look.values(), strict=True):
            read = effective_distances(plan, target - 1 - true)
            axes.plot(true, read, dash, color=colour, label=plan.method.name)
        axes.axhline(window, **DASHED)
        axes.set(xlim=(0, target), ylim=(0, 1.5 * window))
        length = short_length(window)
        axes.set_xlabel(
            f"true distance of the last token's keys (dashed: {length} tokens)"
        )
        legend_beside(axes)
    return figure


def effective_distances(plan: Plan, keys: Tensor) -> Tensor:
    """The effective distance [T] of the last token's keys; NaN if not attended.

    Under a remapping it is equal for all rotary pairs. A scaling rotates every pair as if the distance were
    D / divisor. This is the greatest one over the pairs that do not complete a rotation within L (else of the
    slowest): their angles are new beyond L, those of other pairs are not.
    """
    last = torch.tensor([plan.target - 1])
    if isinstance(plan.method, Remapping):
        return plan.method.read_at(last, keys)[0]
    config = plan.source.config
    before = config.rope.inv_freq()
    turned = rotations(before, config.window)
    slow = (turned > 0) & (turned <= turned[turned > 0].min().clamp(min=1))
    return (last - keys) / divisors(before, plan.frequencies().inv_freq)[slow].min()
