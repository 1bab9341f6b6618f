"""All the figures that some results and plans allow, with a name and a caption each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ropepatch.evaluation.comparisons import Comparison, by_place, comparisons, training_free
from ropepatch.evaluation.results import Result, slug
from ropepatch.evaluation.tasks import task_of
from ropepatch.report.plots.frequencies import Rescaling, plot_rotations, plot_wavelengths
from ropepatch.report.plots.losses import plot_gain, plot_perplexity, plot_positions
from ropepatch.report.plots.passkeys import plot_cells
from ropepatch.report.plots.style import Look, looks
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure


DRAWN: Mapping[str, Callable[[Comparison, Mapping[str, Look]], Figure]] = {  # by the kind of a `Drawing`
    "by_length": plot_perplexity,
    "by_position": plot_positions,
    "gain": plot_gain,
    "cells": lambda comparison, look: plot_cells(comparison),
}


class Picture(NamedTuple):
    """A figure, what its file is called and what stands below it."""

    name: str
    figure: Figure
    caption: str


def figures(results: Sequence[Result]) -> dict[str, Figure]:
    """The figures that the results allow, by names that serve as file names.

    Args:
        results: Of any models and tasks; what cannot be compared is drawn apart.
    """
    places, look = by_place(comparisons(results)), looks_of(results)
    drawn: dict[str, Figure] = {}
    for (model, target), groups in places.items():
        parts = [
            Path(model).name if len({name for name, _ in places}) > 1 else "",
            short_length(target) if len({tokens for _, tokens in places}) > 1 else "",
        ]
        pictures = [picture for group in groups for picture in pictures_of_results(group, look)]
        for change, colour in rescalings(groups, look):
            pictures += [
                picture._replace(name=f"{picture.name}-{change.name}")
                for picture in pictures_of_rescaling(change, colour)
            ]
        for picture in pictures:
            name = "-".join(filter(None, (*parts, picture.name)))
            stem = slug(name).strip("-.")
            numbered = (stem if n == 1 else f"{stem}-{n}" for n in itertools.count(1))
            drawn[next(name for name in numbered if name not in drawn)] = picture.figure
    return drawn


def looks_of(results: Sequence[Result]) -> dict[str, Look]:
    """A look for every name in the comparisons of the results."""
    named = [item for group in comparisons(results) for item in group.results.items()]
    return looks(
        (name for name, _ in named), unscaled=(name for name, result in named if result.scaling is None)
    )


def rescalings(groups: Sequence[Comparison], look: Mapping[str, Look]) -> list[tuple[Rescaling, Look]]:
    """What the scalings of some comparisons did, each once, as far as the results say it."""
    named = {name: result for group in groups for name, result in group.results.items()}
    changes = (
        (Rescaling.measured(result), look[name])
        for name, result in named.items()
        if not (result.adapted and training_free(named, result))
    )
    return [(change, colour) for change, colour in changes if change is not None]


def pictures_of_results(comparison: Comparison, look: Mapping[str, Look]) -> list[Picture]:
    """What the tables of a comparison allow."""
    adapted = any(result.adapted for result in comparison.results.values())
    then = " before the adaptation" * adapted  # when the trained context was that
    trained = f"the trained context of {short_length(comparison.trained)} tokens{then}"
    return [
        Picture(name, DRAWN[kind](comparison, look), f"{caption}; dashed: {trained}.")
        for name, kind, caption in task_of(comparison.task).drawings(comparison)
    ]


def pictures_of_rescaling(change: Rescaling, look: Look) -> list[Picture]:
    """What a scaling does to the rotary pairs."""
    waves = "Tokens per rotation of every rotary pair, before and after; shaded: what becomes of the pairs."
    turns = (
        "Cos and sin of some pairs by position, before and after; dashed: the trained context. "
        "Fast pairs are drawn for their first turns."
    )
    return [
        Picture("wavelengths", plot_wavelengths(change, look), waves),
        Picture("rotations", plot_rotations(change, look), turns),
    ]
