"""What a dry run says: weights, memory, tokens and hours, and the errors before anything is loaded."""

import json
import shutil
from pathlib import Path

import pytest
from run_recipes import fine_tune, small_recipe
from tiny_models import LLAMA_SIZES, tiny_config
from transformers import LlamaConfig, LlamaForCausalLM

import ropepatch
from ropepatch.data.texts import Texts
from ropepatch.errors import RopepatchError
from ropepatch.model.checkpoint import TINY
from ropepatch.model.config import blueprint, load_config
from ropepatch.model.cost import GIB, cache_bytes, forward_bytes, forward_operations
from ropepatch.processes import Processes
from ropepatch.training import forecast as module
from ropepatch.training.adapter import Weights, trainable
from ropepatch.training.forecast import (
    forecast,
    published_config,
    training_bytes,
    training_cost,
)
from ropepatch.training.recipe import Data, Distil, Generated, Lora, Watch
from ropepatch.training.run import Run, check_trainable
from ropepatch.training.supply import read_supply

PLAN = ropepatch.plan("tiny", to=512)


def rows_of(window):
    return Data(
        sources=(Generated(generated="tales"),),
        windows=(window,),
        tokens_per_batch=window,
    )


def reading(text):
    return small_recipe(
        data=Data(sources=(Texts(text=str(text)),), windows=(64,), tokens_per_batch=128)
    )


# Counting


@pytest.mark.parametrize(
    ("name", "weights"),
    [  # as the models' authors state them
        ("tiny", 1_967_808),
        ("HuggingFaceTB/SmolLM2-135M", 134_515_008),
        ("meta-llama/Llama-2-7b-hf", 6_738_415_616),
        ("mistralai/Mistral-7B-v0.3", 7_248_023_552),
        ("Qwen/Qwen3-8B", 8_190_735_360),
    ],
)
def test_the_weights_of_published_models_are_counted(name, weights):
    assert Weights.before(blueprint(load_config(published_config(name)))).all == weights


@pytest.mark.parametrize(
    "lora",
    [
        None,
        Lora(r=3),
        Lora(r=3, train_embeddings=True),
        Lora(target_modules="all-linear"),
    ],
)
def test_what_is_trained_is_counted_as_the_training_makes_it(lora):
    config = LlamaConfig(**LLAMA_SIZES, tie_word_embeddings=True)
    counted = Weights.of(blueprint(config), lora)
    model = trainable(LlamaForCausalLM(config), lora)
    assert counted.trained == sum(
        weights.numel() for weights in model.parameters() if weights.requires_grad
    )
    linear = 6 * (4 * 128 * 128 + 3 * 128 * 352)
    assert (counted.linear, counted.all) == (linear, linear + 128 * (1024 + 2 * 6 + 1))


# Memory


def needed(config, dtype="bfloat16", **changes):
    recipe = small_recipe(**changes)
    return training_bytes(
        recipe, config, Weights.of(blueprint(config), recipe.lora), dtype, 4096, 8192
    )


def test_memory_is_the_sum_of_what_each_weight_takes():
    config = LlamaConfig(**LLAMA_SIZES, tie_word_embeddings=True, dtype="bfloat16")
    base, linear, trained = 1_336_960, 1_204_224, 6 * 4 * 4 * (128 + 128) + 13 * 128
    evaluation = forward_bytes(config, 8192, 2)
    lora = needed(config, lora=Lora(r=4))
    assert lora == 2 * base + 16 * trained + evaluation
    assert lora - needed(config, lora=Lora(r=4), quantization="4bit") == pytest.approx(
        linear * (2 - 0.516)
    )
    full = needed(config, lora=None, watch=Watch(target=False))
    assert full == 18 * base + forward_bytes(
        config, 4096, 2
    )  # with autocast's copies, and an evaluation
    stored = LlamaConfig(**LLAMA_SIZES, tie_word_embeddings=True, dtype="float32")
    assert (
        needed(stored, lora=Lora(r=4)) == lora + 2 * base
    )  # frozen weights are loaded as stored
    passkeys = needed(config, lora=Lora(r=4), watch=Watch(passkey_trials=1))
    assert passkeys - lora == cache_bytes(config, 8192)
    near = needed(config, lora=Lora(r=4), watch=Watch(target=False))
    assert near == lora - evaluation + forward_bytes(config, 4096, 2)


@pytest.mark.parametrize(
    "family", ["qwen3", "gemma3_text", "mixtral", "qwen3_moe", "gpt_oss"]
)
def test_the_memory_of_every_kind_of_decoder_is_estimated(family):
    config = tiny_config(family)
    assert 0 < needed(config, lora=Lora(target_modules=("q_proj",))) < GIB


