"""Frequencies learned from text, with the weights frozen."""

from ropepatch.fitting.examples import Objective
from ropepatch.fitting.fitted import Fitted
from ropepatch.fitting.fitting import fit
from ropepatch.fitting.starts import published

__all__ = ["Fitted", "Objective", "fit", "published"]
