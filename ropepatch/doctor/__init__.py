"""A linter for the RoPE parameters of any checkpoint: what is wrong, why it matters, how to repair it."""

from ropepatch.doctor.diagnosis import Diagnosis, diagnose
from ropepatch.doctor.findings import Finding
from ropepatch.doctor.repair import repair

__all__ = ["Diagnosis", "Finding", "diagnose", "repair"]
