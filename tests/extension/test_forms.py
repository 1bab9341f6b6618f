"""From a scaling to `rope_parameters`, from which stock transformers computes identical frequencies."""

import math
from typing import Any

import pytest
import torch
from methods import GEOMETRIES, LENGTH_DEPENDENT, STATIC, example
from oldest import OLDEST
from stock_ropes import stock_table
from transformers import LlamaConfig

from ropepatch.extension.config_changes import SavedRope, saved_ropes
from ropepatch.scaling import METHODS, make_scaling
from ropepatch.scaling.rope import STOPPED, Frequencies, Rope

LLAMA_2, PARTIAL = GEOMETRIES["llama-2"], GEOMETRIES["partial"]
WHOLE_HEADS = {name: GEOMETRIES[name] for name in ("llama-2", "babyllama")}
SCALED = Rope(
    128,
    1e4,
    16384,
    carried=tuple(make_scaling("yarn", factor=4.0).frequencies(LLAMA_2).inv_freq.tolist()),
    carried_attention_factor=1.1386294361119891,
)
KEYS_OF_OLDER_SCALINGS = {
    *("type", "factor", "original_max_position_embeddings", "attention_factor", "truncate", "mscale"),
    *("mscale_all_dim", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
    *("short_factor", "long_factor", "short_mscale", "long_mscale"),
}
EVERY_METHOD = pytest.mark.parametrize("name", METHODS)
EVERY_STATIC = pytest.mark.parametrize("name", STATIC)
EVERY_GEOMETRY = pytest.mark.parametrize("rope", WHOLE_HEADS.values(), ids=WHOLE_HEADS)


def plain(rope: Rope, **own: Any) -> dict[str, Any]:
    """The `rope_parameters` of a model before it is scaled."""
    return {"rope_type": "default", "rope_theta": rope.rope_theta} | own


def target_of(rope: Rope, factor: float) -> int:
    return int(factor * rope.original_max_position_embeddings)


def every_form(name: str, rope: Rope, factor: float = 4.0, **own: Any) -> list[SavedRope]:
    scaling = example(name, rope.num_pairs, factor)
    forms = list(saved_ropes(scaling, rope, plain(rope, **own), target_of(rope, factor)))
    assert forms
    return forms


def stock_llama(parameters: dict[str, Any], rope: Rope, reach: int) -> Frequencies:
    """The frequencies of a stock Llama with this head dimension and `reach` as max_position_embeddings."""
    stock = stock_table(parameters, rope, reach=reach)
    if parameters["rope_type"] == "longrope":  # the table beyond L, if it differs
        assert torch.equal(stock_table(parameters, rope, reach + 1, reach=reach).inv_freq, stock.inv_freq)
    return stock


def assert_equal(stock: Frequencies, ours: Frequencies) -> None:
    assert torch.equal(stock.inv_freq, ours.inv_freq)
    assert stock.attention_factor == ours.attention_factor


@EVERY_GEOMETRY
@EVERY_STATIC
def test_stock_llama_computes_every_form_bit_identically(name, rope):
    for factor in (1.5, 16.0):
        for export in every_form(name, rope, factor):
            stock = stock_llama(export.rope_parameters, rope, target_of(rope, factor))
            assert_equal(stock, export.frequencies)
    for export in every_form(name, PARTIAL, partial_rotary_factor=0.5):
        stock = stock_table(export.rope_parameters, PARTIAL, share=0.5, reach=8192)
        assert_equal(stock, export.frequencies)


@pytest.mark.parametrize("name", [name for name in STATIC if name not in ("longrope", "abf")])
def test_a_scaled_model_computes_its_only_form_bit_identically(name):
    composing = {"yarn": {"ramp": "rotations"}, "resonance": {"over": "linear"}}.get(name, {})
    scaling = METHODS[name](factor=4.0, **(example(name, 64).parameters() | composing))
    current = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32}
    *kept, export = saved_ropes(scaling, SCALED, current, 65536)
    assert len(kept) == (name == "none")  # the unchanged parameters
    assert export.rope_parameters["rope_type"] == "longrope"
    assert "beta_fast" not in export.rope_parameters
    assert_equal(stock_llama(export.rope_parameters, SCALED, 65536), export.frequencies)
    a = scaling.frequencies(SCALED).attention_factor
    assert export.frequencies.attention_factor == a
    assert a == pytest.approx(1.1386294361 * (1.1386294361 if name == "yarn" else 1.0))


