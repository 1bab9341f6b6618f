"""What a dry run says: weights, memory, tokens and hours, and the errors before anything is loaded."""

import pytest
from registries import published_config
from run_recipes import fine_tune, small_recipe, tiny_with
from tiny_models import LLAMA_SIZES
from transformers import LlamaConfig, LlamaForCausalLM

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.model.config import blueprint, load_config
from ropepatch.processes import Processes
from ropepatch.training.adapter import Weights, trainable
from ropepatch.training.forecast import forecast
from ropepatch.training.recipe import Data, Generated, Lora
from ropepatch.training.run import Run, check_trainable
from ropepatch.training.supply import read_supply

PLAN = ropepatch.plan("tiny", to=512)


def rows_of(window):
    return Data(
        sources=(Generated(generated="tales"),),
        windows=(window,),
        tokens_per_batch=window,
    )


# Counting


def test_the_weights_of_a_model_and_its_adapter_are_counted():
    def counted(name, lora=None):
        return Weights.of(blueprint(load_config(published_config(name))), lora)

    assert counted("tiny").all == 1_967_808
    assert counted("Qwen/Qwen3-8B").all == 8_190_735_360  # as its authors state
    config = LlamaConfig(**LLAMA_SIZES, tie_word_embeddings=True)
    lora = Lora(r=3, train_embeddings=True)
    made = Weights.of(blueprint(config), lora)
    model = trainable(LlamaForCausalLM(config), lora)
    trained = [w.numel() for w in model.parameters() if w.requires_grad]
    assert made.trained == sum(trained)
    assert made.linear == 6 * (4 * 128 * 128 + 3 * 128 * 352)


# Forecasts


def test_a_forecast_counts_every_token_of_all_processes_once(tmp_path):
    run = Run(PLAN, small_recipe(), tmp_path / "out", processes=Processes(0, 2))
    cost = forecast(run.recipe, PLAN, run.counted, 2).cost
    assert cost.tokens == read_supply(run).tokens
    assert cost.steps == 6
    assert not cost.host
    offloading = run.recipe.model_copy(update={"gradient_checkpointing": "offload"})
    host = forecast(offloading, PLAN, run.counted).cost.host
    assert host * 2**30 == 4 * 128 * 4 * 192  # layers, as transformers moves


# Errors before anything is loaded


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(
            ({"trainer": wrong}, "transformers rejects the recipe's trainer section")
            for wrong in (
                {"report_to": "wandb"},  # which is not installed
                {"optim": "adamw_bnb_8bit"},
                {"lr_scheduler_kwargs": {"x": 1}},
            )
        ),
        (
            {"lora": Lora(target_modules=("qkv",))},
            "this model cannot have this adapter: No modules were targeted",
        ),
        ({"lora": Lora(r=2**62)}, "this adapter: Storage size calculation overflowed"),
        (
            {"data": rows_of(1024)},
            "data.windows contains 1024 tokens, more than the target length of 512",
        ),
        (
            {"quantization": "4bit"},
            "quantization: 4bit needs a CUDA GPU, and none was found",
        ),
    ],
    ids=str,
)
def test_a_recipe_that_cannot_run_is_refused_by_dry_runs(changes, said, tmp_path):
    recipe = small_recipe(**changes)
    ahead = ropepatch.train(PLAN, tmp_path / "out", recipe=recipe, dry_run=True)
    assert said in str(ahead.obstacles[0])
    with pytest.raises(RopepatchError, match=said):
        fine_tune(PLAN, recipe, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "method", "said"),
    [
        ({}, "dynamic", "follow the length"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "yarn",
            "are quantised",
        ),
    ],
)
def test_a_plan_that_cannot_be_fine_tuned_is_refused(config, method, said, tmp_path):
    source = tiny_with(tmp_path / "source", **config)
    plan = ropepatch.plan(source, to=512, method=method)
    with pytest.raises(RopepatchError, match=said):
        check_trainable(plan, small_recipe())
