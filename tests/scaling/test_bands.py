"""Bands of rotary dimension pairs that a scaling keeps, blends, interpolates or stops."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from methods import FACTORS, GEOMETRIES, example

from ropepatch.scaling import METHODS, make_scaling
from ropepatch.scaling.rope import Band, Rope, bands

LLAMA_2 = GEOMETRIES["llama-2"]


def bands_of(
    name: str, rope: Rope = LLAMA_2, factor: float = 16.0, **parameters: Any
) -> list[Band]:
    scaling = make_scaling(name, factor=factor, **parameters)
    return bands(rope, scaling.frequencies(rope).inv_freq, factor)


def fates(found: list[Band]) -> list[tuple[str, int, int]]:
    return [(band.fate, band.first, band.last) for band in found]


@pytest.mark.parametrize("name", METHODS)
def test_bands_cover_every_pair_exactly_once(name):
    for rope in GEOMETRIES.values():
        for factor in FACTORS:
            length = int(factor * rope.original_max_position_embeddings)
            inv_freq = (
                example(name, rope.num_pairs, factor).frequencies(rope, length).inv_freq
            )
            found = bands(rope, inv_freq, factor)
            covered = [
                pair for band in found for pair in range(band.first, band.last + 1)
            ]
            assert covered == list(range(rope.num_pairs))
            assert all(one.fate != other.fate for one, other in pairwise(found))


@pytest.mark.parametrize(
    ("name", "geometry", "factor", "parameters", "expected"),
    [
        (
            "yarn",
            "llama-2",
            16.0,
            {},
            [("kept", 0, 20), ("blended", 21, 45), ("interpolated", 46, 63)],
        ),
        (
            "llama3",
            "llama-3",
            8.0,
            {},
            [("kept", 0, 28), ("blended", 29, 34), ("interpolated", 35, 63)],
        ),
        (
            "ntk",
            "llama-2",
            16.0,
            {},
            [("kept", 0, 0), ("blended", 1, 62), ("interpolated", 63, 63)],
        ),
        (
            "p-rope",
            "llama-2",
            16.0,
            {"partial": 0.5},
            [("kept", 0, 31), ("stopped", 32, 63)],
        ),
    ],
    ids=str,
)
def test_known_methods_have_known_bands(name, geometry, factor, parameters, expected):
    assert fates(bands_of(name, GEOMETRIES[geometry], factor, **parameters)) == expected


def test_the_divisor_determines_the_band():
    rope = Rope(16, 1e4, 256)
    divisors = (0.9, 1.0, 2.0, 3.999, 4.0, 4.001, 100.0, 1e30)
    assert fates(bands_of("custom", rope, 4.0, divisors=divisors)) == [
        ("sped up", 0, 0),
        ("kept", 1, 1),
        ("blended", 2, 3),
        ("interpolated", 4, 4),
        ("stretched", 5, 6),
        ("stopped", 7, 7),
    ]


def test_rounding_does_not_change_the_bands():
    noise = 1 + 4e-7 * torch.tensor([1.0, -1.0]).repeat(32)
    assert fates(bands(LLAMA_2, LLAMA_2.inv_freq() * noise, 4.0)) == [("kept", 0, 63)]
    assert fates(bands(LLAMA_2, LLAMA_2.inv_freq() / 4 * noise, 4.0)) == [
        ("interpolated", 0, 63)
    ]


def test_a_pair_that_never_rotated_is_kept():
    rope = Rope(4, 1e4, 256, carried=(1.0, 0.0))
    (band,) = bands(rope, rope.inv_freq(), 4.0)
    assert fates([band]) == [("kept", 0, 1)]
    assert band.wavelength == pytest.approx((2 * math.pi, math.inf))
    assert band.rotations == pytest.approx((256 / (2 * math.pi), 0.0))


def test_a_band_has_the_values_of_its_first_and_last_pair():
    kept, blended, interpolated = bands_of("yarn")
    assert kept.wavelength == pytest.approx(
        (2 * math.pi, 2 * math.pi / 5.623413252e-02)
    )
    assert kept.rotations == pytest.approx(
        (4096 / (2 * math.pi), 4096 * 5.623413252e-02 / (2 * math.pi))
    )
    assert blended.divisor == pytest.approx((1.037406484, 10.146341463))
    assert interpolated.divisor == pytest.approx((16.0, 16.0))
    assert kept.rotations[1] > 32 > blended.rotations[0]
    assert blended.rotations[1] > 1 > interpolated.rotations[0]
