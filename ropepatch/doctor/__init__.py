"""A linter for the RoPE parameters of any checkpoint: what is wrong, why it matters, how to repair it."""

from ropepatch.doctor.diagnosis import Diagnosis, diagnose, repair
from ropepatch.doctor.findings import Finding

__all__ = ["Diagnosis", "Finding", "diagnose", "repair"]
