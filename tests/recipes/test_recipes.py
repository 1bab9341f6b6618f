"""The recipes that come with ropepatch, what a recipe file may hold, and the command that lists them."""

import json
import re
from pathlib import Path

import pytest
import yaml
from registries import published_config, published_cost
from transformers import TrainingArguments

from ropepatch import plan
from ropepatch.errors import RopepatchError
from ropepatch.model.architectures import trained_on
from ropepatch.model.config import load_config
from ropepatch.settings import RECIPES, find_shipped, relative_length, shipped_names
from ropepatch.training.recipe import Recipe, read_recipe

NAMES = shipped_names(RECIPES)
SAMPLE = ("qwen3-8b-128k", "llama3.1-8b-256k")


def window_of(name):
    return published_config(read_recipe(name).model)["max_position_embeddings"]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains_the_whole_target(name, tmp_path):
    """All weights trained leave no teacher in memory; tiny trains on what it was made from."""
    recipe, trained = read_recipe(name), window_of(name)
    target = relative_length(recipe.to, trained)
    config = load_config(published_config(recipe.model))
    original = trained_on(config)  # which the header of the recipe gives
    method = {"method": recipe.method.name, **recipe.method.parameters}
    extension = plan(config, to=target, original=original, **method)
    assert all(
        "the model is already scaled" in warning for warning in extension.warnings
    )
    longest = max(relative_length(window, trained) for window in recipe.data.windows)
    assert longest == target or (
        recipe.positions.name != "true-length" and longest <= trained
    )
    assert recipe.lora is None or (recipe.distil is None) == name.startswith(
        ("llama2-7b", "tiny")
    )
    arguments = TrainingArguments(
        tmp_path, use_cpu=True, report_to=[], **recipe.trainer
    )
    assert arguments.max_steps == recipe.max_steps


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow)
        for name in NAMES
        if read_recipe(name).model != "tiny"
    ],
)
def test_the_header_of_a_recipe_names_its_gpu_memory(name):
    """From 128k on little is evaluated: the keys and values of a passkey take more than the training."""
    recipe = read_recipe(name)
    assert recipe.gradient_checkpointing
    assert recipe.trainer["bf16"]
    assert recipe.trainer["save_total_limit"] == 2
    header = find_shipped(name, RECIPES, "recipe").read_text(encoding="utf-8")
    needed = int(re.search(r"needs a GPU of (\d+) GB", header)[1])
    assert published_cost(recipe).memory * 2**30 < 0.9 * needed * 10**9 <= 72e9
    if relative_length(recipe.to, window_of(name)) >= 2**17:
        assert recipe.watch.windows <= 2
        assert not recipe.watch.passkey_trials


def a_recipe():
    file = find_shipped("mistral-7b-yarn-64k", RECIPES, "recipe")
    return yaml.safe_load(file.read_text(encoding="utf-8"))


