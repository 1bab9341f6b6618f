"""The mathematics of scaled ropes; it needs torch alone."""

from ropepatch.scaling.method import METHODS, Scaling, find_method
from ropepatch.scaling.named import check_parameters, formulas, make_scaling, required_parameters
from ropepatch.scaling.ramps import YaRN
from ropepatch.scaling.searched import CustomDivisors, LongRoPESwitch

__all__ = [
    "METHODS",
    "CustomDivisors",
    "LongRoPESwitch",
    "Scaling",
    "YaRN",
    "check_parameters",
    "find_method",
    "formulas",
    "make_scaling",
    "required_parameters",
]
