"""The gallery of position encodings: pictures for a lecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ropepatch.encodings.registry import ENCODINGS
from ropepatch.gallery.curves import plot_decay, plot_distances, plot_turns
from ropepatch.gallery.extrapolation import TRAINED, measured_curves, plot_extrapolation
from ropepatch.gallery.maps import (
    plot_biases,
    plot_clipping,
    plot_distance_matrices,
    plot_projection,
    plot_properties,
    plot_sinusoidal_table,
    plot_teaching_tables,
)
from ropepatch.gallery.properties import properties_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_encoding_gallery() -> dict[str, Figure]:
    """All figures, by names that serve as file names; all computed here, but for what the study measured.

    Raises:
        RopepatchError: If matplotlib is not installed.
    """
    curves, floor = measured_curves()
    return {
        "teaching-tables": plot_teaching_tables(),
        "sinusoidal-table": plot_sinusoidal_table(),
        "sinusoidal-distances": plot_distances(),
        "distance-matrices": plot_distance_matrices(),
        "projection": plot_projection(),
        "rope-turns": plot_turns(),
        "biases": plot_biases(),
        "shaw-clipping": plot_clipping(),
        "decay": plot_decay(),
        "extrapolation": plot_extrapolation(curves, TRAINED, floor),
        "properties": plot_properties({name: properties_of(kind) for name, kind in ENCODINGS.items()}),
    }
