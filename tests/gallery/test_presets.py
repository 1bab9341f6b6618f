"""The geometries of current models: each has a source, and a plan."""

import json
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

import pytest
import torch
from oldest import needs
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

import ropepatch
from ropepatch import patch, plan
from ropepatch.extension.planning import Plan
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.rotary import stock_table
from ropepatch.settings import parse_length

FILE = resources.files("ropepatch.gallery") / "presets.json"
PRESETS = {preset["name"]: preset for preset in json.loads(FILE.read_text(encoding="utf-8"))}
SMALL = {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
SMALL |= {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "num_experts_per_tok": 1}
SMALL |= {"num_local_experts": 2, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Callable[[str], Plan]:
    """The plan of a preset to its target, from nothing but its config.json."""

    @cache
    def of(name: str) -> Plan:
        needs(PRESETS[name]["config"]["model_type"])
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(PRESETS[name]["config"]), encoding="utf-8")
        return plan(folder, to=PRESETS[name]["to"], method="yarn")

    return of


@pytest.mark.parametrize("name", PRESETS)
def test_stock_transformers_reads_the_planned_frequencies(name, planned):
    after: Any = Checkpoint(None, stated_raw=planned(name).apply(PRESETS[name]["config"])).config
    assert after.max_position_embeddings == parse_length(PRESETS[name]["to"])
    table = stock_table(after, planned(name).site, beyond_switch=True)
    assert table.distance(planned(name).frequencies()) == 0


def test_a_checkpoint_with_vision_is_extended_whole_and_stock_reads_the_scaled_rope(tmp_path, planned):
    """Small random weights of Qwen3.5, with the real head size, partial and multimodal rope."""
    needs("qwen3_5")
    raw = PRESETS["qwen3.5-9b"]["config"]
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 512}
    few = {key: value for key, value in SMALL.items() if key in raw["text_config"]}
    text = raw["text_config"] | few | {"hidden_size": 512, "num_hidden_layers": 4}
    config = Qwen3_5Config(text_config=text, vision_config=vision | {"num_position_embeddings": 16})
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "source")
    extension = plan(tmp_path / "source", to="1M", method="yarn")
    after, kept = extension.apply(raw), raw["text_config"]["rope_parameters"]
    rope = after["text_config"]["rope_parameters"]
    assert {key: rope[key] for key in kept} == kept | {"rope_type": "yarn"}  # of more than one modality
    assert "rope_parameters" not in after
    assert torch.equal(extension.frequencies().inv_freq, planned("qwen3.5-9b").frequencies().inv_freq)
    folder = ropepatch.extend(extension, tmp_path / "extended").folder
    whole = Qwen3_5ForConditionalGeneration.from_pretrained(folder).eval()
    assert all(torch.equal(weight, whole.state_dict()[name]) for name, weight in model.state_dict().items())
    of_text, base = (AutoModelForCausalLM.from_pretrained(at).eval() for at in (folder, tmp_path / "source"))
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        read = whole(ids, use_cache=False).logits
        assert torch.equal(of_text(ids, use_cache=False).logits, read)
        with patch(base, extension):
            assert torch.equal(base(ids, use_cache=False).logits, read)
        assert not torch.equal(model(ids, use_cache=False).logits, read)
