"""Changes that a scaling or an attention map makes to rotary pairs and to distances."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ropepatch.attention import MAPS, AttentionMap, make_map
from ropepatch.report.plots.style import (
    COLOURS,
    DASHED,
    FAINT,
    INK,
    PLAIN,
    QUIET,
    Look,
    canvas,
    shown,
    spread,
)
from ropepatch.scaling.bands import bands
from ropepatch.scaling.rope import Frequencies, Rope, wavelengths
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ropepatch.evaluation.results import Result
    from ropepatch.extension.planning import Plan

SHADES = {  # by fate: the more a pair is slowed down, the darker
    "kept": (INK, 0.0),
    "blended": (INK, 0.07),
    "interpolated": (INK, 0.15),
    "stretched": (INK, 0.24),
    "sped up": (COLOURS[2], 0.2),
    "stopped": (COLOURS[1], 0.2),
}
BLUE = Look(COLOURS[0])


@dataclass(frozen=True)
class Rescaling:
    """The change of a rope, or of the distances by which it rotates."""

    name: str  # of the method
    rope: Rope  # before
    after: Frequencies
    factor: float  # by which the context grows, s
    target: int  # tokens
    distances: AttentionMap | None = None  # of a map, which leaves the frequencies alone

    @classmethod
    def planned(cls, plan: Plan) -> Rescaling:
        """The change of a plan."""
        factor, target = plan.scaling.factor, plan.target
        return cls(plan.method.name, plan.rope, plan.frequencies(), factor, target, plan.distances)

    @classmethod
    def measured(cls, result: Result) -> Rescaling | None:
        """The change under a result; None if it has no scaling, or does not record its frequencies."""
        model, scaling = result.model, result.scaling
        if scaling is None or "inv_freq" not in scaling or "inv_freq" not in model:
            return None
        before = tuple(model["inv_freq"])
        rope = Rope(model["rotary_dim"], model["rope_theta"], model["trained"], carried=before)
        after = Frequencies(torch.tensor(scaling["inv_freq"]), scaling["attention_factor"])
        known = scaling["method"] in MAPS
        distances = make_map(scaling["method"], **scaling["parameters"]) if known else None
        return cls(result.label, rope, after, scaling["factor"], result.target, distances)


def plot_wavelengths(change: Rescaling, look: Look = BLUE) -> Figure:
    """The tokens per rotation of every pair, before and after, with the bands of the scaling shaded."""
    rope, window = change.rope, change.rope.original_max_position_embeddings
    inv_freq = change.after.inv_freq
    before, after = wavelengths(rope.inv_freq()).tolist(), wavelengths(inv_freq).tolist()
    finite = [tokens for tokens in (*before, *after, window, change.target) if math.isfinite(tokens)]
    bottom, top = min(finite) / 1.4, max(finite) * 2.2
    with canvas(3.6) as figure:
        from matplotlib.colors import to_rgba
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        axes.set_title("tokens per rotation")
        axes.set_yscale("log")
        axes.set(ylim=(bottom, top), xlim=(-0.5, rope.num_pairs - 0.5), xlabel="rotary pair")
        axes.minorticks_off()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        decades = range(math.ceil(math.log10(bottom)), math.floor(math.log10(top)) + 1)
        axes.set_yticks([10.0**k for k in decades], [_decimal(k) for k in decades])
        shades = {}
        for band in bands(rope, inv_freq, change.factor):
            colour = to_rgba(*SHADES[band.fate])
            axes.axvspan(band.first - 0.5, band.last + 0.5, color=colour, linewidth=0, zorder=0.5)
            shades[band.fate] = Patch(facecolor=colour, edgecolor=FAINT, linewidth=0.6, label=band.fate)
        size = max(1.6, min(4.0, 150 / rope.num_pairs))
        (line,) = axes.plot(before, "o", color=PLAIN, markersize=size, fillstyle="none", label="before")
        moving = [tokens if math.isfinite(tokens) else math.nan for tokens in after]
        name = f"after {shown(change.name)}"
        (scaled,) = axes.plot(moving, "o", color=look.colour, markersize=size, label=name)
        stopped = [pair for pair, tokens in enumerate(after) if math.isinf(tokens)]
        at_top = [top / 1.25] * len(stopped)
        axes.plot(stopped, at_top, "^", color=look.colour, markersize=size, clip_on=False)
        _mark(axes, {"trained": window, "target": change.target})
        figure.legend(
            handles=[line, scaled, *shades.values()],
            loc="outside upper left",
            ncols=6 if len(change.name) < 14 else 5,
            handlelength=1.2,
            columnspacing=1.4,
        )
    return figure


def _mark(axes: Axes, lines: dict[str, int]) -> None:
    """Horizontal lines with their names at the right."""
    low, high = (math.log(y) for y in axes.get_ylim())
    heights = [(math.log(tokens) - low) / (high - low) for tokens in lines.values()]
    for (name, tokens), place in zip(lines.items(), spread(heights, 0.055), strict=True):
        axes.axhline(tokens, **DASHED | {"color": QUIET})
        text = f"{name} {short_length(tokens)}"
        axes.text(
            1.01, place, text, transform=axes.transAxes, va="center_baseline", color=QUIET, clip_on=False
        )


def _decimal(power: int) -> str:
    return short_length(10**power) if power < 3 else f"{10**power:,}" if power < 7 else f"1e{power}"
