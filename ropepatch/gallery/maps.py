"""Tables, distances and biases of position encodings as maps of colour.

Every plot raises a RopepatchError if matplotlib is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ropepatch.encodings.absolute import Binary, Integer, Normalised, Sinusoidal
from ropepatch.encodings.relative import buckets_of, slopes
from ropepatch.report.plots.style import COLOURS, INK, QUIET, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ropepatch.gallery.properties import Properties

SIGNED, RISING, ORDER = "RdBu_r", "Blues", "viridis"
DARK = 0.55  # of RISING
EXACTLY = "donot_use_mm_for_euclid_dist"  # or the distance to itself is not 0
HEADINGS = {  # of the properties
    "unique": "unique",
    "length_free": "same in any\nlength",
    "linear": "shifts are\nlinear",
    "norm_kept": "norm\nkept",
    "products": "products\nby distance",
    "relative": "scores by\ndistance",
    "decays": "decays",
    "beyond": "defined\nbeyond L",
    "grid": "extends\nto a grid",
    "order": "order with-\nout a mask",
}
POSITIONS, CHANNELS = 128, 128  # of the tables that are drawn
UNTRAINED = "learned, untrained"


def _tables() -> dict[str, Tensor]:
    """The tables of absolute encodings [POSITIONS, CHANNELS], by the titles of their panels."""
    kinds = {"sinusoidal": Sinusoidal(), "binary": Binary(), "integer": Integer()}
    tables = {title: kind.vectors(torch.arange(POSITIONS), CHANNELS) for title, kind in kinds.items()}
    draw = torch.Generator().manual_seed(0)
    return tables | {UNTRAINED: torch.randn(POSITIONS, CHANNELS, generator=draw)}


def plot_sinusoidal_table() -> Figure:
    """The sinusoidal table: a row per position, a column per channel."""
    with canvas(4.2) as figure:
        axes = figure.subplots()
        image = _map(axes, _tables()["sinusoidal"], SIGNED, -1, 1)
        axes.set(xlabel="channel: sin in even ones, cos in odd ones", ylabel="position")
        axes.set_title("sinusoidal: every channel is a wave over the positions, the last ones the slowest")
        figure.colorbar(image, ax=axes, ticks=[-1, 0, 1], shrink=0.6)
    return figure


def plot_teaching_tables(positions: int = 16, channels: int = 8) -> Figure:
    """Integer, normalised and binary positions, with their numbers."""
    places = torch.arange(positions)
    tables = {
        "integer: p": (Integer(), "{:.0f}"),
        f"normalised: p / {positions - 1}": (Normalised(length=positions), "{:.2f}"),
        "binary: the digits of p": (Binary(), "{:.0f}"),
    }
    with canvas(4.2, width=8.4) as figure:
        for axes, (title, (encoding, digits)) in zip(figure.subplots(1, 3), tables.items(), strict=True):
            table = encoding.vectors(places, channels)
            _map(axes, table, RISING, 0, 1.25 * float(table.max()))
            _write(axes, table, digits)
            axes.set(xlabel="channel", title=title)
            axes.set_yticks(range(positions))
        figure.axes[0].set_ylabel("position")
    return figure


def plot_distance_matrices() -> Figure:
    """The distance between the vectors of any two positions, in four absolute encodings."""
    with canvas(2.5, width=8.4) as figure:
        panels = figure.subplots(1, 4, sharey=True)
        for axes, (name, table) in zip(panels, _tables().items(), strict=True):
            distances = torch.cdist(table, table, compute_mode=EXACTLY)
            image = _map(axes, distances / distances.max(), ORDER, 0, 1)
            axes.set(title=name, xlabel="position")
        panels[0].set_ylabel("position")
        figure.colorbar(image, ax=panels, ticks=[0, 1], shrink=0.8).set_ticklabels(["equal", "farthest"])
    return figure


def plot_projection() -> Figure:
    """The vectors of all positions in the directions in which they differ most, coloured by position."""
    with canvas(2.6, width=8.4) as figure:
        panels = figure.subplots(1, 4)
        tables, views = _tables(), (("sinusoidal", 0), ("sinusoidal", 2), ("sinusoidal", 4), (UNTRAINED, 0))
        for axes, (name, first) in zip(panels, views, strict=True):
            where, shares = principal(tables[name])
            x, y = where[:, first].tolist(), where[:, first + 1].tolist()
            axes.plot(x, y, color=QUIET, linewidth=0.5, alpha=0.5)
            dots = axes.scatter(x, y, c=range(len(where)), cmap=ORDER, s=9, zorder=3)
            axes.set(title=f"{name}, {first + 1} and {first + 2}", aspect="equal", xticks=[], yticks=[])
            axes.set_adjustable("datalim")
            axes.set_xlabel(f"{float(shares[first : first + 2].sum()):.0%} of the variance")
        ticks = [0, POSITIONS // 2, POSITIONS - 1]
        figure.colorbar(dots, ax=panels, ticks=ticks, shrink=0.8, label="position")
    return figure


def principal(table: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, C] on their principal directions [T, C], and the shares of the variance [C]."""
    centred = table.double() - table.double().mean(0)
    _, strengths, directions = torch.linalg.svd(centred, full_matrices=False)
    return centred @ directions.T, strengths**2 / (strengths**2).sum()


