"""Figures of what was measured and of what a scaling does, in one restrained style.

All of them need matplotlib; without it a `RopepatchError` says what to install.
"""

from ropepatch.report.plots.distances import plot_effective_distances
from ropepatch.report.plots.frequencies import Rescaling, plot_rotations, plot_wavelengths
from ropepatch.report.plots.losses import plot_gain, plot_loss, plot_perplexity, plot_positions
from ropepatch.report.plots.pictures import (
    Picture,
    figures,
    figures_of_plans,
    looks_of,
    pictures_of_distances,
    pictures_of_rescaling,
    pictures_of_results,
    plot_plan,
    rescalings,
)
from ropepatch.report.plots.retrieval import plot_depths, plot_kinds, plot_retrieval
from ropepatch.report.plots.style import Look, looks, save_figure

__all__ = [
    "Look",
    "Picture",
    "Rescaling",
    "figures",
    "figures_of_plans",
    "looks",
    "looks_of",
    "pictures_of_distances",
    "pictures_of_rescaling",
    "pictures_of_results",
    "plot_depths",
    "plot_effective_distances",
    "plot_gain",
    "plot_kinds",
    "plot_loss",
    "plot_perplexity",
    "plot_plan",
    "plot_positions",
    "plot_retrieval",
    "plot_rotations",
    "plot_wavelengths",
    "rescalings",
    "save_figure",
]
