"""Processes that share a run, really started: each way trains as one process does, also after a death."""

import json
from contextlib import nullcontext
from functools import cache

import pytest
import torch
import ways
from accelerate.big_modeling import _attach_context_parallel_hooks
from run_recipes import history_of
from safetensors.torch import load_file
from tiny_models import tiny_model

import ropepatch
from ropepatch.errors import RopepatchError
from ropepatch.model.checkpoint import TINY
from ropepatch.training.recipe import Recipe
from ropepatch.training.run import Run, check_machine


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The checkpoint of an uninterrupted run on a number of processes."""

    @cache
    def of(way, lora):
        place = tmp_path_factory.mktemp(f"{way}-{lora}")
        done = ways.start(way, place, lora=lora)
        assert done.returncode == 1, (
            done.stderr
        )  # the check of short contexts fails: linear scaling harms
        return place / "out"

    return of


def losses(out):
    """Losses of every step, and within the original context length."""
    rows = history_of(out)
    return [
        row[key]
        for row in rows
        for key in ("loss", "short_loss", "target_loss")
        if key in row
    ]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("way", "lora"), [*((way, True) for way in ways.FILES), ("fsdp2", False)]
)
def test_two_processes_have_the_losses_and_the_weights_of_one(trained, way, lora):
    """Of packed documents at skipped positions; what is saved was compared by stock transformers."""
    one, two = trained(None, lora), trained(way, lora)
    assert len(losses(one)) == ways.STEPS + 2 * 3
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    base, before, after = (
        load_file(at / "model.safetensors") for at in (TINY, one, two)
    )
    for name, weight in before.items():
        moved = (weight - base[name]).abs().max()
        # AdamW divides small gradients, and what they are rounded by, by their size
        rounding = 1e-2 if lora else 1e-3
        assert (weight - after[name]).abs().max() <= rounding * moved + 1e-7, name
    assert json.loads((two / "ropepatch.json").read_text())["verified"]["logits"]


@pytest.mark.sweep
@pytest.mark.parametrize("way", ways.FILES)
def test_a_death_ends_the_others_and_the_command_resumes(trained, way, tmp_path):
    for kill in (
        "1 step 1",
        "all checkpoint 2",
        *(("0 checkpoint 4", "all merge") if way == "ddp" else ()),
    ):
        died = ways.start(
            way, tmp_path, lora=True, kill=kill
        )  # a start that hangs raises
        assert died.returncode != 0, kill
        assert not (tmp_path / "out").exists(), kill
    done = ways.start(way, tmp_path, lora=True)
    assert done.returncode == 1, done.stderr
    expected = load_file(trained(way, True) / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert losses(tmp_path / "out") == losses(trained(way, True))


def test_a_launcher_that_splits_too_much_is_refused(monkeypatch):
    plain = ways.recipe_of("fsdp2", lora=True)
    recipe = Recipe.model_validate(plain)
    with monkeypatch.context() as patching:
        patching.setenv("ACCELERATE_USE_FSDP", "true")
        check_machine(recipe)
        more = {"gradient_checkpointing": "offload"}
        patching.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(RopepatchError, match="offload needs a CUDA GPU"):
            check_machine(Recipe.model_validate(plain | more))
        with pytest.raises(RopepatchError, match="distil needs the whole model"):
            check_machine(Recipe.model_validate(plain | {"distil": {}}))


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [
        ("llama", ""),
        ("mistral", " 2 sliding_attention layers"),
        ("qwen3_next", " 1 linear_attention layers"),
    ],
)
def test_a_launcher_that_splits_sequences_is_refused_with_the_layers(
    model_type, layers, tmp_path, monkeypatch
):
    """The variables are those of accelerate's launcher, and its own check judges the layers."""
    model = tiny_model(model_type)
    recipe = Recipe.model_validate(ways.recipe_of(None, lora=True))
    run = Run(ropepatch.plan(model, to="8x"), recipe, tmp_path / "out")
    with monkeypatch.context() as patching:
        for variable in ways.launcher_environment("context").items():
            patching.setenv(*variable)
        with pytest.raises(RopepatchError, match="cannot be split") as refused:
            run.check()
    assert refused.value.hint.endswith(layers or "of your own")
    accepts = nullcontext()
    with pytest.raises(ValueError, match="support") if layers else accepts:
        _attach_context_parallel_hooks(model)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(
        RopepatchError, match=r"^several processes .* by DDP or FSDP2 alone"
    ):
        run.check()