def plot_biases(heads: int = 8, shown: Sequence[int] = (1, 2, 4, 8), tokens: int = 160) -> Figure:
    """What ALiBi and T5 add to the scores of a few heads; T5's numbers are trained, so its buckets are shown.

    Args:
        heads: H.
        shown: The heads that are drawn, counted from 1.
        tokens: The length of the text.
    """
    positions = torch.arange(tokens)
    distances = positions[:, None] - positions
    buckets = buckets_of(distances.clamp(min=0), 32, 128)
    drawn = torch.randn(32, len(shown) - 1, generator=torch.Generator().manual_seed(0))
    below = 12  # of a score, where colours end
    with canvas(4.6, width=8.4) as figure:
        upper, lower = figure.subplots(2, len(shown), sharex=True, sharey=True)
        for axes, head in zip(upper, shown, strict=True):
            slope = float(slopes(heads)[head - 1])
            image = _map(axes, _behind(-slope * distances, distances), f"{RISING}_r", -below, 0)
            axes.set_title(f"head {head}: −{slope:.2g} a token")
        bar = figure.colorbar(image, ax=upper, ticks=[-below, 0], shrink=0.8)
        bar.set_ticklabels([f"−{below} or less", "0"])
        image = _map(lower[0], _behind(buckets, distances), RISING, 0, 31)
        image.set_cmap(_striped(32))
        lower[0].set_title("the 32 buckets")
        for n, axes in enumerate(lower[1:]):
            image = _map(axes, _behind(drawn[buckets, n], distances), SIGNED, -2.5, 2.5)
            axes.set_title(f"head {n + 1}, untrained")
        bar = figure.colorbar(image, ax=lower, ticks=[-2.5, 0, 2.5], shrink=0.8)
        for axes, name in ((upper[0], "ALiBi"), (lower[0], "T5")):
            axes.set_ylabel("query")
            write_beside(axes, name, -42)
        for axes in lower:
            axes.set_xlabel("key")
    return figure


def plot_clipping(clip: int = 4, tokens: int = 10) -> Figure:
    """Which of Shaw's vectors a query and a key use, without and with clipping.

    Args:
        clip: k, in tokens.
        tokens: The length of the text.
    """
    positions = torch.arange(tokens)
    distances = positions[:, None] - positions
    with canvas(3.4) as figure:
        panels = {
            "the distance i − j": distances,
            f"Shaw: the vector t = min(i − j, {clip})": distances.clamp(max=clip),
        }
        for axes, (title, index) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
            values = _behind(index, distances)
            _map(axes, values, RISING, -1, 1.5 * (tokens - 1))
            _write(axes, values, "{:.0f}")
            axes.set(title=title, xlabel="key j")
        figure.axes[0].set_ylabel("query i")
    return figure


def plot_properties(measured: Mapping[str, Properties]) -> Figure:
    """Which properties each encoding has.

    Args:
        measured: The properties of encodings, by their names.
    """
    looks = {True: (COLOURS[0], "yes"), False: ("#f3d9c8", "no"), None: ("white", "–")}
    with canvas(0.9 + 0.24 * len(measured), width=8.4) as figure:
        from matplotlib.patches import Rectangle

        axes = figure.subplots()
        for row, properties in enumerate(measured.values()):
            for column, one in enumerate(properties.findings().values()):
                colour, word = looks[one.holds]
                axes.add_patch(Rectangle((column - 0.46, row - 0.44), 0.92, 0.88, color=colour, linewidth=0))
                ink = "white" if one.holds else QUIET
                axes.text(column, row, word, ha="center", va="center_baseline", color=ink, fontsize=8)
        columns = [HEADINGS[name] for name in next(iter(measured.values())).findings()]
        axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(measured) - 0.5, -0.5))
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(measured)), list(measured), color=INK)
        axes.tick_params(length=0, labeltop=True, labelbottom=False, labelcolor=INK)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
    return figure


def write_beside(axes: Axes, words: str, offset: float) -> None:
    """Words at the left of a panel, so many points from its edge."""
    where: Any = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(words, (0, 0.5), (offset, 0), ha="right", va="center", color=INK, **where)


def _map(axes: Axes, values: Tensor, colours: str, low: float, high: float) -> Any:
    axes.grid(visible=False)
    return axes.imshow(
        values.tolist(), cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest"
    )


def _write(axes: Axes, values: Tensor, digits: str) -> None:
    """The numbers into their cells, in white where it is dark; none where there is none."""
    low, high = axes.images[0].get_clim()
    for row, line in enumerate(values.tolist()):
        for column, value in enumerate(line):
            if value == value:  # a number
                ink = "white" if (value - low) / (high - low) > DARK else INK
                look: Any = {"ha": "center", "va": "center_baseline", "fontsize": 7, "color": ink}
                axes.text(column, row, digits.format(value), **look)


def _behind(values: Tensor, distances: Tensor) -> Tensor:
    """The values of keys up to the query; nothing after it."""
    return values.double().masked_fill(distances < 0, torch.nan)


def _striped(count: int) -> Any:
    """So many colours, any two neighbours unlike."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    shades = [float(0.15 + 0.7 * k / count + 0.12 * (k % 2)) for k in range(count)]
    return ListedColormap([colormaps[RISING](shade) for shade in shades])
