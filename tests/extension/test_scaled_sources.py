"""Scaled checkpoints with two lists, `dynamic` RoPE or a tied softmax scale."""

import json

import numpy as np
import pytest
import torch
from families import MODELS
from oldest import needs
from tiny_models import CAUSAL_LM_TYPES, tiny_config, tiny_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as MULTIMODAL,
)

import ropepatch
from ropepatch import RopepatchError
from ropepatch.extension.writing import check
from ropepatch.model.architectures import TIED

WINDOW, TARGET = 64, 128


def logits(model, tokens):
    ids = torch.randint(3, 60, (1, tokens), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model(ids, use_cache=False).logits


def written(model, folder, **request):
    """The config.json of a model saved with a plan, and the model that stock transformers reloads."""
    model.save_pretrained(folder / "source")
    out = (
        check(ropepatch.plan(folder / "source", **request), folder / "out").write().path
    )
    return json.loads(
        (out / "config.json").read_text()
    ), AutoModelForCausalLM.from_pretrained(out).eval()


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("model_type", "stated", "theta"),
    [
        ("llama", {"factor": 4.0}, 1e4),
        ("hunyuan_v1_dense", {"factor": 1.0, "alpha": 1000.0}, 1e4 * 1000 ** (16 / 14)),
    ],
)
def test_dynamic_rope_is_extended_like_unscaled_rope(
    tmp_path, model_type, stated, theta
):
    needs(model_type)
    model = tiny_model(
        model_type, max_position_embeddings=WINDOW, rope_parameters=DYNAMIC | stated
    )
    made = ropepatch.plan(model, to="2x")
    expected = theta ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(made.source.config.rope.inv_freq(), expected, rtol=3e-7)
    raw, reloaded = written(model, tmp_path, to="2x")
    assert (
        raw["rope_parameters"].items() >= {"rope_type": "yarn", "factor": 2.0}.items()
    )
    assert "alpha" not in raw["rope_parameters"]
    with ropepatch.patch(model, to="2x"):
        assert torch.equal(logits(model, TARGET), logits(reloaded, TARGET))


LISTS = {
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2, 3, 4, 5, 6, 7, 8],
}
SWITCHING = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
} | LISTS


@pytest.mark.parametrize("method", ["ntk", "yarn"])
def test_only_the_long_list_of_a_switching_longrope_is_scaled(tmp_path, method):
    own = {"max_position_embeddings": WINDOW, "original_max_position_embeddings": 16}
    model = tiny_model("phi3", rope_parameters=SWITCHING, **own)
    raw, reloaded = written(model, tmp_path, to=TARGET, method=method)
    rope = raw["rope_parameters"]
    assert (rope["short_factor"], rope["original_max_position_embeddings"]) == (
        LISTS["short_factor"],
        16,
    )
    if method == "ntk":  # no attention factor: logits of short texts are as before
        assert torch.equal(logits(reloaded, 16), logits(model, 16))
        expected = np.array(LISTS["long_factor"]) * 2 ** (np.arange(8) / 7)
        np.testing.assert_allclose(rope["long_factor"], expected, rtol=3e-7)
    with ropepatch.patch(model, method, to=TARGET) as patch:
        assert torch.equal(logits(model, TARGET), logits(reloaded, TARGET))
        # The patch has one list, and warns about it
        parameters = model.config.rope_parameters
        assert parameters["short_factor"] == parameters["long_factor"]
        assert "keep the frequencies of short_factor" in str(patch.plan)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN |= {"beta_fast": 16.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.707}


def test_each_type_with_a_softmax_scale_is_listed():
    """In the sources of transformers, relatives of DeepSeek multiply all logits by mscale_all_dim."""
    texts = (file.read_text("utf-8") for file in MODELS.glob("*/modeling_*.py"))
    scaling = "".join(text for text in texts if "mscale_all_dim" in text)
    reading = {
        CONFIG_MAPPING[name]().get_text_config().model_type
        for name, model in (MULTIMODAL | CAUSAL).items()
        if f"class {model}(" in scaling
    }
    assert {"deepseek_v3", "longcat_flash", "youtu"} <= reading <= TIED


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[pytest.mark.sweep] * (name != "deepseek_v3"))
        for name in sorted({*TIED} & {*CAUSAL_LM_TYPES})
    ],
)
def test_yarn_with_a_tied_softmax_scale_gets_a_larger_factor(tmp_path, model_type):
    model = tiny_model(model_type, rope_parameters=YARN, max_position_embeddings=WINDOW)
    raw, reloaded = written(model, tmp_path, to="2x")
    softmax = 0.1 * 0.707 * np.log(8) + 1
    expected = YARN | {
        "factor": 8.0,
        "attention_factor": pytest.approx((0.1 * np.log(8) + 1) / softmax),
    }
    assert reloaded.config.max_position_embeddings == TARGET
    assert {key: raw["rope_parameters"][key] for key in expected} == expected
    before = logits(model, TARGET)
    with ropepatch.patch(model, to="2x"):
        assert torch.equal(logits(model, TARGET), logits(reloaded, TARGET))
    assert torch.equal(logits(model, TARGET), before)


