"""`train`: recipes, self-distillation, resuming; then `eval` and `push` of the checkpoint, each a command."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import yaml
from gguf_files import write_gguf
from hub_server import Hub, environment, serving, speak_to
from run_recipes import (
    history_of,
    record_of,
    small_recipe,
    tiny_with,
    write_recipe,
    write_recipe_and_suite,
)
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

import ropepatch
from ropepatch.data.texts import Texts
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.results import as_read, read_result
from ropepatch.files import read_json
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.precision import UNITS
from ropepatch.publishing.card.writing import write_card
from ropepatch.settings import RECIPES, find_shipped
from ropepatch.training.recipe import Lora, read_recipe

quiet = {"say": lambda line: None}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a recipe and a suite."""
    return write_recipe_and_suite(tmp_path_factory.mktemp("place"))


# In Python


@pytest.fixture(scope="module")
def resumed(place):
    """A call that was interrupted between two checkpoints, and the same call again, with its lines."""
    lines = []

    def until_the_fifth(line):
        lines.append(line)
        if line.startswith("step 5/6"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ropepatch.train(
            "tiny", place / "called", recipe=place / "six.yaml", say=until_the_fifth
        )
    assert not (place / "called").exists()
    lines.clear()
    return ropepatch.train(
        "tiny", place / "called", recipe=place / "six.yaml", say=lines.append
    ), lines


def test_an_interrupted_call_resumes_from_its_last_checkpoint(resumed):
    lines = resumed[1]
    assert "resuming from checkpoint-4" in lines
    assert not any(line.startswith("step 4/6") for line in lines)
    assert any("short-context loss" in line for line in lines)


def test_a_repeated_call_reports_that_it_is_finished(resumed, place):
    lines = []
    again = ropepatch.train(
        "tiny", place / "called", recipe=place / "six.yaml", say=lines.append
    )
    assert f"{again} is finished" in lines
    assert again.record == resumed[0].record


def test_an_extension_is_a_path_with_record_and_check(resumed, place):
    extension, _ = resumed
    assert os.fspath(extension) == str(extension) == str(place / "called")
    assert extension.folder / "config.json" == place / "called" / "config.json"
    assert (
        AutoModelForCausalLM.from_pretrained(extension).config.max_position_embeddings
        == 512
    )
    plan = ropepatch.plan(extension, to=1024, method="linear")
    assert plan.config.rope.original_max_position_embeddings == 512
    assert extension.record == read_json(place / "called" / "ropepatch.json")
    assert extension.check.to_dict() == extension.record["training"]["short_context"]
    assert "short-context loss" in str(extension.check)


def test_the_folder_name_ends_with_the_full_recipe_name(tmp_path):
    recipe = tmp_path / "tiny-2.5.yaml"
    recipe.write_bytes(find_shipped("tiny", RECIPES, "recipe").read_bytes())
    for given, name in (("tiny", "tiny"), (str(recipe), "tiny-2.5")):
        made = ropepatch.train("tiny", to="1k", recipe=given, dry_run=True)
        assert made.folder.name == f"tiny-yarn-1k-{name}"


@pytest.mark.parametrize(
    ("how", "missing", "problem"),
    [
        ({"method": "dynamic"}, None, "follow the length"),
        ({}, "ropepatch.training.fine_tuning", "a training needs"),
    ],
    ids=["trainable", "installed"],
)
def test_errors_from_the_config_are_raised_before_weights_are_downloaded(
    tmp_path, monkeypatch, how, missing, problem
):
    monkeypatch.setattr(
        Checkpoint, "complete", lambda *_, **__: pytest.fail("downloaded")
    )
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(RopepatchError, match=problem):
        ropepatch.train("tiny", tmp_path / "out", to="2k", recipe="tiny", **how)


def test_a_plan_sets_target_and_method(tmp_path):
    plan = ropepatch.plan("tiny", to=512, method="ntk")
    assert (
        ropepatch.train(plan, recipe=small_recipe(), dry_run=True).folder.name
        == "tiny-ntk-512-recipe"
    )
    with pytest.raises(RopepatchError, match="a plan already sets target"):
        ropepatch.train(plan, recipe=small_recipe(), to=1024)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("src --recipe tiny --to 2x --dry-run", "no tokenizer in src"),
        (
            "tiny --recipe six.yaml --reading --dry-run",
            "--reading: save: adapter writes no checkpoint",
        ),
        ("a.gguf --recipe tiny", "a.gguf is a GGUF file, which only"),
    ],
)
def test_what_no_training_can_use_is_refused(words, reason, tmp_path, run_here):
    tiny_model("qwen3").save_pretrained(tmp_path / "src")
    write_recipe(tmp_path, small_recipe(save="adapter"))
    write_gguf(tmp_path / "a.gguf")
    done = run_here("train", *words.split(), cwd=tmp_path)
    assert (done.returncode, reason in done.stderr) == (2, True)


# Self-distillation


