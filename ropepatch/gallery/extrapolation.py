"""Train short, test long: the loss of models with different position encodings, by the length of the text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ropepatch.encodings.registry import ENCODINGS
from ropepatch.errors import RopepatchError
from ropepatch.files import shipped
from ropepatch.report.plots.style import GRID, INK, PLAIN, QUIET, Look, canvas, length_axis, looks, spread
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STUDY = "encodings.json"  # in eval/results
TRAINED = 128  # tokens, in the study
HEADROOM = 2.5  # nats by which the picture goes on above its best value
LABEL = 0.14 / 1.8  # inches between the names beside the lines, of those of an axis

Curve = dict[int, float]


def measured_curves() -> tuple[dict[str, Curve], Curve]:
    """What the study measured: nats per token by length for every encoding, and the floor of the text."""
    content = json.loads((shipped("eval/results") / STUDY).read_text(encoding="utf-8"))
    return mean_curves(content["rows"])


def from_scratch(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """The runs of each encoding that was trained from scratch, one per seed, in the order of the registry."""
    for name in ENCODINGS:
        runs = [row for row in rows if row["study"] == "scratch" and row["encoding"] == name]
        if runs:
            yield name, sorted(runs, key=lambda row: row["seed"])


def mean_curves(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Curve], Curve]:
    """The losses of runs from scratch, means over their seeds in the order of the registry, and the floor."""
    means = {
        name: {
            int(length): sum(run["nats"][length] for run in runs) / len(runs) for length in runs[0]["nats"]
        }
        for name, runs in from_scratch(rows)
    }
    return means, {int(length): value for length, value in rows[0]["floor"]["nats"].items()}


def plot_extrapolation(
    curves: Mapping[str, Mapping[int, float]], trained: int, floor: Mapping[int, float] | None = None
) -> Figure:
    """Train short, test long: the loss by length, a panel per family with all others in grey.

    What is far above the best value leaves the picture and is named there with its last value; a line that
    ends early, because the encoding is not defined any further, ends with a cross.

    Args:
        curves: Nats per token by length in tokens, by name of a registered encoding.
        trained: The length of training, in tokens; marked.
        floor: The loss that no model can beat, where it is known; dotted.

    Raises:
        RopepatchError: If there are no losses, or matplotlib is not installed.
    """
    lines = {name: _line(curve) for name, curve in curves.items()}
    if not lines or not all(lines.values()):
        raise RopepatchError("no losses to draw", hint="pass a loss by length for every encoding")
    groups: dict[str, list[str]] = {}
    for name in curves:
        groups.setdefault(ENCODINGS[name].family, []).append(name)
    low, high = _span([y for line in lines.values() for y in line.values()], floor)
    lengths = sorted({length for line in lines.values() for length in line})
    rows = math.ceil(len(groups) / 2)
    with canvas(0.4 + 2.3 * rows, width=8.4) as figure:
        grid = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False)
        for axes in grid.flat[len(groups) :]:
            axes.set_visible(False)
        for axes, (family, names) in zip(grid.flat, groups.items(), strict=False):
            axes.set_title(family, color=INK)
            axes.set(xlim=(lengths[0] / 1.04, lengths[-1] * 1.04), ylim=(low, high))
            for name in (name for name in lines if name not in names):
                axes.plot(*_points(lines[name]), color=GRID, linewidth=0.9, zorder=1.5, label="_other")
            _draw(axes, {name: lines[name] for name in names}, _line(floor or {}), lengths[-1], LABEL)
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
    greatest = min(max(losses), least + HEADROOM)
    margin = 0.04 * (greatest - least or 1)
    return least - margin, greatest + margin


def _draw(
    axes: Axes, lines: Mapping[str, Mapping[int, float]], floor: Mapping[int, float], end: int, gap: float
) -> None:
    """Lines in colours and the floor, named at the right in the order of their last values."""
    low, high = axes.get_ylim()
    styles = looks(lines)
    for name, line in lines.items():
        colour, dash = styles[name]
        axes.plot(*_points(line), "o", color=colour, ls=dash, linewidth=1.6, markersize=2.5, label=name)
        if max(line) < end:
            axes.plot(max(line), line[max(line)], "x", color=colour, markersize=7, label="_end")
    if floor:
        axes.plot(*_points(floor), color=PLAIN, linestyle=":", linewidth=1.2, label="floor")
        lines, styles = {**lines, "floor": floor}, {**styles, "floor": Look(PLAIN)}
    last = {name: line[max(line)] for name, line in lines.items()}
    places = [min(max((value - low) / (high - low), 0), 1) for value in last.values()]
    for (name, value), place in zip(last.items(), spread(places, gap), strict=True):
        words = f"{name}, to {short_length(max(lines[name]))}" if max(lines[name]) < end else name
        words += f" ↑ {value:.1f}" if value > high else ""
        axes.annotate(
            words, (1.02, place), xycoords="axes fraction", va="center_baseline", color=styles[name].colour
        )