@EVERY_GEOMETRY
@EVERY_STATIC
def test_the_last_form_is_longrope_within_rounding_of_the_target(name, rope):
    for factor in (1.5, 4.0, 40.0):
        target = example(name, rope.num_pairs, factor).frequencies(rope)
        *native, last = every_form(name, rope, factor)
        assert last.rope_parameters["rope_type"] == "longrope"
        moving = target.inv_freq != 0
        table = last.frequencies.inv_freq.double()
        torch.testing.assert_close(table[moving], target.inv_freq[moving].double(), rtol=3.0e-7, atol=0)
        assert (table[~moving] < 1e-29).all()
        for export in native:
            assert torch.equal(export.frequencies.inv_freq, target.inv_freq)
        for export in (*native, last):
            assert export.frequencies.attention_factor == target.attention_factor


@EVERY_METHOD
def test_the_first_form_has_the_rope_type_that_the_method_announces(name):
    kinds = [export.rope_parameters["rope_type"] for export in every_form(name, LLAMA_2)]
    assert METHODS[name].saved_as == (kinds[0] if kinds else "–")
    assert len(kinds) <= 2


# The attention factor that engines derive from the lengths next to the lists of longrope.


@EVERY_GEOMETRY
@EVERY_STATIC
def test_lengths_or_two_keys_give_the_attention_factor_of_equal_lists(name, rope):
    target = target_of(rope, 8.0)
    for export in every_form(name, rope, 8.0):
        parameters = export.rope_parameters
        if parameters["rope_type"] != "longrope":
            continue
        a = export.frequencies.attention_factor
        window = parameters["original_max_position_embeddings"]
        derived = math.sqrt(1 + math.log(target / window) / math.log(window))
        for key in ("short_mscale", "long_mscale"):
            assert parameters.get(key, derived) == pytest.approx(a, rel=1e-9)
        assert ("short_mscale" in parameters) == (a != pytest.approx(derived, rel=1e-9))
        assert parameters["factor"] * window == target
        assert type(window) is int


@pytest.mark.parametrize("to", [1, 100, 4096])
@pytest.mark.parametrize("a", [1.0, math.sqrt(1 + math.log(100 / 4096) / math.log(4096))])
def test_no_attention_factor_is_derived_within_the_original_context_length(to, a):
    """The second value is the result of the formula at 100 tokens."""
    scaling = make_scaling("custom", factor=1, divisors=(2.0,) * 64, attention_factor=a)
    for export in saved_ropes(scaling, LLAMA_2, plain(LLAMA_2), to):
        assert export.rope_parameters["original_max_position_embeddings"] == to
        assert export.rope_parameters.get("long_mscale", 1.0) == a
        assert_equal(stock_llama(export.rope_parameters, LLAMA_2, max(to, 2)), export.frequencies)


@EVERY_METHOD
def test_stock_transformers_warns_only_about_two_keys_of_other_engines(name, caplog):
    to = 16384
    caplog.set_level("WARNING", logger="transformers")
    scaling = example(name, 64, to / 4096)
    for export in saved_ropes(scaling, LLAMA_2, plain(LLAMA_2), to):
        reach = 4096 if export.rope_parameters["rope_type"] == "dynamic" else to
        caplog.clear()
        LlamaConfig(max_position_embeddings=reach, rope_parameters=dict(export.rope_parameters))
        expected = "short_mscale" in export.rope_parameters
        expected |= OLDEST and export.rope_parameters["rope_type"] == "dynamic"  # it warns of rope_theta
        assert {record.getMessage()[:20] for record in caplog.records} == (
            {"Unrecognized keys in"} if expected else set()
        )


# The attention factor of YaRN for engines that use mscale and mscale_all_dim instead.


@pytest.mark.parametrize(
    "parameters", [{"attention_factor": 0.7}, {"attention_factor": 1.5, "truncate": False}]
)
def test_an_unusual_attention_factor_of_yarn_is_also_written_as_mscale(parameters):
    usual = {"attention_factor": 0.1 * math.log(4) + 1}
    for other in (
        make_scaling("yarn", factor=4, **usual),
        make_scaling("yarn", factor=1, attention_factor=1.2),
    ):
        assert "mscale" not in next(saved_ropes(other, LLAMA_2, plain(LLAMA_2), 16384)).rope_parameters
    scaling = make_scaling("yarn", factor=4, **parameters)
    export = next(saved_ropes(scaling, LLAMA_2, plain(LLAMA_2), 16384))
    saved = export.rope_parameters
    assert saved["attention_factor"] == export.frequencies.attention_factor == parameters["attention_factor"]
    assert 0.1 * saved["mscale"] * math.log(4) + 1 == pytest.approx(parameters["attention_factor"], rel=1e-12)
    assert saved["mscale_all_dim"] == 0  # 0 does not change attention that uses it (DeepSeek)
    assert_equal(stock_llama(saved, LLAMA_2, 16384), export.frequencies)


