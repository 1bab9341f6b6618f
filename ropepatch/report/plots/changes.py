"""Changes that a scaling or a position remapping makes: to rotary pairs, and to the distances of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ropepatch.attention import REMAPPINGS, Remapping, make_remapping
from ropepatch.report.plots.style import (
    COLOURS,
    DASHED,
    FAINT,
    INK,
    LABEL,
    PLAIN,
    QUIET,
    Look,
    canvas,
    name_lines,
    shown,
    spread,
)
from ropepatch.scaling.bands import bands
from ropepatch.scaling.rope import Frequencies, Rope, divisors, rotations, wavelengths
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ropepatch.evaluation.results import Result
    from ropepatch.extension.gguf import GgufPlan
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
CELLS, POINTS = 384, 1024  # the most cells along a side of a heat map, and points of a curve
COLUMNS = 4
BASELINE = "baseline"
OVERSHOOT = 2.0  # the greatest distance in the figure of curves, as a multiple of L


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
    def planned(cls, plan: Plan | GgufPlan) -> Rescaling:
        """The change of a plan."""
        factor, target = plan.scaling.factor, plan.target
        return cls(plan.method.name, plan.rope, plan.frequencies(), factor, target, plan.remapping)

    @classmethod
    def measured(cls, result: Result) -> Rescaling | None:
        """The change of a result; None without a scaling or recorded frequencies."""
        model, scaling = result.model, result.scaling
        if scaling is None or "inv_freq" not in scaling or "inv_freq" not in model:
            return None
        before = tuple(model["inv_freq"])
        rope = Rope(model["rotary_dim"], model["rope_theta"], model["trained"], carried=before)
        after = Frequencies(torch.tensor(scaling["inv_freq"]), scaling["attention_factor"])
        known = scaling["method"] in REMAPPINGS
        distances = make_remapping(scaling["method"], **scaling["parameters"]) if known else None
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


def read_at(change: Rescaling | None, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest effective distance [Q, T] of queries and keys; NaN if not attended.

    Under a remapping they are equal for all rotary pairs. A scaling rotates every pair as if the distance
    were D / divisor: these are the extremes over the pairs that do not complete a rotation within L. None is
    the baseline.
    """
    if change is not None and change.distances is not None:
        table = change.distances.read_at(queries, keys)
        return table, table
    apart = (queries[:, None] - keys).double()
    apart = apart.where(apart >= 0, torch.nan)
    least, greatest = (1.0, 1.0) if change is None else slow_divisors(change.rope, change.after.inv_freq)
    return apart / greatest, apart / least


def plot_effective_distances(changes: Sequence[tuple[Rescaling, Look]]) -> Figure:
    """The effective distance of every query and key, and below it that of the last token's keys.

    The changes have the same L and target; the figure also shows the baseline.
    """
    window, target = changes[0][0].rope.original_max_position_embeddings, changes[0][0].target
    drawn: list[tuple[str, Look, Rescaling | None]] = [(BASELINE, Look(PLAIN), None)]
    drawn += [(change.name, look, change) for change, look in changes]
    rows = math.ceil(len(drawn) / COLUMNS)
    columns = math.ceil(len(drawn) / rows)
    heights = [0.5 + 5.0 / columns * rows, max(2.4, 1.0 + LABEL * len(drawn))]
    with canvas(sum(heights)) as figure:
        parts: Any = figure.subfigures(2, 1, height_ratios=heights)
        upper, lower = parts
        panels = upper.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
        for axes, (name, _, change) in zip(panels, drawn, strict=False):
            image = _heat_map(axes, change, window, target)
            axes.set_title(shown(name, 20), color=INK)
        for axes in panels[len(drawn) :]:
            axes.remove()
        for axes in panels[len(drawn) - columns : len(drawn)]:
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("key")
        for axes in panels[::columns]:
            axes.set_ylabel("query")
        bar = upper.colorbar(image, ax=panels[: len(drawn)].tolist(), aspect=4 + 8 * rows, pad=0.02)
        bar.set_ticks(
            [0, window, target], labels=["0", f"{short_length(window)}\ntrained", short_length(target)]
        )
        bar.solids.set_rasterized(True)
        bar.outline.set_visible(False)
        bar.ax.axhline(window, color=INK, linewidth=0.9)
        _curves(lower.subplots(), drawn, window, target, heights[1] - 0.7)
    return figure


