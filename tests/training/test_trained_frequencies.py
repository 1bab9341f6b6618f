"""Frequencies that are trained with the weights."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from run_recipes import STEPS, history_of, interrupted, logits, model_bytes, record_of, small_recipe, trainers
from safetensors.torch import load_file
from tiny_models import tiny_config, tiny_model
from transformers import AutoModelForCausalLM

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.results import as_read
from ropepatch.model.source import TINY
from ropepatch.training.adaptation import adapt
from ropepatch.training.recipe import FrequencyTraining, Lora, read_recipe
from ropepatch.training.trained_frequencies import FILE, TrainedRope, frozen, train_frequencies

RATE = 0.02
YARN = ropepatch.plan("tiny", to=512, method="yarn")


@pytest.fixture(scope="module", autouse=True)
def one_tokenizer(tiny):
    """Every run makes its rows with the same tokenizer, and what they are made from but once."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr("ropepatch.training.run.load_tokenizer", lambda folder: tiny[1])
        yield


def learning(**changes):
    """The small recipe with trained frequencies, whose rate is far from that of the weights."""
    return small_recipe(frequencies=FrequencyTraining(learning_rate=RATE), **changes)


def moved(folder):
    """ln of the divisors and of the attention factor, after the training over before."""
    ends = record_of(folder)["adaptation"]["frequencies"]
    flat = {when: np.array([*end["divisors"], end["attention_factor"]]) for when, end in ends.items()}
    return np.log(flat["end"] / flat["start"])


def patched(method="yarn"):
    """A tiny model with eight rotary pairs, and the plan to 256 tokens that it is patched with."""
    model = tiny_model("llama")
    ropepatch.patch(model, plan := ropepatch.plan(model, to=256, method=method))
    return model, plan


# The module


@pytest.mark.parametrize("method", ["yarn", "linear", "p-rope", "cope"])
def test_untrained_it_computes_what_the_plan_does_to_the_bit(method):
    model, plan = patched(method)
    x, positions = torch.zeros(1, 256, 8), torch.arange(256)[None]
    before = model.model.rotary_emb(x, positions)
    rope = train_frequencies(model, plan, 1e-3)
    assert model.model.rotary_emb is rope
    assert all(torch.equal(*pair) for pair in zip(before, rope(x, positions), strict=True))


def test_the_gradient_is_that_of_the_formula():
    """Of sum(w cos(p f e^-u) a e^v) in NumPy, at a point away from the start."""
    model, plan = patched()
    rope = train_frequencies(model, plan, 1e-3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        rope.log_divisors.copy_(0.3 * torch.randn(8, generator=generator))
        rope.log_attention.fill_(0.2)
    weights = torch.randn(1, 50, 16, generator=generator)
    cos, _ = rope(torch.zeros(1, 50, 16), torch.arange(50)[None])
    (cos * weights).sum().backward()
    start, u = plan.frequencies(), rope.log_divisors.detach().double().numpy()
    angles = np.arange(50)[:, None] * (start.inv_freq.double().numpy() * np.exp(-u))
    a, w = start.attention_factor * math.exp(0.2), weights[0].double().numpy()
    both = w[:, :8] + w[:, 8:]  # each pair stands twice
    assert rope.log_divisors.grad.numpy() == pytest.approx(
        (both * a * np.sin(angles) * angles).sum(0), rel=1e-4
    )
    assert rope.log_attention.grad.item() == pytest.approx((both * a * np.cos(angles)).sum(), rel=1e-4)


def test_a_cast_of_the_model_leaves_the_frequencies_in_float32_and_no_state_dict_holds_them():
    model, plan = patched()
    before = set(model.state_dict())
    rope = train_frequencies(model, plan, 1e-3)
    with torch.no_grad():
        rope.log_divisors.fill_(0.1)
    model.to(torch.bfloat16)
    assert {parameter.dtype for parameter in rope.parameters()} == {torch.float32}
    assert rope.log_divisors.tolist() == pytest.approx([0.1] * 8, rel=1e-7)
    assert set(model.state_dict()) == before
    assert {"model.rotary_emb.log_divisors", "model.rotary_emb.log_attention"} <= dict(
        model.named_parameters()
    ).keys()


@pytest.mark.parametrize("method", ["yarn", "p-rope"])
def test_a_frozen_plan_has_the_trained_frequencies_and_reads_back_to_the_bit(tmp_path, method):
    model, plan = patched(method)
    rope = train_frequencies(model, plan, 1e-3)
    with torch.no_grad():
        rope.log_divisors.copy_(torch.linspace(-1, 1, 8))
        rope.log_attention.fill_(-0.1)
    rope.save(tmp_path)
    other = train_frequencies(patched(method)[0], plan, 1e-3)
    other.restore(tmp_path)
    assert torch.equal(other.log_divisors, rope.log_divisors)
    assert torch.equal(other.log_attention, rope.log_attention)
    start, end = plan.frequencies(), frozen(plan, tmp_path).frequencies()
    expected = start.inv_freq.double() * torch.exp(-torch.linspace(-1, 1, 8).double())
    assert end.inv_freq.tolist() == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-29)
    assert end.attention_factor == pytest.approx(start.attention_factor * math.exp(-0.1), rel=1e-6)


