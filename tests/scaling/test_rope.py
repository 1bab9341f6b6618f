"""A model's frequencies before any scaling."""

import math

import numpy as np
import pytest
import torch
from methods import GEOMETRIES
from transformers import GPTNeoXConfig, LlamaConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ropepatch.errors import RopepatchError
from ropepatch.scaling.rope import Rope, rotations, wavelengths

EVERY_GEOMETRY = pytest.mark.parametrize("rope", GEOMETRIES.values(), ids=GEOMETRIES)


@EVERY_GEOMETRY
def test_the_frequencies_are_those_of_stock_llama_to_the_bit(rope):
    config = LlamaConfig(
        hidden_size=rope.rotary_dim,
        num_attention_heads=1,
        head_dim=rope.rotary_dim,
        rope_parameters={"rope_type": "default", "rope_theta": rope.rope_theta},
    )
    assert torch.equal(rope.inv_freq(), LlamaRotaryEmbedding(config).inv_freq)


def test_the_frequencies_of_partly_rotating_heads_are_those_of_stock_gpt_neox():
    theta = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    config = GPTNeoXConfig(hidden_size=96, num_attention_heads=1, rope_parameters=theta)
    assert torch.equal(Rope(24, 1e4, 2048).inv_freq(), GPTNeoXRotaryEmbedding(config).inv_freq)


@EVERY_GEOMETRY
def test_wavelengths_and_rotations_agree_with_numpy(rope):
    theta = rope.rope_theta ** (-np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim)
    window = rope.original_max_position_embeddings
    np.testing.assert_allclose(wavelengths(rope.inv_freq()), 2 * np.pi / theta, rtol=1e-6)
    np.testing.assert_allclose(rotations(rope.inv_freq(), window), window * theta / (2 * np.pi), rtol=1e-6)
    assert wavelengths(rope.inv_freq()).dtype == rotations(rope.inv_freq(), window).dtype == torch.float64


def test_llama_3_has_the_golden_wavelengths():
    wavelength = wavelengths(GEOMETRIES["llama-3"].inv_freq())
    assert wavelength[[28, 35]].tolist() == pytest.approx([1956.5, 8218.7], rel=1e-4)
    assert wavelength[0].item() == pytest.approx(2 * math.pi)


def test_a_pair_that_does_not_rotate_has_an_infinite_wavelength_and_no_rotations():
    assert wavelengths(torch.zeros(1)).item() == math.inf
    assert rotations(torch.zeros(1), 4096).item() == 0


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        *(((d, 1e4, 4096), f"must be even and at least 2, got {d}") for d in (-2, 0, 1, 127)),
        *(((128, b, 4096), f"a number above 1, got {b}") for b in (1.0, 0.0, -1e4, math.inf, math.nan)),
        *(((128, 1e4, window), f"must be at least 2, got {window}") for window in (1, 0, -1)),
        ((4, 1e4, 64, (1.0, 0.1, 0.01)), "2 rotary pairs need as many frequencies, got 3"),
        ((4, 1e4, 64, (1.0, math.nan)), "finite and at least 0"),
    ],
)
def test_numbers_of_no_rope_are_refused(numbers, message):
    with pytest.raises(RopepatchError, match=message):
        Rope(*numbers)


def test_a_rope_that_carries_frequencies_is_scaled_and_gives_them_back():
    plain, scaled = Rope(4, 1e4, 4096), Rope(4, 1e4, 4096, carried=(0.5, 0.005))
    assert not plain.is_scaled
    assert scaled.is_scaled
    assert torch.equal(scaled.inv_freq(), torch.tensor([0.5, 0.005]))
    assert scaled.inv_freq().dtype == torch.float32


def test_another_base_multiplies_carried_frequencies_as_it_would_multiply_plain_ones():
    plain = GEOMETRIES["llama-2"]
    halved = Rope(128, 1e4, 8192, carried=tuple((plain.inv_freq() / 2).tolist()))
    assert torch.equal(plain.rebased(5e5), Rope(128, 5e5, 4096).inv_freq())
    torch.testing.assert_close(2 * halved.rebased(5e5), plain.rebased(5e5), rtol=5e-7, atol=0)


def test_frequencies_are_a_fresh_tensor_each_time():
    for rope in (Rope(4, 1e4, 4096), Rope(4, 1e4, 4096, carried=(0.5, 0.005))):
        kept = rope.inv_freq().tolist()
        rope.inv_freq().zero_()
        assert rope.inv_freq().tolist() == kept
