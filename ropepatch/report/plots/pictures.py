"""The figures of results and plans, each with a name and a caption."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ropepatch.evaluation.comparisons import Comparison, by_place, comparisons
from ropepatch.evaluation.results import Result, slug
from ropepatch.report.plots.changes import (
    Rescaling,
    plot_effective_distances,
    plot_wavelengths,
)
from ropepatch.report.plots.lines import (
    plot_depths,
    plot_found,
    plot_gain,
    plot_perplexity,
    plot_positions,
)
from ropepatch.report.plots.style import Look, looks
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ropepatch.extension.planning import Plan

Changes = Sequence[tuple[Rescaling, Look]]
BANDS = "bands: 95 % intervals"
DISTANCES = (
    "The effective distance of the last token's keys under each method; dashed: the original length. A "
    "scaling divides the frequency of each rotary pair, and so the distances for this pair. The line is the "
    "slow pair with the greatest distances, the shade the other slow pairs: those that do not complete a "
    "rotation within the original length. Faster pairs have seen every angle."
)
WAVELENGTHS = "Tokens per rotation of every rotary pair, before and after; the shade shows the change."


class Picture(NamedTuple):
    """A figure with its file name and caption."""

    name: str
    figure: Figure
    caption: str


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """The figures that the results allow, by file name.

    Args:
        results: Results of any models and tasks; those that are not comparable get separate figures.
    """
    places, look = by_place(comparisons(results)), looks_of(results)
    models, targets = ({place[k] for place in places} for k in (0, 1))
    drawn: dict[str, Figure] = {}
    for (model, target), groups in places.items():
        parts = [
            Path(model).name if len(models) > 1 else "",
            short_length(target) if len(targets) > 1 else "",
        ]
        pictures = [
            picture for group in groups for picture in pictures_of_results(group, look)
        ]
        _add(drawn, pictures, *parts)
    return drawn


def figures_of_plans(plans: Sequence[Plan]) -> dict[str, Figure]:
    """The figures of the changes of plans of one model and target, by file name."""
    drawn: dict[str, Figure] = {}
    _add(drawn, pictures_of_changes(_planned(plans)))
    return drawn


def plot_plan(plan: Plan) -> Figure:
    """A figure of a plan: the tokens per rotation of every rotary pair, or the distances of its remapping."""
    ((change, look),) = _planned([plan])
    return (
        plot_effective_distances([(change, look)])
        if change.distances
        else plot_wavelengths(change, look)
    )


def _planned(plans: Sequence[Plan]) -> Changes:
    changes = [Rescaling.planned(plan) for plan in plans]
    look = looks(change.name for change in changes)
    return [(change, look[change.name]) for change in changes]


def _add(drawn: dict[str, Figure], pictures: Sequence[Picture], *parts: str) -> None:
    """Add pictures under unique names made of these parts and their own names."""
    for picture in pictures:
        stem = slug("-".join(filter(None, (*parts, picture.name)))).strip("-.")
        numbered = (stem if n == 1 else f"{stem}-{n}" for n in itertools.count(1))
        drawn[next(name for name in numbered if name not in drawn)] = picture.figure


def looks_of(results: Sequence[Result]) -> dict[str, Look]:
    """A look for every name in the comparisons of the results."""
    named = [item for group in comparisons(results) for item in group.results.items()]
    return looks(
        (name for name, _ in named),
        unscaled=(name for name, result in named if result.scaling is None),
    )


def pictures_of_results(
    comparison: Comparison, look: Mapping[str, Look]
) -> list[Picture]:
    """The figures that the rows of a comparison allow."""
    present = set(comparison.kinds_of_rows())
    trained = (
        f"dashed: the original length of {short_length(comparison.trained)} tokens"
    )
    pictures = []
    if ("loss", ("length",)) in present:
        caption = f"Perplexity by length, on logarithmic axes; {BANDS}; {trained}."
        pictures.append(
            Picture("perplexity", plot_perplexity(comparison, look), caption)
        )
    if ("loss", ("begin", "end")) in present:
        caption = f"Mean loss of the tokens at these positions; {BANDS}; {trained}."
        pictures.append(Picture("positions", plot_positions(comparison, look), caption))
    if ("gain", ("begin", "end")) in present:
        caption = f"Gain of a token from the context beyond the original length; {BANDS}; {trained}."
        pictures.append(Picture("gain", plot_gain(comparison, look), caption))
    if any(series.measure == "found" for series in comparison.series):
        caption = f"Retrieval accuracy by prompt length; {BANDS}; {trained}."
        pictures.append(Picture("retrieval", plot_found(comparison, look), caption))
    if ("found", ("length", "depth")) in present:
        caption = "Retrieval accuracy by prompt length and depth of the needle."
        pictures.append(Picture("depths", plot_depths(comparison), caption))
    if ("found", ("kind", "length", "depth")) in present:
        for kind in comparison.kinds:
            caption = (
                f"{kind}: retrieval accuracy by prompt length and depth of the needle."
            )
            pictures.append(
                Picture(f"depths-{kind}", plot_depths(comparison, kind), caption)
            )
    return pictures


def pictures_of_changes(changes: Changes) -> list[Picture]:
    """A figure of effective distances, and one of the pairs of each scaling."""
    pictures = [Picture("distances", plot_effective_distances(changes), DISTANCES)]
    for change, look in changes:
        if change.distances is None:
            pictures.append(
                Picture(
                    f"wavelengths-{change.name}",
                    plot_wavelengths(change, look),
                    WAVELENGTHS,
                )
            )
    return pictures
