"""`ropepatch extend --distil`: self-distillation on a given or self-generated text."""

import json
import shutil

import pytest
import torch
from run_recipes import history_of, record_of

import ropepatch
from ropepatch.extension import record as records
from ropepatch.model.precision import UNITS
from ropepatch.model.source import TINY
from ropepatch.publishing.card.parts import teaching
from ropepatch.publishing.card.writing import write_card
from ropepatch.training import self_taught
from ropepatch.training.recipe import read_recipe

TWO_STEPS = {"max_steps": 2, "bf16": False}


@pytest.fixture
def short(monkeypatch):
    """The recipe with two steps, which close little of the loss gap of YaRN."""
    recipe = read_recipe("distil")
    watch = recipe.watch.model_copy(update={"max_short_loss_increase": 0.99})
    two = recipe.model_copy(update={"trainer": recipe.trainer | TWO_STEPS, "watch": watch})
    monkeypatch.setattr(self_taught, "read_recipe", lambda name: two)


@pytest.mark.slow
def test_one_command_distils_a_stock_checkpoint_without_a_text(short, tmp_path, run_here, monkeypatch):
    monkeypatch.setenv("ROPEPATCH_CACHE", str(tmp_path / "cache"))
    done = run_here("extend", "tiny", "--to", "512", "--distil", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "self-generated text: 11 documents, 2,816 tokens" in done.stderr  # at least the 2,731 asked for
    assert "step 2/2, evaluation: short-context loss" in done.stderr
    assert "warning" not in done.stderr
    folder = tmp_path / "tiny-yarn-512-distil"
    record = record_of(folder)
    assert record["verified"]["logits"] == "equal"
    assert record["adaptation"]["recipe"]["distil"]["remapping"] == {"name": "rerope", "window": 192}
    assert record["adaptation"]["recipe"]["data"]["sources"] == [
        {"generated": "self", "weight": 1.0},
        {"generated": "questions", "weight": 0.5},
    ]
    names = {"loss within 256 tokens", "loss beyond", "passkey accuracy", "passkey log-prob"}
    assert record["adaptation"]["found"].keys() == names
    assert [row["step"] for row in history_of(folder)] == [0, 2]
    assert not any("target_loss" in row for row in history_of(folder))
    again = run_here("extend", "tiny", "--to", "512", "--distil", cwd=tmp_path)
    assert f"{folder} is finished" in again.stderr
    card = teaching(records.read(folder).adaptation)
    assert "`rerope`" in card
    assert "Some sequences asked questions of the kinds `passkey`, `number`, `sentence`:" in card
    assert read_recipe("distil").asks_questions
    assert not read_recipe("tiny").asks_questions
    assert card in write_card(folder)[0].read_text()


TARGET = (4096, False, "true-length")
BETWEEN = (1024, False, "pose")
SHORT = (256, False, "pose")


@pytest.mark.parametrize(
    ("gib", "hour", "rows", "reason"),
    [
        (24, 1e15, TARGET, None),
        (0.2, 1e15, (4096, True, "true-length"), None),
        (0.08, 1e15, (1024, True, "pose"), "4,096 tokens take 0.079 GiB of 0.06"),
        (24, 3e13, BETWEEN, "4,096 tokens take 2.5 h on two CPU cores"),
        (24, 1e12, SHORT, "4,096 tokens take 75.4 h on two CPU cores"),
    ],
)
def test_distillation_uses_the_longest_sequences_that_the_device_can_train_on(
    gib, hour, rows, reason, monkeypatch
):
    monkeypatch.setattr(torch.cpu, UNITS["AMX"], lambda: True)
    monkeypatch.setattr(self_taught, "memory_of", lambda device: int(gib * 2**30))
    monkeypatch.setattr("ropepatch.training.forecast.HOUR", dict.fromkeys(("cpu", "cuda"), hour))
    lines = []
    ahead = ropepatch.extend("tiny", to="16x", distil=True, dry_run=True, say=lines.append).forecast
    recipe = ahead.to_dict()["recipe"]
    found = recipe["data"]["windows"], recipe["gradient_checkpointing"], recipe["positions"]["name"]
    assert found == ((rows[0],), *rows[1:])
    longer = rows[0] > 256
    assert recipe["data"]["boundaries"] is not longer  # self-generated texts end within the original context
    assert recipe["distil"]["remapping"] == ({"name": "rerope", "window": 192} if longer else "rerope")
    assert (reason or "(the target length)") in lines[0]


def test_a_base_without_remapping_support_trains_within_its_original_context(tmp_path):
    source = shutil.copytree(TINY, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    sliding = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    (source / "config.json").write_text(json.dumps(config | sliding))
    lines = []
    ahead = ropepatch.extend(source, to="4x", distil=True, dry_run=True, say=lines.append).forecast
    assert ahead.recipe.data.windows == (256,)
    assert (
        "sequences of 256 tokens at skipped positions: the base model does not support position remapping ("
        in lines[0]
    )


@pytest.mark.parametrize(("hidden", "rate"), [(96, 4e-3), (192, 2.7e-3), (1536, 3.3e-4)])
def test_the_learning_rate_decreases_with_the_hidden_size(hidden, rate, tmp_path):
    source = shutil.copytree(TINY, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"hidden_size": hidden}))
    ahead = ropepatch.extend(source, to="4x", distil=True, dry_run=True).forecast
    assert ahead.recipe.trainer["learning_rate"] == rate


def test_a_given_text_replaces_self_generated_text(tmp_path):
    (tmp_path / "tales.txt").write_text("Once upon a time there was a fox.")
    ahead = ropepatch.extend("tiny", to="4x", distil=True, text=tmp_path / "tales.txt", dry_run=True).forecast
    assert ahead.recipe.data.sources[0].text == str(tmp_path / "tales.txt")
    assert not ahead.warnings
    assert not ahead.obstacles


def test_distillation_with_a_position_remapping_raises_an_error(tmp_path, run_here):
    done = run_here("extend", "tiny", "--to", "512", "--distil", "--method", "rerope", cwd=tmp_path)
    assert done.returncode == 2
    assert "a model cannot be trained with a position remapping" in done.stderr
    assert not list(tmp_path.iterdir())
