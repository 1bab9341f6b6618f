"""The mathematics of scaled ropes; it needs torch alone."""

from ropepatch.scaling.dynamic import DynamicLinear, DynamicNTK, DynamicYaRN
from ropepatch.scaling.method import METHODS, Scaling, find_method
from ropepatch.scaling.named import check_parameters, formulas, make_scaling, required_parameters
from ropepatch.scaling.powers import (
    AdjustedBase,
    NTKAware,
    NTKFixed,
    NTKMixed,
    PositionInterpolation,
    Unscaled,
)
from ropepatch.scaling.ramps import Llama3, NTKByParts, YaRN
from ropepatch.scaling.reshaped import ClippedRope, GiraffePower, GiraffeTruncated, PartialRope, Resonance
from ropepatch.scaling.searched import CustomDivisors, LongRoPE, LongRoPESwitch

__all__ = [
    "METHODS",
    "AdjustedBase",
    "ClippedRope",
    "CustomDivisors",
    "DynamicLinear",
    "DynamicNTK",
    "DynamicYaRN",
    "GiraffePower",
    "GiraffeTruncated",
    "Llama3",
    "LongRoPE",
    "LongRoPESwitch",
    "NTKAware",
    "NTKByParts",
    "NTKFixed",
    "NTKMixed",
    "PartialRope",
    "PositionInterpolation",
    "Resonance",
    "Scaling",
    "Unscaled",
    "YaRN",
    "check_parameters",
    "find_method",
    "formulas",
    "make_scaling",
    "required_parameters",
]
