"""What a dry run says: counts against transformers' models, memory against allocations and LongLoRA's."""

import json
import shutil
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from run_recipes import small_recipe
from tiny_models import tiny_config
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

import ropepatch
from ropepatch.data.texts import Texts
from ropepatch.errors import RopepatchError
from ropepatch.model.config import blueprint, load_config
from ropepatch.model.source import TINY
from ropepatch.processes import Processes
from ropepatch.training import forecast as module
from ropepatch.training.adapter import recompute_activations, trainable
from ropepatch.training.forecast import (
    GIB,
    activation_bytes,
    evaluation_bytes,
    forecast,
    memory,
    published_config,
)
from ropepatch.training.preparation import Weights, prepare
from ropepatch.training.recipe import Data, Distil, Generated, Lora, Watch
from ropepatch.training.run import Run

PLAN = ropepatch.plan("tiny", to=512)
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def rows_of(window):
    return Data(sources=(Generated(generated="tales"),), windows=(window,), tokens_per_batch=window)


def reading(text):
    return small_recipe(data=Data(sources=(Texts(text=str(text)),), windows=(64,), tokens_per_batch=128))


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
    "lora", [None, Lora(r=3), Lora(r=3, train_embeddings=True), Lora(target_modules="all-linear")]
)
def test_what_is_trained_is_counted_as_the_training_makes_it(lora):
    config = LlamaConfig(**SMALL, tie_word_embeddings=True)
    counted = Weights.of(blueprint(config), small_recipe(lora=lora))
    model = trainable(LlamaForCausalLM(config), lora)
    assert counted.trained == sum(weights.numel() for weights in model.parameters() if weights.requires_grad)
    linear = 6 * (4 * 128 * 128 + 3 * 128 * 352)
    assert (counted.linear, counted.all) == (linear, linear + 128 * (1024 + 2 * 6 + 1))


# Memory


def peak_of_allocations(step) -> int:
    """Peak of the bytes allocated on the CPU during a step."""
    step()  # the first allocates more
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        step()
    events = watched.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(change for _, change in changes))


@pytest.mark.parametrize(
    ("lora", "mixed"),
    [
        (None, False),
        (Lora(r=4), True),
        (Lora(r=4, train_norms=False), False),
        (Lora(r=4, train_embeddings=True), False),
    ],
)
def test_the_activations_are_what_torch_allocates(lora, mixed):
    # As many key as query heads: on the CPU, older torch takes others through [T, T] scores.
    config, tokens = LlamaConfig(**SMALL | {"vocab_size": 32}, use_cache=False), 512
    model = LlamaForCausalLM(config)
    model = trainable(model.bfloat16() if mixed else model, lora).train()
    base = model.get_base_model() if lora else model
    recompute_activations(base)
    for weights in model.parameters():
        if weights.requires_grad:
            weights.grad = torch.zeros_like(weights)
    ids = torch.randint(32, (1, tokens))

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            states = base.model(input_ids=ids).last_hidden_state
        states.sum().backward()

    logits = 12 * tokens * 32
    recipe = small_recipe(lora=lora, gradient_checkpointing=True)
    expected = activation_bytes(recipe, config, tokens, 2 if mixed else 4) - logits
    assert expected == pytest.approx(peak_of_allocations(step), rel=0.15)


@pytest.mark.parametrize("keys", [2, 4])
def test_an_evaluation_takes_what_torch_allocates(tiny, keys):
    config = LlamaConfig(**SMALL | {"num_key_value_heads": keys, "num_hidden_layers": 12})
    model = LlamaForCausalLM(config).eval()
    for tokens, cached, read in (
        (2048, False, lambda: ropepatch.perplexity(model, None, [torch.arange(2048) % 1024])),
        (1024, True, lambda: ropepatch.passkey(model, tiny[1], lengths=[1024], haystacks=1)),
    ):
        expected = evaluation_bytes(config, tokens, 4, cached=cached)
        assert expected == pytest.approx(peak_of_allocations(read), rel=0.15), (tokens, cached)


