"""Frequencies learned from text, with the weights frozen."""

from ropepatch.fitting.fitting import Fitted, fit
from ropepatch.fitting.vectors import published

__all__ = ["Fitted", "fit", "published"]
