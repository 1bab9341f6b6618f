"""Bands of rotary dimension pairs that a scaling keeps, blends, interpolates or stops."""

import math

import pytest
import torch
from methods import GEOMETRIES

from ropepatch.scaling import make_scaling
from ropepatch.scaling.rope import Rope, bands

LLAMA_2 = GEOMETRIES["llama-2"]


def bands_of(name, rope, factor, **parameters):
    scaling = make_scaling(name, factor=factor, **parameters)
    return bands(rope, scaling.frequencies(rope).inv_freq, factor)


def fates(found):
    return ", ".join(f"{band.fate} {band.first}-{band.last}" for band in found)


@pytest.mark.parametrize(
    ("name", "geometry", "factor", "expected"),
    [
        ("yarn", "llama-2", 16.0, "kept 0-20, blended 21-45, interpolated 46-63"),
        ("llama3", "llama-3", 8.0, "kept 0-28, blended 29-34, interpolated 35-63"),
        ("ntk", "llama-2", 16.0, "kept 0-0, blended 1-62, interpolated 63-63"),
        ("p-rope", "llama-2", 16.0, "kept 0-47, stopped 48-63"),
    ],
)
def test_known_methods_have_known_bands(name, geometry, factor, expected):
    assert fates(bands_of(name, GEOMETRIES[geometry], factor)) == expected


def test_the_divisor_determines_the_band():
    divisors = (0.9, 1.0, 2.0, 3.999, 4.0, 4.001, 100.0, 1e30)
    found = bands_of("custom", Rope(16, 1e4, 256), 4.0, divisors=divisors)
    assert fates(found) == (
        "sped up 0-0, kept 1-1, blended 2-3, interpolated 4-4, stretched 5-6, stopped 7-7"
    )


def test_rounding_does_not_change_the_bands():
    noise = 1 + 4e-7 * torch.tensor([1.0, -1.0]).repeat(32)
    for factor, fate in ((1, "kept"), (4, "interpolated")):
        found = bands(LLAMA_2, LLAMA_2.inv_freq() / factor * noise, 4.0)
        assert fates(found) == f"{fate} 0-63"


def test_a_pair_that_never_rotated_is_kept():
    rope = Rope(4, 1e4, 256, carried=(1.0, 0.0))
    (band,) = bands(rope, rope.inv_freq(), 4.0)
    assert fates([band]) == "kept 0-1"
    assert band.wavelength == pytest.approx((2 * math.pi, math.inf))
    assert band.rotations == pytest.approx((256 / (2 * math.pi), 0.0))


def test_a_band_has_the_values_of_both_its_ends():
    kept, blended, interpolated = bands_of("yarn", LLAMA_2, 16.0)
    last = 2 * math.pi / 5.623413252e-02
    assert kept.wavelength == pytest.approx((2 * math.pi, last))
    assert kept.rotations == pytest.approx((4096 / (2 * math.pi), 4096 / last))
    assert blended.divisor == pytest.approx((1.037406484, 10.146341463))
    assert interpolated.divisor == pytest.approx((16.0, 16.0))
