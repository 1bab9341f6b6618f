"""Figures of what was measured, in one restrained style."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from matplotlib.figure import Figure

    from ropepatch.evaluation.curves import LossCurve
    from ropepatch.evaluation.passkey import PasskeyGrid

STYLE: Any = {
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "ropepatch",  # the same figure is the same file
}
COLOURS = ["#444444", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"]  # Okabe and Ito's


def plot_loss(curves: Mapping[str, LossCurve], *, trained: int, floor: LossCurve | None = None) -> Figure:
    """The loss by position of several models over the same documents, in nats per token.

    Args:
        curves: What to draw, by name.
        trained: The context the model was trained on, in tokens; marked.
        floor: The loss that no model can beat, where it is known; drawn below.

    Raises:
        RopepatchError: If matplotlib is not installed.
    """
    with _canvas(6.4, 3.4) as figure:
        axes = figure.subplots()
        for (name, curve), colour in zip(curves.items(), COLOURS, strict=False):
            axes.plot(*_binned(curve), color=colour, label=name)
        if floor is not None:
            axes.plot(*_binned(floor), color="#999999", linestyle=":", label="floor")
        axes.axvline(trained, color="#999999", linewidth=0.8, linestyle="--")
        axes.text(
            trained, 1.0, " trained context", transform=axes.get_xaxis_transform(), va="top", color="#666666"
        )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(xlabel="position, tokens", ylabel="loss, nats per token", ylim=(0, None))
        axes.legend(loc="upper left")
    return figure


def plot_passkey(grids: Mapping[str, PasskeyGrid], *, trained: int) -> Figure:
    """The share of pass keys retrieved by length and depth, one map per model.

    Args:
        grids: What to draw, by name, all over the same lengths and depths.
        trained: The context the model was trained on, in tokens; marked.

    Raises:
        RopepatchError: If matplotlib is not installed.
    """
    with _canvas(1.2 + 3.0 * len(grids), 2.8) as figure:
        row = figure.subplots(1, len(grids), squeeze=False, sharey=True)
        for axes, (name, grid) in zip(row[0], grids.items(), strict=True):
            lengths = sorted({length for length, _ in grid.cells})
            depths = sorted({depth for _, depth in grid.cells})
            shares = [[grid.cells[length, depth].accuracy for length in lengths] for depth in depths]
            image = axes.imshow(shares, vmin=0, vmax=1, cmap="YlGnBu", aspect="auto")
            axes.grid(False)
            axes.set(title=name, xlabel="prompt, tokens")
            axes.set_xticks(range(len(lengths)), [f"{length}" for length in lengths])
            axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
            for y, values in enumerate(shares):
                for x, share in enumerate(values):
                    colour = "white" if share > 0.6 else "#333333"
                    axes.text(x, y, f"{share:.0%}", ha="center", va="center", fontsize=7, color=colour)
            inside = sum(length <= trained for length in lengths)
            axes.axvline(inside - 0.5, color="#333333", linewidth=1.2, linestyle="--")
        row[0][0].set_ylabel("depth of the key")
        figure.colorbar(image, ax=row[0], label="retrieved", format="{x:.0%}")
    return figure


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write the figure as ``stem``.png and ``stem``.svg; the two files."""
    files = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    with _style():
        for file in files:
            # Without the date, the same figure is the same file.
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def _binned(curve: LossCurve) -> tuple[list[float], list[float]]:
    """Middles of stretches of positions, each a quarter longer than the last; and the mean loss in each."""
    end = max(map(len, curve.nll)) + 1
    edges = [1]
    while edges[-1] < end:
        edges.append(min(end, max(edges[-1] + 8, edges[-1] * 5 // 4)))
    middles = [(begin * stop) ** 0.5 for begin, stop in pairwise(edges)]
    return middles, [curve.between(begin, stop).mean for begin, stop in pairwise(edges)]


@contextmanager
def _style() -> Iterator[None]:
    """The style within the block; afterwards matplotlib's settings are what they were."""
    try:
        import matplotlib
    except ImportError as error:
        raise RopepatchError("figures need matplotlib", hint='pip install "ropepatch[plot]"') from error
    with matplotlib.rc_context(STYLE):
        yield


@contextmanager
def _canvas(width: float, height: float) -> Iterator[Figure]:
    """An empty figure in the style, its size in inches, that belongs to no window."""
    with _style():
        from matplotlib.figure import Figure

        yield Figure(figsize=(width, height), layout="constrained")
