"""A linter for the rope of any checkpoint: what is wrong, why it matters, and what repairs it."""

from ropepatch.doctor.diagnosis import Diagnosis, diagnose
from ropepatch.doctor.repair import repair
from ropepatch.model.checks.findings import Finding

__all__ = ["Diagnosis", "Finding", "diagnose", "repair"]
