"""A model's RoPE before scaling."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from methods import GEOMETRIES

from ropepatch.errors import RopepatchError
from ropepatch.scaling.rope import Rope, rotations, wavelengths


def test_wavelengths_and_rotations_agree_with_numpy():
    rope = GEOMETRIES["llama-3"]
    theta = rope.rope_theta ** (
        -np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    )
    window = rope.original_max_position_embeddings
    np.testing.assert_allclose(
        wavelengths(rope.inv_freq()), 2 * np.pi / theta, rtol=1e-6
    )
    np.testing.assert_allclose(
        rotations(rope.inv_freq(), window), window * theta / (2 * np.pi), rtol=1e-6
    )
    assert (
        wavelengths(rope.inv_freq()).dtype
        == rotations(rope.inv_freq(), window).dtype
        == torch.float64
    )


@pytest.mark.parametrize(
    "numbers",
    [
        *((d, 1e4, 4096) for d in (-2, 0, 1, 127, "x", 64.0)),
        *(
            (128, base, 4096)
            for base in (1.0, 0.0, -1e4, math.inf, math.nan, None, "x")
        ),
        *((128, 1e4, window) for window in (1, 0, -1, "64", 10**300)),
        *(
            (4, 1e4, 64, carried)
            for carried in ((1.0, 0.1, 0.01), (1.0, math.nan), (1.0, "x"), 3.0)
        ),
        (4, 1e4, 64, None, "x"),
    ],
    ids=str,
)
def test_invalid_rope_parameters_are_rejected(numbers):
    with pytest.raises(RopepatchError):
        Rope(*numbers)


def test_numbers_of_other_libraries_are_converted():
    carried = np.array([1.0, 0.5], np.float32)
    rope = Rope(np.int64(4), np.float32(1e4), np.int64(64), carried, np.float64(1.5))
    assert (
        rope
        == Rope(4, 1e4, 64, (1.0, 0.5), 1.5)
        == pickle.loads(pickle.dumps(rope))
        == copy.deepcopy(rope)
    )
    assert (
        hash(rope) == hash(Rope(4, 1e4, 64, (1.0, 0.5), 1.5)) != hash(Rope(4, 1e4, 64))
    )
    assert [type(value) for value in vars(rope).values()] == [
        int,
        float,
        int,
        tuple,
        float,
    ]
