"""What a scaling does to the rotary pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ropepatch.attention import MAPS, AttentionMap, make_map
from ropepatch.report.plots.style import COLOURS, FAINT, INK, PLAIN, QUIET, Look, canvas, shown, spread
from ropepatch.scaling.bands import bands
from ropepatch.scaling.rope import Frequencies, Rope, wavelengths
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ropepatch.evaluation.results import Result
    from ropepatch.extension.planning import Plan
    from ropepatch.scaling import Scaling

SHADES = {  # by fate: the more a pair is slowed down, the darker
    "kept": (INK, 0.0),
    "blended": (INK, 0.07),
    "interpolated": (INK, 0.15),
    "stretched": (INK, 0.24),
    "sped up": (COLOURS[2], 0.2),
    "stopped": (COLOURS[1], 0.2),
}
BLUE = Look(COLOURS[0])
TURNS = 6  # of a pair that are drawn, at most


@dataclass(frozen=True)
class Rescaling:
    """What becomes of a rope, or of the distances it turns by.

    Attributes:
        name: The method.
        rope: The rope before.
        after: The frequencies and the attention factor after it.
        factor: By how much the context grows, s.
        target: The context to reach, in tokens.
        distances: The attention map, which leaves the frequencies as they are; None of a scaling.
    """

    name: str
    rope: Rope
    after: Frequencies
    factor: float
    target: int
    distances: AttentionMap | None = None

    @classmethod
    def of(cls, rope: Rope, scaling: Scaling, target: int | None = None) -> Rescaling:
        """What a scaling does.

        Args:
            rope: The rope before.
            scaling: What is done to it.
            target: The context to reach, in tokens; factor x L if None.

        Raises:
            RopepatchError: If the scaling is undefined on the rope.
        """
        reach = target or round(scaling.factor * rope.original_max_position_embeddings)
        return cls(scaling.name, rope, scaling.frequencies(rope, reach), scaling.factor, reach)

    @classmethod
    def planned(cls, plan: Plan) -> Rescaling:
        """What a plan does."""
        factor, target = plan.scaling.factor, plan.target
        return cls(plan.method.name, plan.rope, plan.frequencies(), factor, target, plan.distances)

    @classmethod
    def measured(cls, result: Result) -> Rescaling | None:
        """What the scaling of a result did; None if it has none, or does not say."""
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
    rope, target, window = change.rope, change.target, change.rope.original_max_position_embeddings
    inv_freq = change.after.inv_freq
    before, after = wavelengths(rope.inv_freq()).tolist(), wavelengths(inv_freq).tolist()
    finite = [tokens for tokens in (*before, *after, window, target) if math.isfinite(tokens)]
    top = max(finite) * 2.2
    with canvas(3.6) as figure:
        from matplotlib.colors import to_rgba
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        axes.set_title("tokens per rotation")
        axes.set_yscale("log")
        axes.set(ylim=(min(finite) / 1.4, top), xlim=(-0.5, rope.num_pairs - 0.5), xlabel="rotary pair")
        axes.minorticks_off()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        decades = range(math.ceil(math.log10(min(finite) / 1.4)), math.floor(math.log10(top)) + 1)
        axes.set_yticks([10.0**k for k in decades], [_decimal(k) for k in decades])
        fates = bands(rope, inv_freq, change.factor)
        for band in fates:
            colour, alpha = SHADES[band.fate]
            axes.axvspan(
                band.first - 0.5, band.last + 0.5, color=colour, alpha=alpha, linewidth=0, zorder=0.5
            )
        size = max(1.6, min(4.0, 150 / rope.num_pairs))
        (line,) = axes.plot(before, "o", color=PLAIN, markersize=size, fillstyle="none", label="before")
        moving = [tokens if math.isfinite(tokens) else math.nan for tokens in after]
        (scaled,) = axes.plot(
            moving, "o", color=look.colour, markersize=size, label=f"after {shown(change.name)}"
        )
        stopped = [pair for pair, tokens in enumerate(after) if math.isinf(tokens)]
        axes.plot(
            stopped, [top / 1.25] * len(stopped), "^", color=look.colour, markersize=size, clip_on=False
        )
        _mark(axes, {f"trained {short_length(window)}": window, f"target {short_length(target)}": target})
        names = list(dict.fromkeys(band.fate for band in fates))
        shades = [
            Patch(facecolor=to_rgba(*SHADES[name]), edgecolor=FAINT, linewidth=0.6, label=name)
            for name in names
        ]
        figure.legend(
            handles=[line, scaled, *shades],
            loc="outside upper left",
            ncols=6 if len(change.name) < 14 else 5,
            handlelength=1.2,
            columnspacing=1.4,
        )
    return figure


def plot_rotations(change: Rescaling, look: Look = BLUE, *, pairs: Sequence[int] | None = None) -> Figure:
    """The cos and sin of some pairs against position, before and after, times the attention factor.

    Every pair has an axis of its own, which ends at the target or after a few turns: a fast pair turns too
    often to be drawn to the end.

    Args:
        change: What is drawn.
        look: The colour of the method.
        pairs: Which to draw, from 0, the fastest; five spread over all if None.
    """
    rope, target, window = change.rope, change.target, change.rope.original_max_position_embeddings
    inv_freq, attention_factor = change.after
    drawn = list(pairs) if pairs is not None else _spaced(rope.num_pairs, 5)
    sides = (
        ("before", PLAIN, rope.inv_freq(), rope.carried_attention_factor),
        ("after", look.colour, inv_freq, attention_factor),
    )
    height = 1.1 * max(1.0, attention_factor, rope.carried_attention_factor)
    with canvas(0.7 + 0.95 * len(drawn)) as figure:
        from matplotlib.lines import Line2D

        grid = figure.subplots(len(drawn), 2, squeeze=False, sharey=True)
        for row, pair in zip(grid, drawn, strict=True):
            fast = min(_turn(frequencies[pair].item()) for _, _, frequencies, _ in sides)
            end = min(float(target), TURNS * fast)
            positions = torch.linspace(0, end, 300, dtype=torch.float64)
            for axes, function in zip(row, (torch.cos, torch.sin), strict=True):
                for name, colour, frequencies, factor in sides:
                    values = factor * function(positions * frequencies[pair].double())
                    axes.plot(positions.tolist(), values.tolist(), color=colour, linewidth=1.2, label=name)
                if window < end:
                    axes.axvline(window, color=FAINT, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0.9)
                axes.set(xlim=(0, end), ylim=(-height, height))
                axes.set_yticks([-1, 0, 1])
                ticks = [0, window, end] if 0.07 < window / end < 0.85 else [0, end]
                axes.set_xticks(ticks, [short_length(round(tick)) if tick else "0" for tick in ticks])
            row[0].set_title(f"pair {pair}: {_turns(rope, inv_freq, pair)} tokens per turn", color=INK)
        for axes, name in zip(grid[0], ("cos", "sin"), strict=True):
            axes.annotate(
                name,
                (1, 1),
                (0, 4),
                xycoords="axes fraction",
                textcoords="offset points",
                ha="right",
                color=QUIET,
            )
        handles, labels = grid[0][0].get_legend_handles_labels()
        labels[1] = f"after {shown(change.name)}" + (
            f", times {attention_factor:.3f}" if attention_factor != 1 else ""
        )
        handles.append(Line2D([], [], color=FAINT, linewidth=0.9, linestyle=(0, (4, 3))))
        labels.append(f"trained {short_length(window)}")
        figure.legend(handles, labels, loc="outside upper left", ncols=3)
        figure.supxlabel("position, tokens", color=QUIET, fontsize=9)
    return figure


def _mark(axes: Axes, lines: dict[str, int]) -> None:
    """Horizontal lines with their names at the right."""
    low, high = (math.log(y) for y in axes.get_ylim())
    heights = [(math.log(tokens) - low) / (high - low) for tokens in lines.values()]
    for (name, tokens), place in zip(lines.items(), spread(heights, 0.055), strict=True):
        axes.axhline(tokens, color=QUIET, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0.9)
        axes.text(
            1.01, place, name, transform=axes.transAxes, va="center_baseline", color=QUIET, clip_on=False
        )


def _spaced(count: int, wanted: int) -> list[int]:
    if count <= wanted:
        return list(range(count))
    return [round(k * (count - 1) / (wanted - 1)) for k in range(wanted)]


def _turn(inv_freq: float) -> float:
    return 2 * math.pi / inv_freq if inv_freq else math.inf


def _turns(rope: Rope, inv_freq: torch.Tensor, pair: int) -> str:
    first, then = (_number(_turn(values[pair].item())) for values in (rope.inv_freq(), inv_freq))
    return first if first == then else f"{first} → {then}"


def _number(tokens: float) -> str:
    return "∞" if math.isinf(tokens) else f"{tokens:.3g}" if tokens < 1000 else f"{tokens:,.0f}"


def _decimal(power: int) -> str:
    return short_length(10**power) if power < 3 else f"{10**power:,}" if power < 7 else f"1e{power}"
