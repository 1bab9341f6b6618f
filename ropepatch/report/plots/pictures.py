"""All the figures that some results and plans allow, with a name and a caption each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ropepatch.evaluation.comparisons import Comparison, by_place, comparisons, training_free
from ropepatch.evaluation.results import Result, slug
from ropepatch.report.plots.distances import plot_effective_distances
from ropepatch.report.plots.frequencies import Rescaling, plot_rotations, plot_wavelengths
from ropepatch.report.plots.losses import plot_gain, plot_perplexity, plot_positions
from ropepatch.report.plots.retrieval import plot_depths, plot_kinds
from ropepatch.report.plots.style import Look, looks
from ropepatch.settings import short_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ropepatch.extension.planning import Plan


class Drawing(NamedTuple):
    """A figure of the rows of one measure."""

    name: str
    draw: Callable[[Comparison, Mapping[str, Look]], Figure]
    caption: str


BANDS = "bands: 95 % intervals"
DRAWINGS: Mapping[tuple[str, ...], Drawing] = {  # by measure and what it is at
    ("loss", "length"): Drawing(
        "perplexity", plot_perplexity, f"Perplexity by length, on a logarithmic axis; {BANDS}"
    ),
    ("loss", "begin", "end"): Drawing(
        "positions", plot_positions, f"Mean loss of the tokens at these positions; {BANDS}"
    ),
    ("gain", "begin", "end"): Drawing(
        "gain",
        plot_gain,
        "What a token gains from the context beyond the trained one; below 0 that context does harm",
    ),
    ("found", "length", "depth"): Drawing(
        "retrieval",
        lambda comparison, look: plot_depths(comparison),
        "Share of answers found, by the prompt's length and the depth of the needle",
    ),
    ("found", "kind", "length"): Drawing(
        "retrieval-kinds",
        lambda comparison, look: plot_kinds(comparison),
        "Share of answers found, by the kind of question and the prompt's length",
    ),
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
        _add(drawn, [*pictures, *_pictures_of_changes(rescalings(groups, look))], *parts)
    return drawn


def figures_of_plans(plans: Sequence[Plan]) -> dict[str, Figure]:
    """What plans of one model for one target do to distances and to the rope, by names as of `figures`."""
    changes = [Rescaling.planned(plan) for plan in plans]
    look = looks(change.name for change in changes)
    drawn: dict[str, Figure] = {}
    _add(drawn, _pictures_of_changes([(change, look[change.name]) for change in changes]))
    return drawn


def plot_plan(plan: Plan) -> Figure:
    """What a plan changes: the tokens per rotation of every rotary pair, or the distances of its map."""
    change = Rescaling.planned(plan)
    look = looks([change.name])[change.name]
    return plot_effective_distances([(change, look)]) if change.distances else plot_wavelengths(change, look)


def _pictures_of_changes(changes: Sequence[tuple[Rescaling, Look]]) -> list[Picture]:
    """Those of all together, and those of each with its name."""
    return pictures_of_distances(changes) + [
        picture._replace(name=f"{picture.name}-{change.name}")
        for change, colour in changes
        for picture in pictures_of_rescaling(change, colour)
    ]


def _add(drawn: dict[str, Figure], pictures: Sequence[Picture], *parts: str) -> None:
    """Put pictures beside others, by names of these parts and their own that no other has."""
    for picture in pictures:
        stem = slug("-".join(filter(None, (*parts, picture.name)))).strip("-.")
        numbered = (stem if n == 1 else f"{stem}-{n}" for n in itertools.count(1))
        drawn[next(name for name in numbered if name not in drawn)] = picture.figure


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
    """What the rows of a comparison allow."""
    adapted = any(result.adapted for result in comparison.results.values())
    then = " before the adaptation" * adapted  # when the trained context was that
    trained = f"the trained context of {short_length(comparison.trained)} tokens{then}"
    several = len(comparison.parameters.get("kinds") or ()) > 1
    return [
        Picture(drawing.name, drawing.draw(comparison, look), f"{drawing.caption}; dashed: {trained}.")
        for measure, keys in comparison.kinds_of_rows()
        if (drawing := DRAWINGS.get((measure, *keys))) and (several or "kind" not in keys)
    ]


def pictures_of_distances(changes: Sequence[tuple[Rescaling, Look]]) -> list[Picture]:
    """At which distances tokens are read, one picture for all changes of one trained context."""
    windows: dict[int, list[tuple[Rescaling, Look]]] = {}
    for change, look in changes:
        windows.setdefault(change.rope.original_max_position_embeddings, []).append((change, look))
    return [
        Picture("distances", plot_effective_distances(drawn), _distances_in_words(window, drawn))
        for window, drawn in windows.items()
    ]


def _distances_in_words(window: int, drawn: Sequence[tuple[Rescaling, Look]]) -> str:
    """What stands below the distances, as far as they are those of scalings or of maps."""
    words = (
        "The distance at which every query reads every key, and below it the last query. Blue: within the "
        f"trained context of {short_length(window)} tokens; orange: beyond it; blank: unseen."
    )
    if all(change.distances for change, _ in drawn):
        return words
    return (
        f"{words} A scaling slows every rotary pair by a divisor of its own, and so divides the distances "
        "that this pair sees. Of the pairs that did not turn fully within the trained context the one that "
        "sees farthest is drawn, the others are shaded; pairs that did turn fully know every angle."
    )


def pictures_of_rescaling(change: Rescaling, look: Look) -> list[Picture]:
    """What a scaling does to the rotary pairs; nothing of a map, which leaves them alone."""
    if change.distances is not None:
        return []
    waves = "Tokens per rotation of every rotary pair, before and after; shaded: what becomes of the pairs."
    turns = (
        "Cos and sin of some pairs by position, before and after; dashed: the trained context. "
        "Fast pairs are drawn for their first turns."
    )
    return [
        Picture("wavelengths", plot_wavelengths(change, look), waves),
        Picture("rotations", plot_rotations(change, look), turns),
    ]
