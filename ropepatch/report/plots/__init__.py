"""Figures of results and of the changes that a scaling makes, in one style.

All need matplotlib; without it they raise a `RopepatchError` with the command that installs it.
"""

from ropepatch.report.plots.changes import figures_of_plans as figures_of_plans
from ropepatch.report.plots.changes import plot_plan as plot_plan
from ropepatch.report.plots.lines import Picture as Picture
from ropepatch.report.plots.lines import figures as figures
from ropepatch.report.plots.lines import looks_of as looks_of
from ropepatch.report.plots.lines import pictures_of_results as pictures_of_results
from ropepatch.report.plots.style import Look as Look
from ropepatch.report.plots.style import save_figure as save_figure