def distil(**changes):
    """The recipe `distil` with two steps, which close little of the loss gap of YaRN."""
    recipe = read_recipe("distil")
    watch = recipe.watch.model_copy(update={"max_short_loss_increase": 0.99})
    trainer = recipe.trainer | {"max_steps": 2, "bf16": False}
    return recipe.model_copy(update={"trainer": trainer, "watch": watch} | changes)


@pytest.mark.slow
def test_one_command_distils_a_stock_checkpoint_without_a_text(
    tmp_path, run_here, monkeypatch
):
    monkeypatch.setenv("ROPEPATCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(as_read(distil().to_dict())))
    line = ("train", "tiny", "--to", "512", "--recipe", "own.yaml")
    done = run_here(*line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "self-generated text: 11 documents, 2,816 tokens" in done.stderr
    )  # at least the 2,731 asked for
    assert "step 2/2, evaluation: short_loss " in done.stderr
    assert "warning" not in done.stderr
    folder = tmp_path / "tiny-yarn-512-own"
    record = record_of(folder)
    assert record["verified"]["logits"] == "equal"
    assert record["training"]["recipe"]["distil"]["remapping"] == {
        "name": "rerope",
        "window": 192,
    }
    assert record["training"]["recipe"]["data"]["sources"] == [
        {"generated": "self", "weight": 1.0},
        {"generated": "questions", "weight": 0.5},
    ]
    assert [row["step"] for row in history_of(folder)] == [0, 2]
    assert not any("target_loss" in row for row in history_of(folder))
    assert f"{folder} is finished" in run_here(*line, cwd=tmp_path).stderr
    card = write_card(folder)[0].read_text()
    assert "the base model ran with `rerope`" in card
    assert record["training"]["taught"] == ["passkey"]
    assert "Some sequences asked questions of the kinds `passkey`, in other" in card
    results = ropepatch.evaluate(folder, windows=1, lengths=[64])
    assert {result.label for result in results} == {
        "floor",
        "baseline",
        "yarn",
        "yarn + training",
    }
    taught = {result.label: result.taught for result in results}
    assert taught["yarn + training"] == ["passkey"]
    assert taught["yarn"] == []


@pytest.mark.parametrize(
    ("gib", "hour", "length", "reason"),
    [
        (24, 1e15, 4096, "(the target length)"),
        (0.08, 1e15, 1024, ": 4,096 tokens take 0.079 GiB of 0.06, and "),
        (24, 3e13, 1024, "and 2.5 h on two CPU cores"),
        (24, 1e12, 256, "and 75.4 h on two CPU cores"),
    ],
)
def test_distillation_uses_the_longest_sequences_that_fit_the_device(
    gib, hour, length, reason, monkeypatch
):
    monkeypatch.setattr(torch.cpu, UNITS[0], lambda: True)
    place = "ropepatch.training.forecast"
    monkeypatch.setattr(f"{place}.memory_of", lambda device: int(gib * 2**30))
    monkeypatch.setattr(f"{place}.HOUR", dict.fromkeys(("cpu", "cuda"), hour))
    lines = []
    made = ropepatch.train(
        "tiny", to="16x", recipe="distil", dry_run=True, say=lines.append
    )
    recipe = made.forecast.recipe
    assert recipe.data.windows == (length,)
    assert recipe.positions.name == ("true-length" if length == 4096 else "pose")
    # Self-generated texts end within the original context
    assert recipe.data.boundaries == (length == 256)
    if length > 256:
        assert recipe.distil.remapping == {"name": "rerope", "window": 192}
    assert recipe.gradient_checkpointing == (gib < 1)
    assert reason in lines[0]


@pytest.mark.parametrize(
    ("hidden", "rate"), [(96, 4e-3), (192, 1.5e-3), (1536, 1.1e-4)]
)
def test_the_learning_rate_decreases_with_the_hidden_size(hidden, rate, tmp_path):
    source = tiny_with(tmp_path / "source", hidden_size=hidden)
    made = ropepatch.train(source, to="4x", recipe="distil", dry_run=True, **quiet)
    assert made.forecast.recipe.trainer["learning_rate"] == rate


def test_a_given_text_replaces_the_texts_of_a_recipe(tmp_path):
    text = tmp_path / "tales.txt"
    text.write_text("Once upon a time there was a fox. " * 9999)
    own = small_recipe(
        data=small_recipe().data.model_copy(update={"sources": (Texts(text="gone"),)}),
        watch=small_recipe().watch.model_copy(update={"text": "gone"}),
    )
    for recipe, questions in (("distil", 1), (own, 0)):
        ahead = ropepatch.train(
            "tiny", to="4x", recipe=recipe, text=text, dry_run=True, **quiet
        )
        sources = ahead.forecast.recipe.data.sources
        assert (sources[0].text, len(sources)) == (str(text), 1 + questions)
        assert ahead.forecast.recipe.watch.text is None
        assert not ahead.obstacles


# train && eval && push


@pytest.fixture
def run_at(place, run_here, monkeypatch):
    """`ropepatch` in this process, in the folder with the recipe, without a login on the Hub."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", os.devnull)
    return partial(run_here, cwd=place)


@pytest.fixture(scope="module")
def hub():
    """The Hub that `push` uploads to."""
    with serving(Hub()) as hub:
        yield hub


TRAIN = ("train", "tiny", "--recipe", "six.yaml", "--out", "out")
DRY = ("train", "tiny", "--out", "dry", "--dry-run", "--recipe")
REPO = "local/tiny-512"


@pytest.fixture(scope="module")
def done(place, hub):
    """The three commands, each in a process of its own."""
    variables = environment(hub, place / "home", "hf_token")

    def run(*words):
        line = [sys.executable, "-m", "ropepatch", *words]
        ended = subprocess.run(
            line, cwd=place, env=variables, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return ended

    commands = (
        TRAIN,
        ("eval", "out", "--suite", "suite.yaml"),
        ("push", "out", REPO, "--json"),
    )
    return [run(*words) for words in commands]


@pytest.mark.slow
def test_the_command_writes_the_same_files_as_the_python_call(done, resumed, place):
    for file in ("config.json", "model.safetensors", "tokenizer_config.json"):
        assert (place / "out" / file).read_bytes() == (
            resumed[0].folder / file
        ).read_bytes()
    record, ours = record_of(place / "out"), record_of(place / "called")
    assert record.pop("command") == "ropepatch train tiny --recipe six.yaml --out out"
    labels = record.pop("evaluation")["perplexity"]
    assert {"baseline", "yarn", "yarn + training"} <= set(labels)
    assert record == ours


@pytest.mark.slow
def test_push_uploads_the_checkpoint_with_recipe_and_evaluation(done, hub, place):
    files = hub.files(REPO)
    assert {"config.json", "model.safetensors", "ropepatch.json"} <= files.keys()
    assert {"training/recipe.yaml", "evaluation.html"} <= files.keys()
    assert {"README.md", "evaluation/perplexity.png"} <= files.keys()
    pushed = done[2]
    assert json.loads(pushed.stdout)["url"] == f"{hub.url}/{REPO}"
    assert "hf_token" not in pushed.stdout + pushed.stderr + str(files)
    card = files["README.md"].decode()
    assert "\nropepatch train tiny --recipe six.yaml --out out\n" in card
    (file,) = (place / "out" / "evaluation").glob("*perplexity-yarn-training.json")
    assert read_result(file).row("loss", length=512).text in card


@pytest.mark.slow
def test_stock_transformers_computes_the_evaluated_loss_from_the_hub(
    done, place, hub, tiny, monkeypatch
):
    speak_to(hub, monkeypatch, None)
    pushed = AutoModelForCausalLM.from_pretrained(REPO, cache_dir=place / "cache")
    nats = []
    for document in held_out_tales(tiny[1], length=512, count=2):
        with torch.inference_mode():
            (logits,) = pushed.eval()(document.ids[None], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:-1], document.ids[1:])
        nats.append(loss.item())
    (file,) = (place / "out" / "evaluation").glob("*perplexity-yarn-training.json")
    measured = read_result(file).row("loss", length=512).value
    assert sum(nats) / len(nats) == pytest.approx(measured, abs=1e-6)


@pytest.mark.slow
def test_a_failed_short_context_check_is_not_pushed(
    done, place, hub, run_at, monkeypatch
):
    speak_to(hub, monkeypatch, "hf_token")
    watch = small_recipe().watch.model_copy(update={"max_short_loss_increase": 0.0})
    write_recipe(place, small_recipe(watch=watch))  # the weights are the same
    failed = run_at(*TRAIN)
    assert failed.returncode == 1
    assert "warning: short-context loss" in failed.stderr
    assert "above the limit of 0.00%" in failed.stderr
    record = record_of(place / "out")
    check = record["training"]["short_context"]
    assert (check["most"], check["passed"]) == (0.0, False)
    red = run_at("push", "out", "local/red")
    assert (red.returncode, "the short-context check failed" in red.stderr) == (2, True)
    assert "local/red" not in hub.models
    write_recipe(place, small_recipe())
    assert run_at(*TRAIN).returncode == 0


@pytest.mark.parametrize(
    ("words", "plan"),
    [((), (512, "yarn")), (("--to", "1k", "--method", "ntk"), (1024, "ntk"))],
)
def test_command_line_options_override_the_recipe_in_a_dry_run(
    place, run_at, words, plan
):
    before = sorted(place.iterdir())
    done = run_at(*DRY, "six.yaml", *words, "--json")
    printed = json.loads(done.stdout)
    assert (printed["target"], printed["method"]) == plan
    assert sorted(place.iterdir()) == before


def test_a_dry_run_prints_steps_and_tokens(place, run_at, resumed):
    planned = json.loads(run_at(*DRY, "six.yaml", "--json").stdout)["training"]
    made = resumed[0].record["training"]
    for key in ("steps", "tokens", "recipe"):
        assert planned[key] == made[key]
    assert made["precision"] == {"dtype": "float32"}
    content = small_recipe(lora=Lora(target_modules=("qkv",))).to_dict()
    (place / "other.yaml").write_text(yaml.safe_dump(as_read(content)))
    rejected = run_at(*DRY, "other.yaml")
    assert rejected.returncode == 2
    assert rejected.stderr.startswith("error: this model cannot have this adapter")