def test_a_tied_softmax_scale_allows_only_yarn():
    """Other types ignore the key."""
    tied, other = (
        tiny_config(model_type, rope_parameters=YARN, max_position_embeddings=WINDOW)
        for model_type in ("deepseek_v3", "llama")
    )
    with pytest.raises(RopepatchError, match="cannot extend the YaRN"):
        ropepatch.plan(tied, to="2x", method="linear")
    with pytest.raises(RopepatchError, match=f"already covers {WINDOW} tokens"):
        ropepatch.plan(tied, to=WINDOW)
    assert ropepatch.plan(other, to="2x", method="linear").config.rope.is_scaled


# Gemma 4: in the larger heads of global layers only the first pairs rotate


@pytest.mark.parametrize(
    ("method", "kind", "divided"),
    [
        ("none", "proportional", lambda i: np.ones(4)),
        ("linear", "proportional", lambda i: np.full(4, 8.0)),
        # the slowest pair that rotates fully
        ("ntk", "proportional", lambda i: 8.0 ** (i / 3)),
        ("ntk-fixed", "longrope", lambda i: 8.0 ** ((i + 1) / 4)),
        # by rotations, beta 32 to 1: 0 to 3
        ("yarn", "longrope", lambda i: 1 / (1 - i / 3 * (1 - 1 / 8))),
        ("p-rope", "longrope", lambda i: np.array([1, 1, 1, np.inf])),
    ],
)
def test_only_the_rotating_pairs_of_proportional_rope_are_scaled(method, kind, divided):
    needs("gemma4_text")
    config = tiny_config("gemma4_text", max_position_embeddings=WINDOW)
    stated = config.rope_parameters["full_attention"]
    made = ropepatch.plan(config, to="8x", method=method)
    i = np.arange(4)  # a quarter of a head of 32 numbers
    rotating = stated["rope_theta"] ** (-2 * i / 32) / divided(i)
    scaled = made.frequencies().inv_freq
    np.testing.assert_allclose(scaled[:4], rotating, rtol=1e-6, atol=1e-25)
    assert scaled[4:].max() < 1e-25
    assert made.rope_parameters["rope_type"] == kind


@pytest.mark.parametrize("method", ["linear", "yarn"])
def test_a_proportional_rope_reloads_as_patched_and_extends_again(tmp_path, method):
    needs("gemma4_text")
    model = tiny_model("gemma4_text", max_position_embeddings=WINDOW)
    raw, reloaded = written(model, tmp_path, to="8x", method=method)
    assert raw["rope_parameters"]["sliding_attention"]["rope_type"] == "default"
    with ropepatch.patch(model, method, to="8x"):
        assert torch.equal(logits(model, TARGET), logits(reloaded, TARGET))
    if method == "linear":
        again = ropepatch.plan(tmp_path / "out", to="2x", method="linear")
        assert again.rope_parameters["factor"] == 16.0


def test_an_extended_checkpoint_extends_again_with_its_query_temperature(tmp_path):
    """Ministral 3 multiplies the query at m by 1 + beta ln(1 + floor(m / L)), with an L of its own."""
    needs("ministral3")
    model = tiny_model("ministral3")
    model.config.rope_parameters |= {"original_max_position_embeddings": 24}
    model.save_pretrained(tmp_path / "source")
    once = ropepatch.extend(tmp_path / "source", tmp_path / "once", to=128)
    twice = ropepatch.extend(once.folder, tmp_path / "twice", to=256)
    reloaded = type(model).from_pretrained(twice)
    for layer in reloaded.model.layers:
        rope = layer.self_attn.config.rope_parameters
        assert rope["original_max_position_embeddings"] == 24
        assert rope["llama_4_scaling_beta"] == 0.1
    assert torch.equal(
        reloaded.model.rotary_emb.inv_freq, twice.plan.frequencies().inv_freq
    )
