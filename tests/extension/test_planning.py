"""Warnings and errors of a plan, before anything is written."""

import json

import pytest
import torch
from families import refusal
from tiny_models import COMPOSITE_TYPES, ROTARY_TYPES, tiny_config, tiny_model

import ropepatch
from ropepatch import RopepatchError
from ropepatch.model.architectures import GLOBAL_LAYERS, ROPE_IN_LOCAL_LAYERS
from ropepatch.model.config import Config
from ropepatch.scaling import make_scaling

WINDOW = 64
ORIGINAL = "original_max_position_embeddings"


def config(tmp_path, rope=None, **top):
    """A folder with the config.json of a tiny LLaMA with scaled RoPE; no weights."""
    raw = tiny_config("llama").to_dict()
    raw.pop("rope_parameters")
    raw |= {"rope_theta": 10_000.0, "rope_scaling": rope} | top
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in raw.items() if v != "left out"})
    )
    return tmp_path


def said(plan, words):
    return [line for line in plan.warnings if words in line]


LINEAR = {"type": "linear", "factor": 4.0}
LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("stated", "window", "other"),
    [
        (None, WINDOW, 4 * WINDOW),
        (4 * WINDOW, 4 * WINDOW, None),
        (WINDOW, WINDOW, None),
        (7, WINDOW, 256),
    ],
)
def test_an_ambiguous_length_of_a_linear_checkpoint_gives_a_warning(
    tmp_path, stated, window, other
):
    """The scaled length is max_sequence_length for Vicuna and max_position_embeddings for deepseek-coder."""
    made = ropepatch.plan(
        config(tmp_path, LINEAR, max_sequence_length=stated), to=512, method="linear"
    )
    assert made.source.config.rope.original_max_position_embeddings == window
    assert made.factor == 512 / window
    assert len(said(made, "already scaled")) == 1
    guesses = said(made, "max_sequence_length")
    assert len(guesses) == (stated != 4 * WINDOW)
    assert all(str(number) in guesses[0] for number in (window, other) if other)
    assert made.changes.get("max_sequence_length", 512) == 512
    assert "max_sequence_length" in made.changes or stated is None
    if stated == 4 * WINDOW:
        with pytest.raises(RopepatchError, match="already covers"):
            ropepatch.plan(tmp_path, to=stated)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA_3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA_3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("rope", [YARN, LLAMA_3], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("method", ["yarn", "resonance"])
def test_methods_extend_scaled_models_and_the_plan_states_how_they_compose(
    tmp_path, rope, method
):
    made = ropepatch.plan(config(tmp_path, rope), to=256, method=method)
    choice = {"over": "ntk"} if method == "resonance" else {"ramp": "rotations"}
    assert made.method.parameters().items() >= choice.items()
    (line,) = said(made, "already scaled")
    assert line.endswith("({}={})".format(*next(iter(choice.items()))))
    assert (
        ropepatch.plan(config(tmp_path), to=256).method.parameters()["ramp"] == "index"
    )


@pytest.mark.parametrize(
    ("request_", "warning"),
    [
        (
            {"to": 128, "factor": 3.0},
            "factor 3 gives 192 tokens, not the target of 128",
        ),
        (
            {"to": 256, "factor": 3.0},
            "factor 3 gives 192 tokens, not the target of 256",
        ),
        ({"to": "33x"}, "2112 tokens are 33 times the original length"),
        ({"to": "32768k"}, "no published method exceeds 32 times"),
        ({"to": "32x"}, None),
        ({"to": "4x", "method": "abf", "rope_theta": 5e5}, None),
        ({"to": 100}, None),
    ],
    ids=str,
)
def test_contradictions_and_factors_beyond_published_ones_give_warnings(
    tmp_path, request_, warning
):
    made = ropepatch.plan(config(tmp_path), **request_)
    assert bool(made.warnings) == bool(warning), made.warnings
    assert warning is None or said(made, warning)


HUGE = LLAMA_3 | LISTS


@pytest.mark.parametrize(
    ("rope", "top"),
    [
        (HUGE | {"rope_type": "yarn", "factor": 1e20}, {}),
        (HUGE | {"rope_type": "longrope", ORIGINAL: 10**300}, {}),
        (None, {"max_position_embeddings": 10**300}),
        (None, {"rope_theta": 1e308}),
    ],
    ids=str,
)
def test_a_number_out_of_range_raises_a_one_line_error(tmp_path, rope, top):
    folder = config(tmp_path, rope=rope, **top)
    with pytest.raises(RopepatchError, match=r"must|cannot build|is below") as caught:
        ropepatch.plan(folder, to="4x", method="yarn" if rope else "ntk")
    assert len(str(caught.value)) < 200
    assert not rope or top or ropepatch.diagnose(folder, measure=False).has_errors


def test_a_partial_rotary_factor_that_default_rope_ignores_is_written_as_1():
    """Stock LLaMA rotates all pairs with `default`, and a part of them with every other type."""
    model = tiny_model("llama")
    model.config.rope_parameters["partial_rotary_factor"] = 0.5
    for method in ("yarn", "linear", "llama3", "ntk", "ntk-mixed"):
        made = ropepatch.plan(model, to=256, method=method)
        assert made.source.config.rope.rotary_dim == model.config.head_dim
        assert len(made.frequencies().inv_freq) == made.source.config.rope.num_pairs
        assert made.warnings == ()


@pytest.mark.parametrize("stated", [{}, {"text_config": None}], ids=str)
def test_a_missing_text_config_is_never_taken_from_defaults(tmp_path, stated):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"} | stated))
    with pytest.raises(RopepatchError, match=r"in text_config, where config\.json has"):
        ropepatch.plan(tmp_path, to="2x")


@pytest.mark.parametrize(
    ("model_type", "stated", "warned"),
    [
        ("gpt_neox", {"rotary_emb_base": 50000}, False),
        ("gpt_neox", {}, True),
        ("llama", {"rope_theta": 50000.0}, False),
        ("llama", {}, True),
    ],
)
def test_the_plan_warns_of_the_default_base_of_transformers(
    tmp_path, model_type, stated, warned
):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": model_type} | stated)
    )
    made = ropepatch.plan(tmp_path, to="2x", method="linear")
    assert bool(said(made, "has no rope_theta")) == warned


