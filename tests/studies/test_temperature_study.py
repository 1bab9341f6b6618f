"""LLaMA's weights as `ministral3`, whose queries grow with the position, in stock transformers."""

import numpy as np
import pytest
import temperature_study
import temperature_tables
import torch
from oldest import needs
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface

from ropepatch import patch, plan

BETA, WINDOW, TARGET = 0.1, 64, 256
POSITIONS = torch.arange(0, TARGET, 5)[None]


def read(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries of the first layer as its attention gets them, and the logits."""
    seen = []

    def spy(module, query, key, value, mask, **options):
        seen.append(query)
        return torch.zeros_like(query).transpose(1, 2).contiguous(), None

    ids = 1 + torch.arange(POSITIONS.shape[1])[None]
    given = {"position_ids": POSITIONS, "attention_mask": torch.ones_like(ids), "use_cache": False}
    with torch.no_grad():
        logits = model(ids, **given).logits
        AttentionInterface.register("spy", spy)
        model.set_attn_implementation("spy")
        model(ids, **given)
        model.set_attn_implementation("sdpa")
    return seen[0], logits


@pytest.fixture(scope="module")
def llama():
    needs("ministral3")
    return tiny_model("llama")


def carried(llama: torch.nn.Module, beta: float) -> torch.nn.Module:
    raw = plan(llama, to=TARGET, method="yarn").apply(llama.config.to_dict())
    config = temperature_study.as_ministral3(raw, beta, WINDOW)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    assert type(model).__name__ == "Ministral3ForCausalLM"
    model.load_state_dict(llama.state_dict())
    return model


def test_without_growth_it_computes_what_llama_does_under_the_scaling_to_the_bit(llama):
    with patch(llama, "yarn", to=TARGET):
        queries, logits = read(llama)
    same = read(carried(llama, 0.0))
    assert torch.equal(same[0], queries)
    assert torch.equal(same[1], logits)


def test_the_queries_grow_by_the_formula_beyond_the_window_alone(llama):
    with patch(llama, "yarn", to=TARGET):
        queries, logits = read(llama)
    grown, other = read(carried(llama, BETA))
    growth = 1 + BETA * np.log(1 + np.floor(POSITIONS[0].numpy() / WINDOW))
    expected = queries.double() * torch.from_numpy(growth)[None, None, :, None]
    assert torch.allclose(grown.double(), expected, rtol=1e-6, atol=0)
    smooth = 1 + BETA * np.log(1 + POSITIONS[0].numpy() / WINDOW)  # without the floor
    assert not np.allclose(smooth, growth, rtol=1e-6)
    inside = POSITIONS[0] < WINDOW
    assert torch.equal(grown[:, :, inside], queries[:, :, inside])
    assert torch.equal(other[:, inside], logits[:, inside])
    assert not torch.allclose(other[:, ~inside], logits[:, ~inside])


def row(kind, constant, beta, losses, keys=()):
    named = {"model": "tiny", "factor": 4, "target": 1024, "method": "yarn"}
    spans = {span: [[nats, 10] for nats in losses] for span in ("all", "short", "last")}
    found = {"keys": [[float(one), 1] for one in keys]} if kind == "keys" else spans | {"digest": "x"}
    return named | {"kind": kind, "constant": constant, "beta": beta} | found


def test_the_first_half_of_the_documents_chooses_and_the_second_is_compared():
    rows = [
        row("loss", constant, beta, [9, 9, 9, 9])
        for constant in temperature_study.CONSTANTS
        for beta in temperature_study.BETAS
    ]
    rows[0] = row("loss", 1.0, 0.0, [8, 8, 5, 7])
    rows[1] = row("loss", 1.0, 0.05, [7, 7, 6, 8])
    rows += [row("keys", 1.0, 0.0, (), [1, 1, 0, 1]), row("keys", 1.0, 0.05, (), [1, 1, 1, 1])]
    line = temperature_tables.picked_table(rows).splitlines()[-1]
    assert line.startswith("| `yarn` | 1 | 0.6000 | 1, 0.05 | +0.1000 ")
    assert line.endswith("| 3/4 (16% to 98%) | 4/4 (28% to 100%) |")
    lines = temperature_tables.growth_table(rows).splitlines()[2:]
    assert lines[0].startswith("| tiny, 4 x | `yarn` | 1 | +0.0000 [+0.0000, +0.0000] | +0.0000 ")
    assert lines[1].startswith("| tiny, 4 x | `yarn` | 1.15 | +0.2000 ")