@pytest.mark.parametrize(("name", "stopped"), [("p-rope", 16), ("cope", 1), ("giraffe-truncated", 4)])
def test_a_pair_that_does_not_rotate_is_divided_by_1e30(name, stopped):
    export = every_form(name, LLAMA_2)[-1]
    target = example(name, 64).frequencies(LLAMA_2).inv_freq
    divisors = export.rope_parameters["long_factor"]
    assert (target == 0).sum() == stopped
    assert [d == STOPPED == 1e30 for d in divisors] == (target == 0).tolist()
    angles = export.frequencies.inv_freq[-stopped:] * 1_000_000
    assert angles.cos().tolist() == [1.0] * stopped
    assert (angles.sin() <= 1e-23).all()
    rope = Rope(128, 1e10, 4096)  # where 1e30 times the power overflows
    export = every_form("p-rope", rope)[-1]
    assert export.frequencies.inv_freq[48:].max() < 1e-35
    assert_equal(stock_llama(export.rope_parameters, rope, 16384), export.frequencies)


def test_the_native_parameters_are_the_documented_ones():
    def first(name: str, rope: Rope = LLAMA_2, **parameters: Any) -> dict[str, Any]:
        scaling = make_scaling(name, factor=4, **parameters)
        return next(saved_ropes(scaling, rope, plain(rope), 16384)).rope_parameters

    theta, scaled = {"rope_theta": 1e4}, {"factor": 4.0, "original_max_position_embeddings": 4096}
    a = {"attention_factor": 1.138629436111989}
    assert first("none") == {"rope_type": "default"} | theta
    assert first("linear") == {"rope_type": "linear", "factor": 4.0} | theta
    assert first("ntk") == {"rope_type": "default", "rope_theta": pytest.approx(40889.9424)}
    assert first("abf", rope_theta=2e5) == {"rope_type": "default", "rope_theta": 2e5}
    lists = {"short_factor": [1e30] * 64, "long_factor": [1e30] * 64}
    assert first("p-rope", partial=0) == (
        {"rope_type": "longrope", "attention_factor": 1.0, "factor": 1.0} | lists | theta
        | {"original_max_position_embeddings": 16384}
    )  # fmt: skip
    assert first("ntk-by-parts") == (
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 32.0} | scaled | theta
    )
    yarn = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0} | scaled | theta
    assert first("yarn") == yarn | {"attention_factor": pytest.approx(a["attention_factor"])}
    none = {"attention_factor": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0}
    assert first("yarn", truncate=False, attention_factor=1) == yarn | none | {"truncate": False}
    assert first("dynamic") == {"rope_type": "dynamic", "factor": 1.0} | theta
    assert first("dynamic", form="transformers") == {"rope_type": "dynamic", "factor": 4.0} | theta


@EVERY_METHOD
def test_keys_of_the_model_are_kept_and_keys_of_an_earlier_scaling_dropped(name):
    own = {"partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3], "some_future_key": {"x": 1}}
    stale = dict.fromkeys(KEYS_OF_OLDER_SCALINGS, "stale")
    current = plain(PARTIAL) | own | stale
    before = dict(current)
    for export in saved_ropes(example(name, PARTIAL.num_pairs), PARTIAL, current, 8192):
        parameters = export.rope_parameters
        assert current == before
        assert {key: parameters[key] for key in own} == own
        assert "stale" not in parameters.values()


# Length-dependent methods.


def test_stock_longrope_switches_lists_after_the_original_context_length():
    scaling = example("longrope-switch", 64)
    (export,) = saved_ropes(scaling, LLAMA_2, plain(LLAMA_2), 16384)
    for length in (1, 4096, 4097, 16384):
        stock = stock_table(export.rope_parameters, LLAMA_2, length, reach=16384)
        assert_equal(stock, scaling.frequencies(LLAMA_2, length))


@pytest.mark.parametrize("length", [100, 8192, 16384])
@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_a_length_dependent_method_is_static_at_a_fixed_length(name, length):
    scaling = example(name, 64)
    *_, export = saved_ropes(scaling.at(LLAMA_2, length), LLAMA_2, plain(LLAMA_2, mrope_section=[1]), length)
    target = scaling.frequencies(LLAMA_2, length)
    assert export.rope_parameters["rope_type"] == "longrope"
    assert export.rope_parameters["mrope_section"] == [1]
    assert export.rope_parameters["short_factor"] == export.rope_parameters["long_factor"]
    assert_equal(stock_llama(export.rope_parameters, LLAMA_2, length), export.frequencies)
    torch.testing.assert_close(export.frequencies.inv_freq, target.inv_freq, rtol=3.0e-7, atol=0)
    assert export.frequencies.attention_factor == target.attention_factor
