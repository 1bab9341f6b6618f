"""LLaMA's weights as `smollm3` without rope on some layers, and the table of DroPE."""

import drope_study
import drope_tables
import pytest
import torch
from oldest import needs
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

IDS = torch.arange(1, 41)[None]


@pytest.fixture(scope="module")
def llama():
    needs("smollm3")
    return tiny_model("llama")


def carried(llama: torch.nn.Module, without: range) -> torch.nn.Module:
    config = drope_study.as_smollm3(llama.config.to_diff_dict(), without)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    assert type(model).__name__ == "SmolLM3ForCausalLM"
    model.load_state_dict(llama.state_dict())
    return model


@torch.no_grad()
def test_with_the_rope_on_every_layer_it_computes_what_llama_does_to_the_bit(llama):
    assert torch.equal(carried(llama, range(0))(IDS).logits, llama(IDS).logits)


@torch.no_grad()
def test_a_layer_without_rope_is_blind_to_its_positions_and_one_with_it_is_not(llama):
    def spread(without: range) -> torch.Tensor:
        model = carried(llama, without)
        given = {"attention_mask": torch.ones_like(IDS), "use_cache": False}
        near, far = (
            model(IDS, position_ids=step * torch.arange(40)[None], **given).logits for step in (1, 3)
        )
        return (near - far).abs().max()

    layers = llama.config.num_hidden_layers
    assert spread(range(layers)) == 0
    assert 0 < spread(range(1, layers, 2)) < spread(range(0))


def row(of, short, **trial):
    spans = {name: [[nats, 10] for nats in short] for name in ("short", "2 L", "4 L")}
    named = {"model": "tiny", "factor": 4, "target": 1024, "of": of, "digest": "x"}
    return named | spans | trial | {"keys": {"256": [[1.0, 1.0]] * 4}}


def test_the_table_says_how_far_above_the_base_each_training_is_in_the_order_of_what_was_read():
    trained = {"loss": "cross-entropy", "learning_rate": 0.002, "rows": 4}
    rows = [
        row("base", [10, 20, 30]),
        row("trial", [11, 22, 33], without="all", steps=200, tokens=8e5, seconds=120, **trained),
        row("trial", [20, 40, 60], without="all", steps=0, **trained),
        row("trial", [11, 21, 31], without="none", steps=200, tokens=8e5, seconds=90, **trained),
    ]
    lines = drope_tables.drope_table(rows).splitlines()[4:]
    assert [line.split("|")[1].strip() for line in lines] == ["as trained", "dropped", "dropped", "YaRN"]
    assert [line.split("|")[5].strip().split(" ")[0] for line in lines] == ["–", "+100.0%", "+10.0%", "+5.0%"]
    assert "| cross-entropy | 0.8 (200 x 4) | 0.002 |" in lines[2]