# Forecasts


@pytest.mark.parametrize("count", [1, 2])
def test_a_forecast_counts_every_token_of_all_processes_once(count, tmp_path):
    processes = Processes(0, count)
    run = Run(PLAN, small_recipe(), tmp_path / "out", processes=processes)
    found = forecast(run)
    assert found.cost.tokens == read_supply(run).tokens
    assert found.cost.steps == 6
    assert found.warnings == ()
    assert not list(tmp_path.iterdir())


def test_hours_are_the_operations_of_all_passes_by_those_of_an_hour(monkeypatch):
    counted, lengths = (
        Weights(10**6, 10**6, 10**5),
        {"windows": (64, 128), "tokens_per_batch": 256},
    )
    data = Data(sources=(Generated(generated="tales"),), **lengths)
    config = PLAN.config.whole
    monkeypatch.setitem(module.HOUR, "cuda", 1e12)

    def hours(**changes):
        recipe = small_recipe(data=data, **changes)
        return training_cost(
            recipe, config, counted, dtype="bfloat16", window=256, target=512
        ).hours

    rows = 3 * (
        4 * forward_operations(config, 10**6, 64)
        + 2 * forward_operations(config, 10**6, 128)
    )
    assert hours() == pytest.approx(3 * rows / 1e12)
    assert hours(distil=Distil()) == hours(lora=None) == pytest.approx(4 * rows / 1e12)


def test_too_little_memory_or_disk_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "memory_of", lambda device: 1000)
    monkeypatch.setattr(module, "_disk_free", lambda out: 1000)
    memory, disk = forecast(Run(PLAN, small_recipe(), tmp_path / "out")).warnings
    assert "GiB, cpu has 0.0" in memory
    assert f"on the disk of {tmp_path / 'out'}, 0.0 are free" in disk


@pytest.mark.parametrize(
    ("model", "geometry", "warned"),
    [
        ("./models/tiny", None, False),
        ("./elsewhere", None, True),
        ("meta-llama/Llama-2-7b-hf", "its own", True),
        ("meta-llama/Llama-2-7b-hf", "of tiny", False),  # as a fine-tune has it
    ],
)
def test_a_recipe_for_a_model_of_another_geometry_warns(
    model, geometry, warned, monkeypatch
):
    if geometry == "of tiny":
        monkeypatch.setattr(module, "published_config", lambda model: PLAN.source.raw)
    found = forecast(Run(PLAN, small_recipe(model=model), Path("out")))
    assert [model in warning for warning in found.warnings] == [True] * warned


# Errors before anything is loaded


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(
            ({"trainer": wrong}, "transformers rejects the recipe's trainer section")
            for wrong in (
                {"report_to": "wandb"},  # which is not installed
                {"optim": "adamw_bnb_8bit"},
                {"lr_scheduler_type": "cosine_with_min_lr"},
                {"lr_scheduler_kwargs": {"x": 1}},
            )
        ),
        (
            {"lora": Lora(target_modules=("qkv",))},
            "this model cannot have an adapter on qkv",
        ),
        (
            {"lora": Lora(r=2**62)},
            "v_proj, o_proj: Storage size calculation overflowed",
        ),
        (
            {"data": rows_of(1024)},
            "data.windows contains 1024 tokens, more than the target length of 512",
        ),
        (
            {"attention": "flash_attention_2"},
            "transformers cannot use flash_attention_2",
        ),
        (
            {"quantization": "4bit"},
            "quantization: 4bit needs a CUDA GPU, and none was found",
        ),
    ],
    ids=str,
)
def test_a_recipe_that_cannot_run_is_refused_by_a_dry_run_and_by_a_training_alike(
    changes, said, tmp_path
):
    recipe = small_recipe(**changes)
    ahead = ropepatch.train(PLAN, tmp_path / "out", recipe=recipe, dry_run=True)
    assert said in str(ahead.obstacles[0])
    with pytest.raises(RopepatchError, match=said):
        fine_tune(PLAN, recipe, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "method", "said"),
    [
        ({}, "dynamic", "dynamic follows the length"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "yarn",
            "are quantised",
        ),
    ],
)
def test_a_plan_that_cannot_be_fine_tuned_is_refused(config, method, said, tmp_path):
    source = shutil.copytree(TINY, tmp_path / "source")
    content = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(content | config))
    plan = ropepatch.plan(source, to=512, method=method)
    with pytest.raises(RopepatchError, match=said):
        check_trainable(plan, small_recipe())
