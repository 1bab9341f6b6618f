"""Every remapping equals its paper's distance formula, pair by pair, within the original context length."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from remapping_oracle import ORACLE, SMALL, distances
from torch._subclasses.fake_tensor import FakeTensorMode

from ropepatch import RopepatchError
from ropepatch.attention import REMAPPINGS, make_remapping
from ropepatch.attention.modeling_position_remapping import temperature

# Rows from the papers, computed by hand: a query at m, and its distances to n = 0 to m.
LAMPE = """
    31 30 29 28 27 27 26 26 25 25 25 24 24 24 23 23 22 22 22 21 21 20 20 20 19 19 19 18 18 17 17 17 16 16 16
    15 15 14 14 14 13 13 12 12 12 11 11 11 10 10 9 9 9 8 8 8 7 6 5 4 3 2 1 0
"""
GOLDEN = [
    (
        "self-extend",
        31,
        "13 13 13 13 12 12 12 12 11 11 11 11 10 10 10 10 9 9 9 9 8 8 8 8 7 6 5 4 3 2 1 0",
    ),
    ("dca", 20, "12 11 10 9 8 7 6 5 4 3 10 9 8 7 6 5 4 3 2 1 0"),
    ("dca", 25, "12 11 10 9 8 7 6 5 4 3 12 11 10 9 8 7 6 5 4 3 5 4 3 2 1 0"),
    ("lampe", 63, LAMPE),
]


def distances_and_counts(one, length):
    """The distances of all pairs, NaN where masked, and the number of bands that contain each pair."""
    places = torch.arange(length)
    count = sum(band.holds(places, places).numpy().astype(int) for band in one.bands())
    return one.read_at(places, places).numpy(), count


def formula_parameters(one):
    return {
        name: value
        for name, value in one.parameters().items()
        if name not in ("log_n", "attention_factor")
    }


@pytest.mark.parametrize("name", REMAPPINGS)
def test_each_remapping_equals_its_formula(name):
    one = make_remapping(name, **SMALL[name])
    table, count = distances_and_counts(one, 64)
    expected = distances(ORACLE[name](**formula_parameters(one)), 64)
    np.testing.assert_allclose(table, expected, rtol=0, atol=1e-12)
    assert (count == ~np.isnan(expected)).all()


@pytest.mark.parametrize(("name", "m", "row"), GOLDEN)
def test_remappings_match_hand_computed_rows(name, m, row):
    one = make_remapping(
        name, **SMALL[name] | ({"length": 64} if name == "lampe" else {})
    )
    table, _ = distances_and_counts(one, 64)
    assert table[m, : m + 1].tolist() == [*map(int, row.split())]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(REMAPPINGS)), st.integers(40, 72), st.floats(1.0, 5.0))
@example("self-extend", 100, 5.0)
def test_default_bands_cover_each_visible_pair_once_within_l(name, original, factor):
    target = int(factor * original)
    if name == "string":
        target = min(target, 2 * original - original // 32)
    one = make_remapping(name).fitted(original, target)
    table, count = distances_and_counts(one, target)
    seen = np.tri(target, dtype=bool) if name != "lambda" else ~np.isnan(table)
    assert (count == seen).all()
    assert np.nanmin(table) >= 0
    assert np.nanmax(table) < original
    if name in ("self-extend", "leaky-rerope"):
        assert np.nanmax(table) <= 0.6 * original + 1
    np.testing.assert_allclose(
        table,
        distances(ORACLE[name](**formula_parameters(one)), target),
        rtol=0,
        atol=1e-9,
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_reach_is_the_longest_length_with_distances_below_l(data):
    """For remappings with unbounded distances, one more token exceeds the original length."""
    name = data.draw(st.sampled_from(["leaky-rerope", "self-extend", "string"]))
    original = data.draw(st.integers(16, 40))
    near = data.draw(st.integers(2, original - 2))
    parameter, values = {
        "leaky-rerope": ("divisor", st.sampled_from([2.0, 3.0, 4.0])),
        "self-extend": ("group", st.integers(1, 5)),
        "string": ("shift", st.integers(near, original)),
    }[name]
    one = make_remapping(name, window=near, **{parameter: data.draw(values)})
    reach = one.reach(original)
    table, _ = distances_and_counts(one, reach + 1)
    assert np.nanmax(table[:-1]) < original
    assert np.nanmax(table[-1]) >= original - 1e-9


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("string", {}),  # reaches less than twice the original length
        ("leaky-rerope", {"divisor": 1.0}),
        ("dca", {"clip": 256}),
        ("dca", {"chunk": 200}),
        ("lampe", {"mapped": 256}),
        ("lampe", {"head": 600}),
        ("lampe", {"length": 512}),
        ("lampe", {"tail": 900}),
        ("rerope", {"window": 256}),
        ("lambda", {"sinks": 0}),
        ("dca", {"chunks": 3}),
    ],
    ids=str,
)
def test_remappings_reject_unsuitable_parameters(name, parameters):
    with pytest.raises(RopepatchError):
        make_remapping(name, **parameters).fitted(256, 1024)


def test_fitted_rejects_targets_longer_than_the_remapping_reaches():
    one = make_remapping("self-extend", window=64, group=2)
    assert one.fitted(256, 448) == one
    with pytest.raises(RopepatchError, match="up to 448 tokens, not 449"):
        one.fitted(256, 449)


@pytest.mark.parametrize("name", REMAPPINGS)
def test_remappings_use_no_float64_on_apple_gpus(name):
    with FakeTensorMode():
        m = torch.arange(512, device="mps")
        bands = make_remapping(name).fitted(256, 500).bands()
        places = [place(m) for band in bands for place in band]
        factor = temperature(m, 256, log_n=True, attention_factor=1.5)
    assert factor.dtype == torch.float32
    assert {numbers.dtype for numbers in places} <= {torch.long, torch.float32}