def test_without_checkpointing_every_layer_is_held():
    config, chunk = LlamaConfig(**SMALL), 12 * 256 * 1024
    one = LlamaConfig(**SMALL | {"num_hidden_layers": 1})
    held = activation_bytes(small_recipe(), config, 256, 2) - chunk
    assert held == 6 * (activation_bytes(small_recipe(), one, 256, 2) - chunk)
    again = activation_bytes(small_recipe(gradient_checkpointing=True), config, 256, 2) - chunk
    assert again == held / 6 + 2 * 256 * 128 * 6


def needed(config, dtype="bfloat16", **changes):
    recipe = small_recipe(**changes)
    return memory(recipe, config, Weights.of(blueprint(config), recipe), dtype, 4096, 8192)


def test_memory_is_the_sum_of_what_each_weight_takes():
    config = LlamaConfig(**SMALL, tie_word_embeddings=True, dtype="bfloat16")
    base, linear, trained = 1_336_960, 1_204_224, 6 * 4 * 4 * (128 + 128) + 13 * 128
    lora = needed(config, lora=Lora(r=4))
    assert lora.weights_gib * GIB == 2 * base + 4 * trained
    assert lora.optimizer_gib * GIB == 12 * trained
    four = needed(config, lora=Lora(r=4), quantization="4bit")
    assert (lora.weights_gib - four.weights_gib) * GIB == pytest.approx(linear * (2 - 0.516))
    full = needed(config, lora=None)
    assert (full.weights_gib + full.optimizer_gib) * GIB == 18 * base  # with autocast's copies
    assert needed(config, dtype="float32", lora=None).weights_gib * GIB == 4 * base
    stored = LlamaConfig(**SMALL, tie_word_embeddings=True, dtype="float32")
    assert needed(stored, lora=Lora(r=4)).weights_gib * GIB == 4 * base + 4 * trained  # loaded as stored
    assert lora.total_gib == lora.weights_gib + lora.optimizer_gib + lora.evaluation_gib
    near = needed(config, lora=Lora(r=4), watch=Watch(target=False))
    assert near.evaluation_gib < lora.evaluation_gib / 1.9


def test_heads_wider_than_the_hidden_state_and_experts_count_with_their_widths():
    narrow, wide = (Qwen3Config(**SMALL, head_dim=head) for head in (32, 64))
    recipe = small_recipe(gradient_checkpointing=True)
    more = activation_bytes(recipe, wide, 100, 2) - activation_bytes(recipe, narrow, 100, 2)
    assert more == 100 * 2 * 2 * (4 * 32 + 4 * 32)
    for family in ("qwen3", "gemma3_text", "mixtral", "qwen3_moe", "gpt_oss"):
        found = needed(tiny_config(family), lora=Lora(target_modules=("q_proj",)))
        assert 0 < found.weights_gib < found.total_gib < 1


# Forecasts


def test_it_counts_what_is_trained_read_and_evaluated(tmp_path):
    found = forecast(PLAN, small_recipe(), tmp_path / "out")
    content = found.to_dict()
    assert content["tokens"] == 6 * 128
    assert content["trained_weights"] == 4 * 4 * 4 * (192 + 192) + 9 * 192
    assert content["precision"]["dtype"] == "float32"  # as the recipe states
    assert (content["watched"]["times"], content["watched"]["tokens"]) == (3, 3 * 512)
    assert 0 < content["disk"]["needed"] < content["disk"]["free"]
    assert not content["obstacles"] + content["warnings"]
    assert not list(tmp_path.iterdir())
    asked = forecast(PLAN, small_recipe(watch=Watch(every=4, windows=1, passkey_trials=1)), "out").content
    assert (asked["watched"]["times"], asked["watched"]["tokens"]) == (3, 3 * (512 + 5 * 512))


