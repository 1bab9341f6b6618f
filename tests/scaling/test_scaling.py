"""Every formula against two independent oracles, golden values and properties."""

import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import FACTORS, GEOMETRIES, NEED_MORE, example
from oracle import ORACLES, Geometry
from stock_ropes import STOCK_TYPES, stock_table

from ropepatch.errors import RopepatchError
from ropepatch.scaling import METHODS, make_scaling
from ropepatch.scaling.rope import Rope

LLAMA_2, LLAMA_3 = GEOMETRIES["llama-2"], GEOMETRIES["llama-3"]

# Settings other than the defaults, for every parameter of every method.
VARIANTS = [
    *(("yarn", {"ramp": ramp}) for ramp in ("rotations", "wavelength")),
    ("yarn", {"truncate": False, "attention_factor": 0.9}),
    *(
        ("yarn", {"beta_fast": 16.0, "beta_slow": 2.0, "ramp": ramp})
        for ramp in ("index", "rotations", "wavelength")
    ),
    ("ntk-by-parts", {"alpha": 2.0, "beta": 8.0}),
    ("llama3", {"alpha": 2.0, "beta": 8.0}),
    ("giraffe-power", {"power": 2.0, "interpolate": True}),
    ("giraffe-truncated", {"cutoff": 500.0, "interpolate": True}),
    *(("p-rope", {"partial": share}) for share in (0.0, 0.3, 1.0)),
    *(("resonance", {"over": over}) for over in ("none", "ntk")),
    ("cope", {"over": "yarn", "pairs": 5}),
    ("cope", {"pairs": 1}),
    ("cope", {"hard": True}),
    ("cope", {"over": "abf", "rope_theta": 1e7}),  # its authors' setting
    ("dynamic", {"form": "transformers"}),
]
SETTINGS = [(name, {}) for name in METHODS] + VARIANTS
EVERY_SETTING = pytest.mark.parametrize(("name", "parameters"), SETTINGS, ids=str)


def instance(name, parameters, rope, factor):
    return METHODS[name](
        factor=factor,
        **(example(name, rope.num_pairs, factor).parameters() | parameters),
    )


def numbers(rope):
    return Geometry(*vars(rope).values())


def expected(scaling, rope, length=None):
    """Compute the frequencies with NumPy, whose defaults must be the same."""
    given = scaling.model_dump(exclude_defaults=True)
    if scaling.length_dependent:
        given["length"] = length
    return ORACLES[scaling.name](numbers(rope), given.pop("factor"), **given)


def check(got, right, rtol=1e-6):
    """Every frequency and the attention factor agree."""
    np.testing.assert_allclose(
        np.asarray(got[0], dtype=np.float64), right[0], rtol=rtol, atol=0
    )
    assert got[1] == pytest.approx(right[1], rel=1e-9)


def lengths(scaling, rope):
    window = rope.original_max_position_embeddings
    return (
        [None, 1, window, window + 1, 4 * window]
        if scaling.length_dependent
        else [None]
    )


def agree(scaling, rope, rtol=1e-6):
    """NumPy computes the same at every length."""
    for length in lengths(scaling, rope):
        got, right = scaling.frequencies(rope, length), expected(scaling, rope, length)
        if scaling.name == "resonance":
            right = without_ties(got, right, scaling, rope)
        check(got, right, rtol)


# The first oracle: stock transformers, from configurations written by hand.


def stock_parameters(scaling, rope):
    """`rope_parameters` as a user of transformers would write them; None if it lacks the type."""
    written = by_hand_parameters(scaling, rope)
    return written if written and written["rope_type"] in STOCK_TYPES else None


def by_hand_parameters(scaling, rope):
    """The same for the newest transformers."""
    given = {k: v for k, v in scaling.parameters().items() if v is not None}
    scaled = {
        "factor": scaling.factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }
    match scaling.name:
        case "none":
            return {"rope_type": "default"}
        case "linear":
            return {"rope_type": "linear", "factor": scaling.factor}
        case "ntk":
            d = rope.rotary_dim
            theta = rope.rope_theta * scaling.factor ** (d / (d - 2))
            return {"rope_type": "default", "rope_theta": theta}
        case "abf":
            return {"rope_type": "default"} | given
        case "ntk-by-parts" | "llama3":
            bounds = {"low_freq_factor": given["alpha"]}
            bounds["high_freq_factor"] = given["beta"]
            return {"rope_type": "llama3"} | scaled | bounds
        case "yarn" if given.pop("ramp") == "index":
            return {"rope_type": "yarn"} | scaled | given
        case "p-rope":
            share = given["partial"]
            return {"rope_type": "proportional", "partial_rotary_factor": share}
        case "longrope" | "longrope-switch" | "custom":
            long = given.pop("divisors", None) or given["long_factor"]
            short = given.get("short_factor", long)
            lists = {"long_factor": [*long], "short_factor": [*short]}
            return {"rope_type": "longrope"} | scaled | given | lists
        case "dynamic":
            s = scaling.factor if given["form"] == "transformers" else 1.0
            return {"rope_type": "dynamic", "factor": s}
    return None


