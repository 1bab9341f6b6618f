"""What is known to make a model hard to extend, told from config.json alone."""

from itertools import product
from pathlib import Path

import pytest
from oldest import needs
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

import ropepatch
from ropepatch.files import write_json
from ropepatch.model.checks import check
from ropepatch.model.checks.case import Case
from ropepatch.model.traits import hard_to_extend

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 32,
    "pad_token_id": None,
    "eos_token_id": 1,
}
LAYERS = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}


def config(normalised: bool, grouped: bool, slides: bool, short: bool) -> PreTrainedConfig:
    """Qwen2 and Qwen3 are alike but for the norms of queries and keys."""
    kind = Qwen3Config if normalised else Qwen2Config
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2 if grouped else 4, "head_dim": 16}
    window = {"max_position_embeddings": 4096 if short else 8192}
    return kind(**SMALL, **heads, **window, **(LAYERS if slides else {}))


WORDS = (
    "normalised queries and keys",
    "4 query heads on 2 of keys and values",
    "layers that see a sliding window",
    "a window of 4096 tokens",
)


@pytest.mark.parametrize("has", [*product((True, False), repeat=4)])
def test_features_are_named_where_three_or_four_of_them_come_together(has):
    given = config(*has)
    named = [words for words, there in zip(WORDS, has, strict=True) if there]
    assert hard_to_extend(given, given.max_position_embeddings) == (named if len(named) >= 3 else [])


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (LlamaConfig(num_key_value_heads=8, max_position_embeddings=8192), 0),
        (Gemma3TextConfig(**SMALL), 3),
        (lambda: Olmo3Config(**SMALL, num_key_value_heads=8, max_position_embeddings=8192), 3),
        (DeepseekV3Config(**SMALL, num_key_value_heads=32), 0),
        (Phi3Config(**SMALL, num_key_value_heads=8, sliding_window=8192), 0),
        (PreTrainedConfig(num_attention_heads=4, num_key_value_heads=2), 0),
    ],
    ids=[
        "Llama 3", "Gemma 3", "Olmo 3 with few keys", "the norms of DeepSeek's latent vectors",
        "a window longer than the model's", "nothing that could be built",
    ],
)  # fmt: skip
def test_a_model_has_the_features_that_its_structure_shows(given, count):
    if callable(given):
        needs("olmo3")
        given = given()
    assert len(hard_to_extend(given, getattr(given, "max_position_embeddings", 0))) == count


@pytest.mark.parametrize("many", [True, False])
def test_plan_and_doctor_name_them_with_their_source_and_refuse_nothing(tmp_path, many):
    raw = config(True, True, many, True).to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    write_json(tmp_path / "config.json", raw)
    told = [line for line in ropepatch.plan(tmp_path, to="4x").warnings if "OlmPool" in line]
    listed = ", ".join(words for words, there in zip(WORDS, (True, True, many, True), strict=True) if there)
    count = 3 + many
    assert [line.partition(" that add up (OlmPool (arXiv:2608.10296)")[0] for line in told] == [
        f"{listed}: {count} of four features"
    ]
    (found,) = (one for one in check(Case("m", Path(), {"config.json": raw}, {})) if "hard" in one.code)
    assert (found.severity, found.problem) == ("remark", f"{count} of four features that add up: {listed}")
    assert found.mend is None


def test_of_a_scaled_checkpoint_the_window_of_pretraining_counts():
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    raw = config(True, True, False, False).to_dict()
    raw |= {"rope_parameters": scaled, "max_position_embeddings": 16384}
    found = {one.code for one in check(Case("m", Path(), {"config.json": raw}, {}))}
    raw["rope_parameters"] = scaled | {"original_max_position_embeddings": 8192, "factor": 2.0}
    assert found - {one.code for one in check(Case("m", Path(), {"config.json": raw}, {}))} == {
        "hard-to-extend"
    }