def test_linear_on_linear_stays_linear_where_stock_computes_the_same_bits(tmp_path):
    made = ropepatch.plan(config(tmp_path, LINEAR), to="2x", method="linear")
    assert made.rope_parameters["rope_type"] == "linear"
    assert made.rope_parameters["factor"] == 8.0
    assert torch.equal(
        made.frequencies().inv_freq, made.source.config.rope.inv_freq() / 2
    )


# Local attention layers


def rotating_kinds(model):
    """The types of the layers whose attention depends on the rotary module."""
    moved = set()

    def moves(layer, args, given, out):
        tables = given["position_embeddings"]
        if isinstance(tables, tuple):
            unmoved = torch.ones_like(tables[0]), torch.zeros_like(tables[1])
        else:
            unmoved = torch.ones_like(tables)  # complex numbers, in Llama 4
        still = given | {"position_embeddings": unmoved}
        if not torch.allclose(layer.forward(*args, **still)[0], out[0], atol=1e-6):
            moved.add(model.config.layer_types[layer.layer_idx])

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(moves, with_kwargs=True)
    with torch.no_grad():
        model(torch.arange(3, 40)[None], use_cache=False)
    return moved


def with_local_layers():
    """The architectures with global and local layers and one RoPE."""
    for model_type in ROTARY_TYPES:
        if model_type in COMPOSITE_TYPES or refusal(model_type) is not None:
            continue
        if Config.of(tiny_config(model_type)).local_rope is not None:
            yield model_type


def check_local_rope(model_type):
    model = tiny_model(model_type)
    found = Config.of(model).local_rope
    kinds = {*model.config.layer_types}
    assert rotating_kinds(model) == (
        kinds if found.shared else kinds - {GLOBAL_LAYERS}
    ), model_type