# The second oracle: NumPy in float64.


@EVERY_SETTING
def test_numpy_computes_the_same_numbers(name, parameters):
    # untruncated, a pair may lie so near the upper bound that float32 cancels; stock has its bits
    rtol = 3e-6 if parameters.get("truncate") is False else 1e-6
    for rope in (LLAMA_2, GEOMETRIES["partial"]):
        for factor in FACTORS:
            agree(instance(name, parameters, rope, factor), rope, rtol)


def without_ties(got, right, scaling, rope):
    """Accept both roundings of a wavelength that is a half-integer within float32."""
    wavelength = 2 * np.pi / ORACLES[scaling.over](numbers(rope), scaling.factor)[0]
    tie = np.abs(wavelength % 1 - 0.5) < 5e-7 * wavelength
    within_one = (
        np.abs(2 * np.pi / got.inv_freq.double().numpy() - wavelength)
        < 0.5 + 1e-6 * wavelength
    )
    assert tie[wavelength < 1e4].sum() <= 1  # only slow pairs are ambiguous
    return np.where(tie & within_one, got.inv_freq.double().numpy(), right[0]), right[1]


# Golden values: a third oracle where transformers lacks the method.

GOLDEN = [
    ("ntk-fixed", {}, 16.0, {
        0: 9.576032807e-01, 1: 7.940927858e-01, 25: 8.878227247e-03, 45: 2.099127231e-04, 63: 7.217387404e-06,
    }),
    ("ntk-mixed", {}, 16.0, {
        0: 8.846773578e-01, 1: 7.046983373e-01, 25: 6.679995003e-03, 45: 1.768289844e-04, 63: 7.217387404e-06,
    }),
    ("yarn", {"ramp": "wavelength"}, 16.0, {21: 3.088086745e-02, 45: 9.984561017e-05}),
    ("giraffe-power", {"power": 2.0}, 4.0, {1: 8.391143553e-01, 32: 2.5e-03, 63: 2.819291955e-08}),
    ("giraffe-power", {"power": 0.1}, 4.0, {32: 9.330329915e-03, 63: 7.618719820e-05}),
    ("resonance", {"over": "none"}, 4.0, {
        0: 1.047197551, 1: 8.975979010e-01, 10: 2.416609734e-01,
    }),
    ("giraffe-truncated", {"cutoff": 2048.0}, 4.0, {
        20: 5.623413252e-02, 41: 1.917475985e-04, 54: 1.917475985e-04, 55: 0.0, 63: 0.0,
    }),
    ("cope", {"over": "none"}, 4.0, {
        40: 3.162277660e-03, 45: 0.993180652 * 1.539926526e-03, 63: 0.0,
    }),
]  # fmt: skip


@pytest.mark.parametrize(("name", "parameters", "factor", "golden"), GOLDEN, ids=str)
def test_published_models_have_the_golden_frequencies(name, parameters, factor, golden):
    got = make_scaling(name, factor=factor, **parameters).frequencies(LLAMA_2).inv_freq
    assert got[list(golden)].tolist() == pytest.approx(list(golden.values()), rel=1e-6)


# Properties on any geometry.

DETERMINISTIC = settings(
    derandomize=True, deadline=None, max_examples=60, database=None
)
any_rope = st.builds(
    Rope,
    rotary_dim=st.integers(2, 128).map(lambda pairs: 2 * pairs),
    rope_theta=st.floats(3, 7).map(lambda x: 10**x),
    original_max_position_embeddings=st.integers(128, 131072),
)
any_factor = st.floats(1, 64)


@EVERY_SETTING
@settings(DETERMINISTIC, max_examples=25)
@given(rope=any_rope, factor=any_factor)
def test_both_oracles_agree_on_any_geometry(name, parameters, rope, factor):
    scaling = instance(name, parameters, rope, factor)
    by_hand = stock_parameters(scaling, rope)
    for length in lengths(scaling, rope):
        got = scaling.frequencies(rope, length)
        if by_hand is not None:
            assert torch.equal(
                got.inv_freq, stock_table(by_hand, rope, length).inv_freq
            )
        if name != "resonance":  # its ties are tested above
            # 4e-6: the rounding of 2i/d in float32 times ln b = 16, and cancellation, which is largest for
            # a blend by rotations: keep * theta against theta / s
            blended = (
                name in {"ntk-by-parts", "llama3"}
                or parameters.get("ramp") == "rotations"
            )
            loss = max(1, 4 * parameters.get("power", 0), factor / 8 if blended else 0)
            check(got, expected(scaling, rope, length), rtol=4e-6 * loss)