def test_texts_that_are_here_have_sizes_and_one_that_is_not_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("once upon a time " * 100)
    (source,) = forecast(PLAN, reading(tmp_path / "text.txt"), "out").content["sources"]
    assert (source["files"], source["bytes"]) == (1, 1700)
    with pytest.raises(RopepatchError, match=r"gone\.txt"):
        forecast(PLAN, reading(tmp_path / "gone.txt"), "out")
    (source,) = forecast(PLAN, reading("owner/name"), "out").content["sources"]
    assert source["kind"] == "hub"


@pytest.mark.parametrize(
    ("model", "geometry", "warned"),
    [
        ("./models/tiny", None, False),
        ("./elsewhere", None, True),
        ("meta-llama/Llama-2-7b-hf", "its own", True),
        ("meta-llama/Llama-2-7b-hf", "of tiny", False),  # as a fine-tune has it
    ],
)
def test_a_recipe_for_a_model_of_another_geometry_warns(model, geometry, warned, monkeypatch):
    if geometry == "of tiny":
        monkeypatch.setattr(module, "published_config", lambda model: PLAN.source.raw)
    found = forecast(PLAN, small_recipe(model=model), "out")
    assert [model in warning for warning in found.warnings] == [True] * warned


def own_text(**changes):
    data = Data(sources=(Generated(generated="self"),), windows=(64,), tokens_per_batch=128, boundaries=False)
    return small_recipe(
        data=data, distil=Distil(), watch=Watch(every=6, windows=2, passkey_trials=0), **changes
    )


@pytest.mark.parametrize("make", [own_text, small_recipe, lambda: reading(__file__)])
def test_what_is_held_out_is_what_the_training_holds_out(make, tmp_path, monkeypatch):
    """Bug: 2 windows of 1,024 tokens were promised where 8 pieces of 256 were read."""
    monkeypatch.setenv("ROPEPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ropepatch.training.self_written.SHARD", 256)
    watched = forecast(PLAN, make(), tmp_path / "out").content["watched"]
    pieces = Run.of(PLAN, make(), tmp_path / "out").supply().pieces
    assert [len(piece) for piece in pieces] == [watched["length"]] * watched["windows"]


def test_a_training_reads_self_generated_text_three_times_without_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ROPEPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ropepatch.training.self_written.SHARD", 256)
    supply = Run.of(PLAN, own_text(), tmp_path / "out").supply()
    assert supply.batches.times(0) == pytest.approx(3, rel=0.05)
    assert not caplog.records


@pytest.mark.parametrize("count", [1, 2])
def test_a_forecast_counts_every_token_of_all_processes_once(count, tmp_path):
    run = replace(Run.of(PLAN, small_recipe(), tmp_path / "out"), processes=Processes(0, count))
    ahead = forecast(PLAN, small_recipe(), tmp_path / "out", processes=count).content
    assert ahead["tokens"] == run.supply().tokens


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
        ({"data": rows_of(1024)}, "data.windows contains 1024 tokens, more than the target length of 512"),
        ({"attention": "flash_attention_2"}, "transformers cannot use flash_attention_2"),
        ({"quantization": "4bit"}, "quantization: 4bit needs a CUDA GPU, and none was found"),
    ],
    ids=str,
)
def test_a_recipe_that_cannot_run_is_refused_by_a_dry_run_and_by_a_training_alike(changes, said, tmp_path):
    recipe = small_recipe(**changes)
    assert said in str(forecast(PLAN, recipe, "out").obstacles[0])
    with pytest.raises(RopepatchError, match=said):
        Run.of(PLAN, recipe, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "method", "said"),
    [
        ({}, "dynamic", "dynamic follows the length"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "yarn", "are quantised"),
    ],
)
def test_a_plan_that_cannot_be_adapted_is_refused(config, method, said, tmp_path):
    source = shutil.copytree(TINY, tmp_path / "source")
    content = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(content | config))
    plan = ropepatch.plan(source, to=512, method=method)
    with pytest.raises(RopepatchError, match=said):
        prepare(plan, small_recipe()).check()