@pytest.mark.parametrize("model_type", ["cohere2", "gemma2"])
def test_rotating_layers_are_those_whose_attention_depends_on_the_rotary_module(
    model_type,
):
    check_local_rope(model_type)


@pytest.mark.sweep
def test_the_list_of_models_with_rope_in_local_layers_is_complete():
    found = [*with_local_layers()]
    assert {*ROPE_IN_LOCAL_LAYERS} <= {*found}
    for model_type in found:
        check_local_rope(model_type)


def test_a_model_with_rope_in_local_layers_only_is_not_scaled(tmp_path):
    model = tiny_model("cohere2")
    model.save_pretrained(tmp_path)
    for made in (model, tmp_path):
        with pytest.raises(
            RopepatchError,
            match=r"uses RoPE only in its sliding-window layers \(1 of 2, 64 tokens\)",
        ):
            ropepatch.plan(made, to="4x")
        assert ropepatch.plan(made, to="4x", method="none").target == 4 * WINDOW
    for verb in (
        ropepatch.patch,
        lambda *given, **named: ropepatch.extend(tmp_path, tmp_path / "out", to="4x"),
    ):
        with pytest.raises(
            RopepatchError, match="uses RoPE only in its sliding-window layers"
        ):
            verb(model, to="4x")
    assert said(
        ropepatch.plan(tiny_model("gemma2"), to="4x"),
        "1 of 2 layers have a sliding window of 64 tokens and share",
    )


@pytest.mark.parametrize("factor", [1.0625, 4.0625, 7.8125, 1.3333])
@pytest.mark.parametrize("method", ["yarn", "linear"])
def test_a_factor_alone_sets_the_nearest_whole_target(factor, method, tmp_path):
    folder = config(tmp_path, max_position_embeddings=32_768)
    made = ropepatch.plan(folder, factor=factor, method=method)
    assert made.target == round(factor * 32_768)
    by_object = ropepatch.plan(folder, method=make_scaling(method, factor=factor))
    assert made.to_dict() == by_object.to_dict()
    assert not said(made, "not the target")


@pytest.mark.parametrize("factor", ["4", 0.5, float("nan"), float("inf"), True])
def test_a_factor_that_is_no_number_from_1_is_rejected(factor, tmp_path):
    with pytest.raises(RopepatchError, match="yarn: factor must be"):
        ropepatch.plan(config(tmp_path), factor=factor)


def test_ntk_keeps_the_original_length_of_phi_3(tmp_path):
    raw = tiny_config("phi3").to_dict() | {ORIGINAL: WINDOW}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    made = ropepatch.plan(tmp_path, to="4x", method="ntk")
    assert (made.source.config.window, made.changes[ORIGINAL]) == (WINDOW, WINDOW)


def test_a_yarn_that_its_softmax_shares_keeps_its_ramp(tmp_path):
    ramp = {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0}
    shared = {"mscale": 1.0, "mscale_all_dim": 1.0}
    raw = tiny_config("deepseek_v3").to_dict()
    raw["rope_parameters"] |= YARN | {"rope_type": "yarn"} | ramp | shared
    (tmp_path / "config.json").write_text(json.dumps(raw))
    made = ropepatch.plan(tmp_path, to=8 * WINDOW)
    assert made.rope_parameters.items() >= (ramp | shared).items()


LONGER = {  # of 64 tokens, by rope type
    "linear": LINEAR,
    "llama3": LLAMA_3,
    "yarn": YARN | {"beta_fast": 16.0, "mscale": 1.0},
}


@pytest.mark.parametrize("stated", LONGER.values(), ids=LONGER)
def test_without_scaling_only_the_lengths_change(stated, tmp_path):
    made = ropepatch.plan(config(tmp_path, stated), to="2x", method="none")
    assert made.rope_parameters.items() >= stated.items()
    assert made.changes["max_position_embeddings"] == made.target
    assert made.changes["rope_scaling"].items() >= stated.items()
    before = ropepatch.plan(tmp_path, to="2x", method="none").source.config.frequencies
    assert made.frequencies().distance(before) == 0
    support = {line.engine: line.reads for line in made.engines}
    assert support["transformers 4.x"] == support["SGLang"] == "yes"
