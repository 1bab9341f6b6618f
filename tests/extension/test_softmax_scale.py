"""DeepSeek's YaRN: its `mscale_all_dim` scales the softmax too, where attention does so."""

import copy
import math

import pytest
import torch
from families import MODELS, refusal
from oldest import OLDEST
from tiny_models import CAUSAL_LM_TYPES, tiny_config, tiny_model
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import model_type_to_module_name

import ropepatch
from ropepatch import RopepatchError

IDS = torch.randint(3, 120, (1, 40), generator=torch.Generator().manual_seed(0))
FACTOR, PAIR = 40, {"mscale": 1.0, "mscale_all_dim": 0.707}


def reads_the_key(model_type: str) -> bool:
    files = (MODELS / model_type_to_module_name(model_type)).glob("modeling_*.py")
    return any("mscale_all_dim" in file.read_text("utf-8") for file in files)


# By their sources, which is another way to know them than ours, by the scales of the modules that they build.
TIED = [name for name in CAUSAL_LM_TYPES if reads_the_key(name) and refusal(name) is None]


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def published(model, **parameters):
    """A stock model of a configuration with DeepSeek's keys, and the weights of the model."""
    config = copy.deepcopy(model.config)
    yarn = {"rope_type": "yarn", "factor": float(FACTOR), "original_max_position_embeddings": window(model)}
    config.rope_parameters |= yarn | parameters
    stock = type(model)(config).eval()
    stock.load_state_dict(model.state_dict())
    return stock


def window(model):
    return model.config.max_position_embeddings


def plan(model, method="yarn", **parameters):
    return ropepatch.plan(model, to=FACTOR * window(model), method=method, **parameters)


def test_the_two_deepseeks_and_their_kin_are_among_them():
    later = set() if OLDEST else {"deepseek_v2", "deepseek_v32", "minicpm3"}
    assert {"deepseek_v3", "longcat_flash", "youtu"} | later <= {*TIED}


@pytest.mark.parametrize("model_type", [*TIED, "llama"])
def test_a_pair_of_mscales_gives_the_logits_of_the_published_configuration(model_type, tmp_path):
    model = tiny_model(model_type)
    before, expected = logits(model), logits(published(model, **PAIR))
    made = plan(model, **PAIR)
    with ropepatch.patch(model, made):
        assert torch.equal(logits(model), expected)
        model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)
    assert torch.equal(logits(model), before)
    assert any("multiplies all logits" in line for line in made.warnings) == (model_type in TIED)


def test_the_scale_is_deepseeks_formula_and_a_plausible_mistake_is_not():
    """`softmax_scale *= mscale * mscale` of DeepSeek-V3's inference/model.py, with its print of mscale."""
    model = tiny_model("deepseek_v3")
    attention, head = model.model.layers[1].self_attn, model.config.qk_head_dim
    mscale = 0.1 * PAIR["mscale_all_dim"] * math.log(FACTOR) + 1.0
    with ropepatch.patch(model, plan(model, **PAIR)) as patched:
        assert attention.scaling == pytest.approx(head**-0.5 * mscale * mscale, rel=1e-12)
        for mistake in (1.0, mscale, (0.1 * PAIR["mscale"] * math.log(FACTOR) + 1.0) ** 2):
            assert attention.scaling != pytest.approx(head**-0.5 * mistake, rel=1e-3)
        again = ropepatch.active(copy.deepcopy(model))
        again.remove()
        assert again.model.model.layers[1].self_attn.scaling == head**-0.5
        patched.remove()
    assert attention.scaling == head**-0.5


def test_what_no_rope_type_can_carry_on_such_a_model_is_refused_by_its_name():
    model = tiny_model("deepseek_v3")
    with pytest.raises(RopepatchError, match="deepseek_v3 multiplies its softmax scale"):
        plan(model, ramp="rotations", **PAIR)
    assert plan(tiny_model("llama"), ramp="rotations", **PAIR)
    with pytest.raises(RopepatchError, match="mscale must be left out beside attention_factor"):
        plan(model, attention_factor=1.0, **PAIR)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2"])
def test_a_model_that_merely_carries_the_key_is_scaled_further_and_one_that_obeys_it_is_not(model_type):
    carrying = published(tiny_model(model_type), **PAIR)
    with ropepatch.patch(carrying, ropepatch.plan(carrying, to="2x", method="linear")):
        patched = logits(carrying)
    assert (patched - logits(carrying)).abs().max() > 0.01
    obeying = published(tiny_model("deepseek_v3"), **PAIR)
    with pytest.raises(RopepatchError, match="deepseek_v3 ties its softmax scale"):
        ropepatch.plan(obeying.config, to="2x", method="linear")
    assert tiny_config("deepseek_v3").rope_parameters["rope_type"] == "default"
