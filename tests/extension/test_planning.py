"""Warnings and errors of a plan, before anything is written."""

import json
import shutil

import pytest
import torch
from families import refusal
from tiny_models import COMPOSITE_TYPES, ROTARY_TYPES, tiny_config, tiny_model

import ropepatch
from ropepatch import RopepatchError
from ropepatch.model.architectures import GLOBAL_LAYERS, ROPE_IN_LOCAL_LAYERS
from ropepatch.model.checkpoint import TINY
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
def test_the_plan_states_how_a_method_composes_with_an_earlier(tmp_path, rope, method):
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


@pytest.mark.parametrize("keys", [{"rotary_emb_base": 50000}, {}])
def test_the_plan_warns_of_the_default_base_of_transformers(tmp_path, keys):
    raw = {"model_type": "gpt_neox"} | keys
    (tmp_path / "config.json").write_text(json.dumps(raw))
    made = ropepatch.plan(tmp_path, to="2x", method="linear")
    assert bool(said(made, "has no rope_theta")) == (not keys)


def test_linear_on_linear_stays_linear(tmp_path):
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
        if tables is None:
            return
        if isinstance(tables, tuple):
            unmoved = torch.ones_like(tables[0]), torch.zeros_like(tables[1])
        else:
            unmoved = torch.ones_like(tables)  # complex numbers, in Llama 4
        still = given | {"position_embeddings": unmoved}
        if not torch.allclose(layer.forward(*args, **still)[0], out[0], atol=1e-6):
            moved.add(model.config.layer_types[layer.layer_idx])

    for name, module in model.named_modules():
        if name.endswith(".self_attn"):
            module.register_forward_hook(moves, with_kwargs=True)
    with torch.no_grad():
        model(torch.arange(3, 40)[None], use_cache=False)
    return moved


def with_local_layers():
    """The architectures with global and local layers and one RoPE."""
    for model_type in sorted({*ROTARY_TYPES} - {*COMPOSITE_TYPES}):
        if not refusal(model_type) and Config.of(tiny_config(model_type)).local_rope:
            yield model_type


def check_local_rope(model_type):
    model = tiny_model(model_type)
    unmoved = set() if Config.of(model).local_rope.shared else {GLOBAL_LAYERS}
    kinds = {*model.config.layer_types} - unmoved - {"linear_attention"}
    assert rotating_kinds(model) == kinds, model_type


@pytest.mark.parametrize("model_type", ["cohere2", "gemma2"])
def test_the_attention_of_rotating_layers_depends_on_the_rotary_module(model_type):
    check_local_rope(model_type)


@pytest.mark.sweep
def test_each_model_with_rope_in_local_layers_only_is_listed():
    found = [*with_local_layers()]
    assert {*ROPE_IN_LOCAL_LAYERS} <= {*found}
    for model_type in found:
        check_local_rope(model_type)


def test_rope_in_local_layers_only_is_not_scaled(tmp_path):
    model, words = tiny_model("cohere2"), "only in its sliding-window layers"
    model.save_pretrained(tmp_path)
    for made in (model, tmp_path):
        with pytest.raises(RopepatchError, match=rf"{words} \(1 of 2, 64 tokens\)"):
            ropepatch.plan(made, to="4x")
        assert ropepatch.plan(made, to="4x", method="none").target == 4 * WINDOW
    with pytest.raises(RopepatchError, match=words):
        ropepatch.patch(model, to="4x")
    shared = ropepatch.plan(tiny_config("gemma2"), to="4x")
    assert said(shared, "1 of 2 layers have a sliding window of 64 tokens and share")


@pytest.mark.parametrize("factor", [1.0625, 1.3333])
def test_a_factor_alone_sets_the_nearest_whole_target(factor):
    config = tiny_config("llama", max_position_embeddings=32_768)
    made = ropepatch.plan(config, factor=factor)
    assert made.target == round(factor * 32_768)
    by_object = ropepatch.plan(config, method=make_scaling("yarn", factor=factor))
    assert made.to_dict() == by_object.to_dict()
    assert made.warnings == ()


@pytest.mark.parametrize("factor", ["4", 0.5, float("nan"), float("inf"), True])
def test_a_factor_that_is_no_number_from_1_is_rejected(factor):
    with pytest.raises(RopepatchError, match="yarn: factor must be"):
        ropepatch.plan(tiny_config("llama"), factor=factor)


def test_ntk_keeps_the_original_length_of_phi_3():
    config = tiny_config("phi3", original_max_position_embeddings=WINDOW)
    made = ropepatch.plan(config, to="4x", method="ntk")
    assert (made.source.config.window, made.changes[ORIGINAL]) == (WINDOW, WINDOW)


def test_a_yarn_that_its_softmax_shares_keeps_its_ramp():
    ramp = {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0}
    kept = ramp | {"mscale": 1.0, "mscale_all_dim": 1.0}
    rope = {"rope_theta": 1e4} | YARN | kept
    config = tiny_config("deepseek_v3", rope_parameters=rope)
    made = ropepatch.plan(config, to=8 * WINDOW)
    assert made.rope_parameters.items() >= kept.items()


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
    assert made.frequencies().distance(made.config.frequencies) == 0


# As text


def test_a_plan_names_the_earlier_scaling_and_the_scaled_layers():
    yarn = {"rope_theta": 1e4, "attention_factor": 1.13} | YARN
    scaled = str(
        ropepatch.plan(
            tiny_config("llama", rope_parameters=yarn), to="4x", method="linear"
        )
    )
    assert "attention factor 1.1300 -> 1.1300" in scaled
    layered = str(ropepatch.plan(tiny_config("gemma3_text"), to="4x"))
    assert "scales RoPE in the full_attention layers only" in layered
    remapped = str(ropepatch.plan("tiny", to=1024, method="rerope"))
    assert "within the original context of 256 tokens, at any length" in remapped


def test_a_plan_shows_the_same_text_in_a_notebook(monkeypatch):
    plan = ropepatch.plan("tiny", to=1024)
    text = str(plan)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(plan) == text != ""
    assert repr(plan) == text


def test_untrusted_names_and_values_are_escaped_and_shortened(tmp_path):
    folder = tmp_path / "evil\x1b[2J\nfolder\u202e"
    shutil.copytree(TINY, folder)
    plan = ropepatch.plan(folder, to=1024)
    for text in (str(plan), str(ropepatch.diagnose(folder, measure=False))):
        assert all(line.isprintable() for line in text.splitlines())
        assert r"evil\x1b[2J\nfolder\u202e" in text
    (folder / "config.json").write_text(json.dumps({"model_type": "\x1b" * 500_000}))
    with pytest.raises(RopepatchError, match="unknown model_type") as error:
        ropepatch.plan(folder, to=1024)
    assert len(str(error.value)) < 5000
    assert str(error.value).isprintable()
