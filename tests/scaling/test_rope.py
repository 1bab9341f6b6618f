"""A model's RoPE before scaling."""

import math

import pytest

from ropepatch.errors import RopepatchError
from ropepatch.scaling.rope import Rope


@pytest.mark.parametrize(
    "numbers",
    [
        *((d, 1e4, 4096) for d in (-2, 0, 1, 127)),
        *((128, base, 4096) for base in (1.0, -1e4, math.inf, math.nan)),
        *((128, 1e4, window) for window in (1, -1, 10**300)),
        *((4, 1e4, 64, carried) for carried in ((1.0, 0.1, 0.01), (1.0, math.nan))),
    ],
    ids=str,
)
def test_invalid_rope_parameters_are_rejected(numbers):
    with pytest.raises(RopepatchError):
        Rope(*numbers)
