"""Figures of results and of the changes that a scaling makes, in one style.

All need matplotlib; without it they raise a `RopepatchError` with the command that installs it.
"""

from ropepatch.report.plots.changes import (
    Rescaling,
    plot_effective_distances,
    plot_wavelengths,
)
from ropepatch.report.plots.pictures import (
    Picture,
    figures,
    figures_of_plans,
    looks_of,
    pictures_of_results,
    plot_plan,
)
from ropepatch.report.plots.style import Look, looks, save_figure

__all__ = [
    "Look",
    "Picture",
    "Rescaling",
    "figures",
    "figures_of_plans",
    "looks",
    "looks_of",
    "pictures_of_results",
    "plot_effective_distances",
    "plot_plan",
    "plot_wavelengths",
    "save_figure",
]
