"""Training steps are measured as they are trained, and counted as they compute."""

import json

import pytest
import step_cost
import torch
from torch.utils.flop_counter import FlopCounterMode

TOKENS = 512


def test_a_step_that_does_not_fit_becomes_a_row_too(tmp_path, monkeypatch):
    stepped = step_cost.stepped

    def short_of_memory(shape, recipe, *how):
        if recipe.lora is None:
            raise torch.OutOfMemoryError
        return stepped(shape, recipe, *how)

    monkeypatch.setattr(step_cost, "stepped", short_of_memory)
    file = tmp_path / "rows.json"
    step_cost.STUDY.main(["--shapes", "tiny", "--lengths", str(TOKENS), "--json", str(file)])
    rows = [row | {"gpu": "NVIDIA H100 80GB"} for row in json.loads(file.read_text())["rows"]]
    assert [row["how"] for row in rows] == ["lora", "distil", "full"]
    assert [row.get("steps") for row in rows] == [3, 3, None]
    seconds = rows[0]["step_seconds"]["median"]
    assert step_cost.mfu(rows[0], "NVIDIA H100") == pytest.approx(rows[0]["operations"] / seconds / 989e12)
    assert step_cost.mfu(rows[0], "a GPU that nobody knows") is None
    table = step_cost.steps_table(rows, lambda gib: "24 GB").splitlines()
    assert "does not fit" in table[-2]
    assert f"{TOKENS / seconds:,.0f}" in table[-1]


@pytest.mark.parametrize("how", ["full", "lora"])
def test_the_operations_of_a_step_are_those_that_torch_counts_less_what_causal_attention_leaves_out(how):
    model = step_cost.made("tiny", torch.float32)
    model.set_attn_implementation("eager")  # which multiplies all pairs
    recipe = step_cost.recipe_of(how, TOKENS, 256)
    student = step_cost.trainable(model, recipe.lora)
    ids = torch.randint(100, (1, TOKENS))
    with FlopCounterMode(display=False) as counter:
        student(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    config = model.config
    weights = sum(weight.numel() for name, weight in model.named_parameters() if "lora" not in name)
    counted = step_cost.operations(config, weights, how, TOKENS)
    causal = 3 * 2 * TOKENS**2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    assert counted + causal == pytest.approx(counter.get_total_flops(), rel=0.12 if how == "lora" else 0.01)