def _heat_map(axes: Axes, change: Rescaling | None, window: int, target: int) -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, TwoSlopeNorm

    places = _sampled(target, CELLS)
    _, distances = read_at(change, places, places)
    blues, oranges = colormaps["Blues"], colormaps["Oranges"]
    parts = torch.linspace(0, 1, 128).tolist()
    colours = [blues(0.12 + 0.83 * part) for part in parts] + [oranges(0.4 + 0.4 * part) for part in parts]
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    for set_ticks in (axes.set_xticks, axes.set_yticks):
        set_ticks(*_ticks(window, target))
    return axes.imshow(
        distances.numpy(),
        cmap=ListedColormap(colours),
        norm=TwoSlopeNorm(window, 0, max(target, window + 1)),
        extent=(0, target, target, 0),
        interpolation="nearest",
    )


def _curves(
    axes: Axes, drawn: Sequence[tuple[str, Look, Rescaling | None]], window: int, target: int, room: float
) -> None:
    """The effective distance of the last token's keys against the true one."""
    keys = _sampled(target, POINTS).flip(0)
    last = keys[:1]
    true = (last - keys).tolist()
    highest, ends = 1.2 * window, []
    for name, (colour, dash), change in drawn:
        low, high = (table[0] for table in read_at(change, last, keys))
        axes.plot(true, high.tolist(), color=colour, linestyle=dash, label=name, linewidth=1.3)
        if float(low[-1]) < float(high[-1]):
            alpha = min(0.14, 0.6 / len(drawn))
            below, above = [0, float(low[-1])], [0, float(high[-1])]  # a scaling is linear in the distance
            axes.fill_between([0, true[-1]], below, above, color=colour, alpha=alpha, linewidth=0)
        if change is not None:
            highest = max(highest, 1.05 * float(high.nan_to_num(0).max()))
        ends.append((name, Look(colour, dash), true[-1], float(high[-1])))
    axes.set(xlim=(0, target), ylim=(0, min(highest, OVERSHOOT * window)))
    axes.set_xlabel("true distance of the last token's keys, tokens")
    axes.set_title("read at a distance of, tokens")
    axes.set_xticks(*_ticks(window, target, "\ntrained"))
    axes.set_yticks([0, window], ["0", short_length(window)])
    axes.axhline(window, **DASHED)
    name_lines(axes, ends, room, lambda tokens: f"{tokens:,.0f}")


def _sampled(target: int, count: int) -> Tensor:
    """At most ``count`` positions from the first to the last."""
    return torch.linspace(0, target - 1, min(count, target), dtype=torch.float64).round().long()


def _ticks(window: int, target: int, trained: str = "") -> tuple[list[int], list[str]]:
    """The ends of an axis, and the original length if there is room, with their names."""
    ticks = {0: "0", window: short_length(window) + trained, target: short_length(target)}
    ticks = {tokens: name for tokens, name in ticks.items() if not 0 < tokens < 0.12 * target}
    return [*ticks], [*ticks.values()]


def slow_divisors(rope: Rope, inv_freq: Tensor) -> tuple[float, float]:
    """The least and the greatest divisor, theta / theta', of the pairs without a full rotation within L.

    For a pair with a full rotation every angle is in distribution; for the others, angles are new if
    D / divisor exceeds L. If all pairs complete one, the slowest pair is used. Pairs of zero frequency are
    left out.
    """
    before = rope.inv_freq()
    rotated = rotations(before, rope.original_max_position_embeddings)
    slowest = rotated[rotated > 0].min()
    slow = divisors(before, inv_freq)[(rotated > 0) & (rotated <= max(1.0, float(slowest)))]
    return float(slow.min()), float(slow.max())
