"""The `rope_parameters` of a plan, from which stock transformers computes the frequencies of its method."""

import math

import pytest
import torch
from methods import GEOMETRIES, STATIC, example
from stock_ropes import stock_table
from transformers import LlamaConfig

import ropepatch
from ropepatch.scaling import METHODS, make_scaling
from ropepatch.scaling.rope import Rope

LLAMA_2 = GEOMETRIES["llama-2"]
EVERY_METHOD = pytest.mark.parametrize("name", METHODS)


def planned(scaling, rope=LLAMA_2, **stated):
    """A plan for a stock Llama with this RoPE, or with what is stated of it."""
    sizes = {
        "num_attention_heads": 1,
        "hidden_size": rope.rotary_dim,
        "head_dim": rope.rotary_dim,
    }
    parameters = {"rope_type": "default", "rope_theta": rope.rope_theta} | stated
    window = rope.original_max_position_embeddings * parameters.get("factor", 1)
    config = LlamaConfig(
        **sizes, max_position_embeddings=int(window), rope_parameters=parameters
    )
    return ropepatch.plan(config, method=scaling)


@pytest.mark.parametrize(
    ("geometry", "factor"), [("llama-2", 16.0), ("babyllama", 1.5)]
)
@EVERY_METHOD
def test_stock_transformers_computes_every_method_from_its_rope_parameters(
    name, geometry, factor
):
    """Native types have the bits of the method; longrope is within the rounding of its factors."""
    rope = GEOMETRIES[geometry]
    scaling, window = (
        example(name, rope.num_pairs, factor),
        rope.original_max_position_embeddings,
    )
    plan = planned(scaling, rope)
    saved, kind = plan.rope_parameters, plan.rope_parameters["rope_type"]
    assert kind == METHODS[name].saved_as
    reach = window if kind == "dynamic" else plan.target
    for length in (1, window, window + 1, plan.target):
        stock = stock_table(saved, rope, length, reach=reach)
        ours = scaling.frequencies(rope, length)
        moving = ours.inv_freq != 0
        torch.testing.assert_close(
            stock.inv_freq[moving], ours.inv_freq[moving], rtol=3.0e-7, atol=0
        )
        assert (stock.inv_freq[~moving] < 1e-29).all()
        assert stock.attention_factor == ours.attention_factor
        exact = (
            ours
            if scaling.length_dependent or kind != "longrope"
            else plan.frequencies()
        )
        assert torch.equal(stock.inv_freq, exact.inv_freq)
    if (
        kind == "longrope" and not scaling.length_dependent
    ):  # as engines derive the attention factor
        original = saved["original_max_position_embeddings"]
        derived = math.sqrt(1 + math.log(plan.target / original) / math.log(original))
        for key in ("short_mscale", "long_mscale"):
            assert saved.get(key, derived) == pytest.approx(
                stock.attention_factor, rel=1e-9
            )
        assert ("short_mscale" in saved) == (
            stock.attention_factor != pytest.approx(derived, rel=1e-9)
        )
        assert saved["factor"] * original == plan.target
        assert type(original) is int


@pytest.mark.parametrize(
    "name", [name for name in STATIC if name not in ("longrope", "abf")]
)
def test_a_scaled_model_is_saved_without_its_scaling_keys(name):
    composing = {"yarn": {"ramp": "rotations"}, "resonance": {"over": "linear"}}.get(
        name, {}
    )
    scaling = METHODS[name](factor=4.0, **(example(name, 64).parameters() | composing))
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
    }
    plan = planned(scaling, **yarn, mrope_section=[2, 3, 3], some_future_key={"x": 1})
    saved = plan.rope_parameters
    if name != "none":  # which leaves the parameters unchanged
        assert saved["rope_type"] == "longrope"
        assert "beta_fast" not in saved
    assert (saved["mrope_section"], saved["some_future_key"]) == ([2, 3, 3], {"x": 1})
    stock = stock_table(saved, plan.config.rope, plan.target, reach=plan.target)
    assert torch.equal(stock.inv_freq, plan.frequencies().inv_freq)
    a = stock.attention_factor
    assert a == scaling.frequencies(plan.config.rope).attention_factor
    assert a == pytest.approx(1.1386294361 * (1.1386294361 if name == "yarn" else 1.0))


# The attention factor of YaRN for engines that use mscale and mscale_all_dim instead.


@pytest.mark.parametrize("a", [0.7, 1.5])
def test_an_unusual_attention_factor_is_also_written_as_mscale(a):
    usual = planned(
        make_scaling("yarn", factor=4, attention_factor=0.1 * math.log(4) + 1)
    )
    assert "mscale" not in usual.rope_parameters
    saved = planned(make_scaling("yarn", factor=4, attention_factor=a)).rope_parameters
    assert (
        saved["attention_factor"]
        == a
        == stock_table(saved, LLAMA_2, reach=16384).attention_factor
    )
    assert 0.1 * saved["mscale"] * math.log(4) + 1 == pytest.approx(a, rel=1e-12)
    assert (
        saved["mscale_all_dim"] == 0
    )  # 0 does not change attention that uses it (DeepSeek)


def test_a_yarn_without_truncation_stays_a_yarn():
    saved = planned(make_scaling("yarn", factor=4, truncate=False)).rope_parameters
    assert (saved["rope_type"], saved["truncate"]) == ("yarn", False)


def test_a_pair_that_does_not_rotate_is_divided_by_1e30():
    saved = planned(example("cope", 64)).rope_parameters
    assert [divisor == 1e30 for divisor in saved["long_factor"]] == [False] * 63 + [
        True
    ]
    rope = Rope(128, 1e10, 4096)  # where 1e30 times the power overflows
    saved = planned(make_scaling("p-rope", factor=4, partial=0.5), rope).rope_parameters
    assert stock_table(saved, rope, reach=16384).inv_freq[32:].max() < 1e-35