@pytest.fixture
def read(tmp_path):
    def read(content):
        file = tmp_path / "mine.yaml"
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        return read_recipe(str(file))

    return read


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("method",), "yarm", "unknown method 'yarm'"),
        (("trainer", "learning_rat"), 1, "unknown recipe key 'trainer.learning_rat'"),
        (("lora",), None, "save: adapter needs a LoRA adapter"),
        (
            ("lora", "target_modules"),
            "q_proj",
            "lora.target_modules must be a valid list or be 'all-linear'",
        ),
        (
            ("lora", "modules_to_save"),
            ["lm_head"],
            "unknown recipe key 'lora.modules_to_save'",
        ),
        (("lora", "lora_bias"), True, "unknown recipe key 'lora.lora_bias'"),
        (("lora", "init_lora_weights"), "pissa", "lora.init_lora_weights must be"),
        (("lora", "use_dora"), "many", "lora.use_dora must be a valid boolean"),
        (
            ("trainer",),
            {"max_steps": 3, "learning_rate": 0.1, "bf16": True, "fp16": True},
            "trainer.bf16 and trainer.fp16 cannot both be set",
        ),
        (
            ("trainer", "save_total_limit"),
            1,
            "trainer.save_total_limit must be greater than or equal to 2",
        ),
        (
            ("trainer", "use_liger_kernel"),
            True,
            "unknown recipe key 'trainer.use_liger_kernel'",
        ),
        (
            ("trainer", "lr_scheduler_type"),
            "greedy",
            "must not depend on an evaluation",
        ),
        (
            ("trainer", "weight_decay"),
            "0,1",
            "trainer.weight_decay must be a valid number, got",
        ),
        (
            ("trainer", "optim_args"),
            3,
            "trainer.optim_args must be a valid string, got 3",
        ),
        (("seed",), 2**32, "seed must be less than 4294967296"),
    ],
)
def test_what_no_recipe_can_hold_is_refused(read, path, value, said):
    content = a_recipe() | {"save": "adapter"}
    *sections, last = path
    (content[sections[0]] if sections else content)[last] = value
    with pytest.raises(RopepatchError, match=rf"mine\.yaml: .*{re.escape(said)}"):
        read(content)


@pytest.mark.parametrize(
    "key", ["hub_token", "output_dir", "fsdp", "eval_steps", "push_to_hub"]
)
def test_an_argument_that_ropepatch_sets_is_refused(read, key):
    content = a_recipe()
    content["trainer"][key] = "secret"
    with pytest.raises(
        RopepatchError, match=f"unknown recipe key 'trainer.{key}'"
    ) as refused:
        read(content)
    assert "secret" not in str(refused.value)


def test_recipes_are_listed_in_a_table_and_as_json(run_here):
    listed = json.loads(run_here("recipes", "--json").stdout)
    assert [recipe["recipe"] for recipe in listed] == NAMES
    (one,) = json.loads(run_here("recipes", "qwen2.5-7b", "--json").stdout)
    assert one in listed
    assert Recipe(**{key: one[key] for key in one if key != "recipe"}) == read_recipe(
        "qwen2.5-7b"
    )
    lines = run_here("recipes").stdout
    assert all(
        re.search(rf"^{re.escape(name)} +\S", lines, re.MULTILINE) for name in NAMES
    )


@pytest.mark.parametrize("name", ["tiny", "qwen2.5-7b"])
def test_a_printed_recipe_names_its_schema(tmp_path, run_here, name):
    (tmp_path / "mine.yaml").write_text(run_here("recipes", name).stdout)
    schema, *copied = (tmp_path / "mine.yaml").read_text(encoding="utf-8").splitlines()
    assert (
        copied
        == find_shipped(name, RECIPES, "recipe")
        .read_text(encoding="utf-8")
        .splitlines()[1:]
    )
    assert (
        json.loads(Path(schema.split("$schema=")[1]).read_text(encoding="utf-8"))[
            "title"
        ]
        == "Recipe"
    )
    assert read_recipe(str(tmp_path / "mine.yaml")) == read_recipe(name)


@pytest.mark.parametrize(
    ("program", "keys", "hint"),
    [
        ("axolotl", {"base_model": "m"}, "sequence_len"),
        ("LLaMA-Factory", {"model_name_or_path": "m", "stage": "sft"}, "cutoff_len"),
        ("TRL", {"model_name_or_path": "m", "datasets": []}, "max_length"),
        ("NeMo RL", {"policy": {"model_name": "m"}}, "policy.model_name"),
        ("mergekit", {"base_model": "m", "gate_mode": "hidden"}, "merge first"),
        ("unsloth", {"model": "m", "training": {"max_steps": 0}}, "data.dataset"),
    ],
)
def test_a_recipe_of_another_program_is_named_with_the_keys(
    program, keys, hint, tmp_path
):
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(keys | {"learning_rate": 1e-4}))
    with pytest.raises(RopepatchError, match=f"theirs.yaml: .* {program},") as error:
        read_recipe(str(file))
    assert hint in error.value.hint