def test_frequencies_of_a_model_that_is_scaled_already_are_frozen_relative_to_those_it_has(tmp_path):
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    plan = ropepatch.plan(config, to=256, method="linear")
    (tmp_path / FILE).write_text(json.dumps({"log_divisors": [0.5] * 8, "log_attention": 0.0}))
    end = frozen(plan, tmp_path)
    assert end.scaling.divisors == pytest.approx([4 * math.exp(0.5)] * 8, rel=1e-6)
    assert end.rope.is_scaled


def test_a_model_whose_rope_lets_no_gradient_through_is_refused():
    model, plan = patched()
    with torch.no_grad(), pytest.raises(RopepatchError, match="no gradient reaches the frequencies of llama"):
        train_frequencies(model, plan, 1e-3)


# Training


def kept_run(recipe, out):
    """The folder that a recipe makes, and its trainer."""
    with trainers() as made:
        return SimpleNamespace(folder=adapt(YARN, recipe, out).folder, trainer=made[0])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An uninterrupted run, and the model as its last step left it, in memory."""
    return kept_run(learning(), tmp_path_factory.mktemp("trained") / "out")


def test_training_moves_every_divisor_and_the_attention_factor(run):
    assert (np.abs(moved(run.folder)) > 1e-3).all()
    assert (np.abs(moved(run.folder)) < RATE * STEPS).all()
    record = record_of(run.folder)
    ends = record["adaptation"]["frequencies"]
    assert (record["method"], record["parameters"]) == ("custom", ends["end"])
    start = ends["start"]
    frequencies = YARN.frequencies()
    divided = YARN.rope.inv_freq() / torch.tensor(start["divisors"])
    assert divided.tolist() == pytest.approx(frequencies.inv_freq.tolist(), rel=1e-6)
    assert start["attention_factor"] == pytest.approx(frequencies.attention_factor)


def test_stock_transformers_computes_what_the_trained_model_does(run):
    stock = AutoModelForCausalLM.from_pretrained(run.folder)
    assert stock.config.rope_parameters["rope_type"] == "longrope"
    assert record_of(run.folder)["verified"]["frequencies"] == "equal"
    trained = logits(run.trainer.model)
    assert torch.allclose(logits(stock), trained, atol=1e-3 * trained.abs().max())
    start = AutoModelForCausalLM.from_pretrained(run.folder, rope_parameters=YARN.rope_parameters)
    assert (logits(start) - trained).abs().max() > 0.01 * trained.abs().max()


def test_what_is_watched_is_the_model_with_its_frequencies_of_the_moment(run):
    (piece,) = run.trainer.watcher.pieces
    stock = AutoModelForCausalLM.from_pretrained(run.folder).eval()
    assert history_of(run.folder)[-1]["target_loss"] == pytest.approx(
        ropepatch.perplexity(stock, None, [piece]).between(256, 512).mean, abs=1e-4
    )


def test_the_frequencies_are_in_a_group_of_their_own_without_decay(run):
    model, optimizer = run.trainer.model, run.trainer.optimizer
    rope = next(module for module in model.modules() if isinstance(module, TrainedRope))
    ours = {id(parameter) for parameter in rope.parameters()}
    groups = [({id(p) for p in group["params"]}, group) for group in optimizer.param_groups]
    (group,) = (group for members, group in groups if members & ours)
    assert {id(parameter) for parameter in group["params"]} == ours
    assert (group["initial_lr"], group["weight_decay"]) == (RATE, 0.0)
    others = set().union(*(members for members, _ in groups)) - ours
    assert others == {id(p) for p in model.parameters() if p.requires_grad} - ours


@pytest.mark.slow
def test_an_interrupted_run_ends_like_one_that_was_not(tmp_path, run):
    interrupted(YARN, learning(), tmp_path / "out", "step_end", 3)
    assert (tmp_path / "out.run" / "checkpoint-2" / FILE).is_file()
    resumed = adapt(YARN, learning(), tmp_path / "out").folder
    assert model_bytes(resumed) == model_bytes(run.folder)
    for key in ("parameters", "inv_freq", "attention_factor"):
        assert record_of(resumed)[key] == record_of(run.folder)[key]


def test_the_matrices_b_alone_have_the_other_rate_of_lora_plus(tmp_path):
    recipe = learning(lora=Lora(r=4, loraplus_lr_ratio=16.0), trainer={"max_steps": 1, "weight_decay": 0.1})
    trainer = kept_run(recipe, tmp_path / "out").trainer
    names = {id(weights): name for name, weights in trainer.model.named_parameters()}
    rates = {
        names[id(weights)]: (group["initial_lr"], group["weight_decay"])
        for group in trainer.optimizer.param_groups
        for weights in group["params"]
    }
    assert rates.keys() == {
        name for name, weights in trainer.model.named_parameters() if weights.requires_grad
    }
    expected = {"lora_A": (1e-3, 0.1), "lora_B": (16e-3, 0.1), "norm": (1e-3, 0.0), "log_": (RATE, 0.0)}
    for part, rate in expected.items():
        assert {found for name, found in rates.items() if part in name} == {rate}, part


FIRST = {"max_steps": 1, "learning_rate": 1e-5}


@pytest.mark.slow
def test_the_first_step_of_all_weights_is_of_the_learning_rate_of_the_frequencies(tmp_path):
    """In mixed precision, with activations that are computed again."""
    recipe = learning(lora=None, gradient_checkpointing=True, trainer=FIRST | {"bf16": True})
    folder = adapt(YARN, recipe, tmp_path / "out").folder
    assert np.abs(moved(folder)) == pytest.approx(np.full(17, RATE), rel=1e-3)
    assert load_file(folder / "model.safetensors").keys() == load_file(TINY / "model.safetensors").keys()


@pytest.mark.slow
def test_an_adapter_of_two_rates_goes_on_its_base_with_the_trained_frequencies(tmp_path):
    lora = Lora(r=4, loraplus_lr_ratio=16.0)
    made = kept_run(learning(lora=lora, save="adapter", trainer=FIRST), tmp_path / "out")
    assert np.abs(moved(made.folder)) == pytest.approx(np.full(17, RATE), rel=1e-3)
    model, _ = ropepatch.load_adapter(made.folder)
    trained = logits(made.trainer.model)
    assert torch.allclose(logits(model), trained, atol=1e-3 * trained.abs().max())


# The keys of a recipe


def test_the_keys_are_read_as_they_are_written(tmp_path):
    keys = {"frequencies": {"learning_rate": 0.01}, "method": {"name": "fit", "steps": 20, "init": "yarn"}}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(as_read(small_recipe().to_dict()) | keys))
    recipe = read_recipe(str(file))
    assert recipe.frequencies == FrequencyTraining(learning_rate=0.01)
    assert (recipe.method.name, recipe.method.parameters) == ("fit", {"steps": 20, "init": "yarn"})
    file.write_text(yaml.safe_dump(as_read(recipe.to_dict())))
    assert read_recipe(str(file)) == recipe
