"""A linter for the RoPE parameters of any checkpoint: what is wrong, why it matters, how to repair it."""

from ropepatch.doctor.diagnosis import Diagnosis, diagnose
from ropepatch.doctor.repair import repair
from ropepatch.model.checks.findings import Finding

__all__ = ["Diagnosis", "Finding", "diagnose", "repair"]