# Errors.

INVALID = {
    ("linear", "factor"): [0.999, math.nan, math.inf],
    ("abf", "rope_theta"): [1.0],
    ("ntk-by-parts", "alpha"): [0.0],
    ("ntk-by-parts", "beta"): [1.0, math.inf],
    ("llama3", "beta"): [0.5],
    ("yarn", "beta_slow"): [0.0],
    ("yarn", "beta_fast"): [0.5],
    ("yarn", "ramp"): ["sideways"],
    ("yarn", "attention_factor"): [0.0, math.nan],
    ("dynamic", "form"): ["huggingface"],
    ("giraffe-power", "power"): [-0.1],
    ("giraffe-truncated", "cutoff"): [0.0],
    ("p-rope", "partial"): [-0.1, 1.5, math.nan],
    ("resonance", "over"): ["dynamic", "cope", "longrope"],
    ("cope", "over"): ["resonance", "longrope-switch", "abf"],
    ("cope", "rope_theta"): [1.0, 1e7],
    ("cope", "pairs"): [0],
    ("custom", "divisors"): [(), (1.0, 0.0), (1.0, math.inf)],
    ("custom", "attention_factor"): [0.0],
    ("longrope", "long_factor"): [(1.0, -2.0), (math.nan,)],
    ("longrope", "attention_factor"): [-1.0],
    ("longrope-switch", "short_factor"): [()],
}


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [(*where, value) for where, values in INVALID.items() for value in values],
    ids=str,
)
def test_the_error_of_a_bad_parameter_names_it(name, parameter, value):
    parameters = {"factor": 4.0} | example(name, 4).parameters() | {parameter: value}
    with pytest.raises(
        RopepatchError, match=rf"^{name}: {parameter}(\[\d\])? must .*, got "
    ):
        make_scaling(name, **parameters)


def test_errors_of_missing_or_unsuitable_parameters_have_a_hint():
    tiny = Rope(2, 1e4, 128)
    for make in (
        *(partial(make_scaling, name, factor=2.0) for name in NEED_MORE),
        *(
            partial(example(name, 32).frequencies, LLAMA_2)
            for name in ("longrope", "custom")
        ),
        *(partial(example(name, 1).frequencies, tiny) for name in ("ntk", "dynamic")),
    ):
        with pytest.raises(RopepatchError) as error:
            make()
        assert error.value.hint


# Ropes that are already scaled: Llama 3.1 carries llama3 times 8, here with a temperature on top.

_LLAMA_3_1 = make_scaling("llama3", factor=8.0).frequencies(LLAMA_3).inv_freq
CARRIED = Rope(
    128, 5e5, 131072, carried=tuple(_LLAMA_3_1.tolist()), carried_attention_factor=1.1
)
REFUSING = [
    ("yarn", {}),
    ("yarn", {"ramp": "wavelength"}),
    ("longrope", {}),
    ("longrope-switch", {}),
    ("abf", {}),
    ("resonance", {}),
    ("cope", {"over": "yarn"}),
    ("dynamic", {}),
]
COMPOSING = [
    *((name, {}) for name in METHODS if (name, {}) not in REFUSING),
    ("yarn", {"ramp": "rotations"}),
    ("resonance", {"over": "linear"}),
    ("custom", {"attention_factor": 1.2}),
]


@pytest.mark.parametrize(("name", "parameters"), COMPOSING, ids=str)
def test_scaled_rope_is_scaled_on_top_of_its_frequencies(name, parameters):
    for factor in FACTORS:
        scaling = instance(name, parameters, CARRIED, factor)
        agree(scaling, CARRIED)
        assert scaling.native(CARRIED) is None


@pytest.mark.parametrize(("name", "parameters"), REFUSING, ids=str)
def test_a_formula_of_rope_theta_rejects_scaled_rope(name, parameters):
    scaling = instance(name, parameters, CARRIED, 4.0)
    with pytest.raises(
        RopepatchError, match=r"formula of rope_theta .* already scaled"
    ) as error:
        scaling.frequencies(CARRIED)
    assert error.value.hint.startswith("use ")
    proposed = set(re.findall(r"`(\w+)=", error.value.hint))
    assert proposed <= set(scaling.parameters())
