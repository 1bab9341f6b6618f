"""A position remapping in a model: its formula, KV caches, removal, and unsupported models."""

import copy
import math

import numpy as np
import pytest
import torch
from families import every_family, refusal
from oldest import NOT_YET, OLDEST
from remapping_oracle import ORACLE, SMALL, by_oracle, distances
from swaps import ONE, apart, logits, lora, put
from tiny_models import into, tiny_model
from transformers import DynamicCache

import ropepatch
from ropepatch import RopepatchError
from ropepatch.attention import REMAPPINGS, make_remapping
from ropepatch.attention.remapped import mapped, remap_positions

every_remapping = pytest.mark.parametrize("name", REMAPPINGS)


# The formula


@every_remapping
def test_remapped_logits_match_an_oracle_of_the_effective_distances(model, name):
    stock = logits(model)
    with by_oracle(model, distances(ORACLE[name](**SMALL[name]), 40)):
        expected = logits(model)
    put(model, name)
    assert apart(logits(model), expected) < 5e-5
    assert apart(stock, expected) > 1e-1


@every_remapping
def test_a_remapping_leaves_logits_of_short_prompts_bit_identical(model, name):
    ids = ONE[:, :8]
    expected = logits(model, ids)
    put(model, name)
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_log_n_and_the_attention_factor_multiply_the_scores(model, factor):
    """Log-n only beyond the original length, here of 20 tokens."""
    scales = [[max(1.0, math.log(m + 1) / math.log(20)) * factor**2] for m in range(40)]
    with by_oracle(model, distances(ORACLE["rerope"](window=8), 40), np.array(scales)):
        expected = logits(model)
    model.config.max_position_embeddings = 20
    modified = {"window": 8, "log_n": True, "attention_factor": factor}
    with ropepatch.patch(model, "rerope", to=64, **modified):
        assert apart(logits(model), expected) < 5e-5


# Generation


def test_cache_and_prompt_lookup_do_not_change_generated_tokens(model):
    """Beam search reorders the cache; prompt lookup crops rejected drafts from it."""
    put(model, "self-extend")
    prompt = ONE[:, :24].repeat(1, 2)
    settings = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": -1}
    plain = model.generate(prompt, **settings)
    for more in ({"num_beams": 3}, {}):
        expected = model.generate(prompt, **settings, **more, use_cache=False)
        assert torch.equal(model.generate(prompt, **settings, **more), expected)
    drafted = model.generate(prompt, **settings, prompt_lookup_num_tokens=3)
    assert torch.equal(drafted, plain)


# Applied and removed


@every_remapping
def test_the_config_and_the_handle_contain_the_active_remapping(model, name):
    with put(model, name) as handle:
        described = model.config.to_dict()["position_remapping"]
        assert (described["name"], described["target"]) == (name, 65)
        assert described["parameters"].items() >= SMALL[name].items()
        expected = make_remapping(name, **SMALL[name])
        assert mapped(model).distances == handle.distances == expected
        assert model.config.max_position_embeddings == 65
        assert f"RemappedRope({name}, " in repr(model)


def test_remapping_a_linearly_scaled_model_uses_its_scaled_length():
    """As in Vicuna's config: linear scaling to 256 tokens, while max_position_embeddings stays 64."""
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny_model("llama", rope_parameters=rope, max_sequence_length=256)
    with ropepatch.patch(model, "rerope", to=1024) as handle:
        assert handle.distances.window == 128
        assert model.config.max_position_embeddings == 1024
    assert model.config.max_position_embeddings == 64


# The architectures that are rejected
REJECTED = """
    afmoe axk1 axk2 bailing_hybrid bamba cohere2 cohere2_moe cohere_compass_text deepseek_v2 deepseek_v3
    deepseek_v32 doge dory exaone4 exaone_moe falcon falcon_h1 flint fuyu gemma2 gemma3 gemma3n_text
    gemma4 gemma4_text gemma4_unified gemma4_unified_text glm4_moe_lite glm_moe_dsa got_ocr2
    gpt_neox_japanese gpt_oss granitemoehybrid hy_v4 kolibri1 lara_mini lfm2_moe lfm3 llama4 llama4_text
    longcat_flash mimo_v2_flash minicpm3 minimax ministral ministral3 mistral mixtral
    moss_transcribe_diarize olmo_hybrid persimmon phi3 phi4_multimodal qwen3_5 qwen3_5_moe
    qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text sarvam_mla starcoder2
    vaultgemma youtu zamba2
"""


@every_family(
    "smollm3",
    "mistral",
    "cohere",
    "glm",
    "phi",
    "gemma3_text",
    "gpt_neox",
    "hunyuan_v1_dense",
    "qwen3",
)
def test_every_architecture_gets_a_remapping_or_an_explained_error(model_type):
    if refusal(model_type):
        pytest.skip("its RoPE is not supported")
    if model_type in NOT_YET:
        pytest.skip("this version of transformers does not run it")
    model = tiny_model(model_type)
    stock = logits(model)
    original = model.config.get_text_config().max_position_embeddings
    if model_type in REJECTED.split() or (OLDEST and model_type == "diffllama"):
        with pytest.raises(RopepatchError, match=r"attention .* cannot be replaced: "):
            remap_positions(model, make_remapping("self-extend"), to=4 * original)
        assert torch.equal(logits(model), stock)
        return
    grouped = make_remapping("self-extend", window=7)
    handle = remap_positions(model, grouped, to=4 * original)
    assert (
        apart(logits(model, ONE[:, :7]), logits(tiny_model(model_type), ONE[:, :7]))
        < 1e-5
    )
    far = logits(model)
    assert apart(far, stock) > 1e-3
    cache = DynamicCache(config=model.config)
    steps = [
        logits(model, ids, **into(cache))
        for ids in ONE.split([30, 4, 1, 1, 1, 1, 1, 1], 1)
    ]
    assert apart(torch.cat(steps, 1), far) < 1e-3
    handle.remove()
    assert torch.equal(logits(model), stock)


# Errors


def test_remap_positions_rejects_attention_that_normalises_after_the_rotation():
    """HunYuan normalises after the rotation, with unequal weights once it is trained."""
    model = tiny_model("hunyuan_v1_dense")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.query_layernorm.weight.copy_(torch.linspace(0.2, 2, 16))
    stock = logits(model)
    with pytest.raises(
        RopepatchError,
        match="HunYuanDenseV1Attention does not rotate queries and keys last",
    ):
        put(model, "rerope")
    assert torch.equal(logits(model), stock)


def test_remapping_a_model_with_rounded_inv_freq_logs_a_warning(model, caplog):
    with put(model, "rerope"):
        assert not [one for one in caplog.records if one.levelname == "WARNING"]
    put(model.bfloat16(), "rerope")
    assert "inv_freq is rounded, " in caplog.text


def test_remap_positions_rejects_a_model_on_the_meta_device(model):
    with pytest.raises(RopepatchError, match="meta device"):
        put(model.to("meta"), "self-extend")


def test_save_pretrained_rejects_a_remapped_model_but_saves_its_adapter(
    model, tmp_path
):
    with put(model, "rerope"):
        for one in (model, copy.deepcopy(model)):
            with pytest.raises(RopepatchError, match="transformers would ignore it"):
                one.save_pretrained(tmp_path)
        fine_tuned = lora(model)
        fine_tuned.save_pretrained(tmp_path / "adapter")
        assert not (tmp_path / "adapter" / "config.json").exists()
    assert not list(tmp_path.glob("*.json"))
