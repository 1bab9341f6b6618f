"""`ropepatch extend --recipe --eval --push`: extend, train, measure and publish in one command."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from hub_server import Hub, environment, serving, speak_to
from run_recipes import write_recipe_and_suite
from transformers import AutoModelForCausalLM

from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.evaluation.results import read_result

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hub():
    """The Hub that `--push` uploads to."""
    with serving(Hub()) as hub:
        yield hub


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a recipe and a suite."""
    return write_recipe_and_suite(tmp_path_factory.mktemp("place"))


@pytest.fixture
def run_at(place, run_here, monkeypatch):
    """`ropepatch` in this process, in the folder with the recipe, without a login on the Hub."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", os.devnull)
    return partial(run_here, cwd=place)


LINE = ("extend", "tiny", "--recipe", "six.yaml", "--eval", "suite.yaml", "--out", "out")


@pytest.fixture(scope="module")
def done(place):
    without = {key: value for key, value in os.environ.items() if key != "HF_TOKEN"}
    variables = without | {"OMP_NUM_THREADS": "1", "HF_HOME": str(place / "nobody")}
    line = [sys.executable, "-m", "ropepatch", *LINE]
    done = subprocess.run(line, cwd=place, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_results_are_printed_to_stdout_and_training_progress_to_stderr(done):
    for words in ("yarn + six", "out: 256 -> 512 tokens, yarn"):
        assert words in done.stdout
    for words in ("step 6/6, loss", "tokens/s", "short-context loss"):
        assert words in done.stderr
    assert "tokens/s" not in done.stdout


def test_a_failed_short_context_check_exits_with_1(done, run_at):
    failed = run_at(*LINE[:4], "--out", "out", "--max-short-loss-increase", "0%")
    assert failed.returncode == 1
    assert "above the limit of 0.00%" in failed.stderr
    allowed = run_at(*LINE[:4], "--out", "out", "--max-short-loss-increase", "50%")
    assert allowed.returncode == 0


def test_eval_without_a_recipe_measures_the_base_and_the_scaled_model(run_at):
    done = run_at("extend", "tiny", "--to", "512", "--eval", "suite.yaml", "--out", "free", "--json")
    assert done.returncode == 0, done.stderr
    tasks = json.loads(done.stdout)["evaluation"]["tasks"]
    assert all({"baseline", "yarn"} == task["results"].keys() - {"floor"} for task in tasks)


REPO = "local/tiny-512"
# In another process, without ropepatch.
STOCK = """
import sys, torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
with torch.inference_mode():
    logits = [model(ids[None], use_cache=False).logits[0] for ids in torch.load(sys.argv[2])]
assert not [name for name in sys.modules if name.startswith("ropepatch")]
torch.save(logits, sys.argv[3])
"""


@pytest.fixture(scope="module")
def pushed(done, place, hub):
    """The same command with `--push`; only the upload remains."""
    speaking = environment(hub, place / "home", "hf_token")
    line = [sys.executable, "-m", "ropepatch", *LINE[:4], "--out", "out", "--push", REPO, "--json"]
    pushed = subprocess.run(line, cwd=place, env=speaking, capture_output=True, text=True, check=False)
    assert pushed.returncode == 0, pushed.stderr
    return pushed


def test_push_uploads_the_finished_checkpoint_with_recipe_and_evaluation(pushed, hub):
    files = hub.files(REPO)
    assert {"config.json", "model.safetensors", "ropepatch.json", "README.md"} <= files.keys()
    assert {"adaptation/recipe.yaml", "evaluation/perplexity.png", "evaluation.html"} <= files.keys()
    assert "step" not in pushed.stderr
    record = json.loads(pushed.stdout)
    assert (record["pushed"]["url"], record["target"]) == (f"{hub.url}/{REPO}", 512)
    assert "hf_token" not in pushed.stdout + pushed.stderr + str(files)


def test_stock_transformers_computes_the_evaluated_logits_from_the_hub(pushed, place, hub, tiny):
    documents = held_out_tales(tiny[1], length=512, count=2)
    torch.save([document.ids for document in documents], place / "ids.pt")
    speaking = environment(hub, place / "elsewhere", None)
    words = [sys.executable, "-c", STOCK, REPO, "ids.pt", "logits.pt"]
    done = subprocess.run(words, cwd=place, env=speaking, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    logits = torch.load(place / "logits.pt")
    written = AutoModelForCausalLM.from_pretrained(place / "out").eval()
    nats = []
    for document, row in zip(documents, logits, strict=True):
        with torch.inference_mode():
            assert torch.equal(written(document.ids[None], use_cache=False).logits[0], row)
        nats.append(torch.nn.functional.cross_entropy(row[:-1].double(), document.ids[1:]).item())
    (file,) = (place / "out" / "evaluation").glob("*perplexity-yarn-six.json")
    measured = read_result(file).row("loss", length=512).value
    assert sum(nats) / len(nats) == pytest.approx(measured, abs=1e-6)


def test_the_model_card_contains_the_command_and_the_results(pushed, place, hub):
    card = hub.files(REPO)["README.md"].decode()
    # The command that wrote the checkpoint, not the one that only pushed it.
    assert "\nropepatch extend tiny --recipe six.yaml --eval suite.yaml --out out\n" in card
    (file,) = (place / "out" / "evaluation").glob("*perplexity-yarn-six.json")
    assert read_result(file).row("loss", length=512).text in card


def test_a_failed_push_prints_how_to_retry_and_the_record(pushed, hub, run_at, monkeypatch):
    speak_to(hub, monkeypatch, "hf_token")
    hub.fail("POST", "/api/repos/create", 403, times=1)
    done = run_at(*LINE[:4], "--out", "out", "--push", "local/other", "--json")
    assert done.returncode == 2
    assert "; the checkpoint is written; to push it: `ropepatch push" in done.stderr
    assert json.loads(done.stdout)["target"] == 512


def test_a_checkpoint_that_fails_its_short_context_check_is_not_pushed(done, place, hub, run_at, monkeypatch):
    speak_to(hub, monkeypatch, "hf_token")
    red = run_at(
        *LINE[:4], "--out", "out", "--max-short-loss-increase", "0%", "--push", "local/red", "--private"
    )
    assert red.returncode == 1
    assert "not pushed; to push it anyway: `ropepatch push --force --private " in red.stderr
    assert "local/red" not in hub.models
    record = json.loads((place / "out" / "ropepatch.json").read_text())
    assert record["adaptation"]["gate"]["most"] == 0.0  # otherwise a plain `push` would accept it
    assert not record["adaptation"]["gate"]["passed"]


@pytest.mark.parametrize(
    ("words", "plan"), [((), (512, "yarn")), (("--to", "1k", "--method", "ntk"), (1024, "ntk"))]
)
def test_command_line_options_override_the_recipe_in_a_dry_run(place, run_at, words, plan):
    before = sorted(place.iterdir())
    done = run_at("extend", "tiny", "--recipe", "six.yaml", "--out", "dry", *words, "--dry-run", "--json")
    printed = json.loads(done.stdout)
    assert (printed["target"], printed["method"]) == plan
    assert sorted(place.iterdir()) == before


def test_a_dry_run_prints_the_steps_and_tokens_of_the_training(place, run_at, done):
    line = ("extend", "tiny", "--recipe", "six.yaml", "--out", "dry", "--dry-run")
    planned = json.loads(run_at(*line, "--json").stdout)["training"]
    made = json.loads((place / "out" / "ropepatch.json").read_text())["adaptation"]
    assert {key: planned[key] for key in ("steps", "tokens", "recipe")} == {
        key: made[key] for key in ("steps", "tokens", "recipe")
    }
    assert made["precision"] == {"dtype": "float32"}
    (place / "flash.yaml").write_text(
        (place / "six.yaml").read_text().replace("attention: sdpa", "attention: flash_attention_2")
    )
    rejected = run_at("extend", "tiny", "--recipe", "flash.yaml", "--out", "dry", "--dry-run")
    assert rejected.returncode == 2
    assert "\ntraining: 6 steps, " in rejected.stdout
    assert rejected.stderr.startswith("error: transformers cannot use flash_attention_2")


def test_an_impossible_push_raises_an_error_before_training_and_writes_nothing(place, run_at):
    before = sorted(place.iterdir())
    for repo, message in (
        ("a/b/c", "'a/b/c' is not a valid repository name"),
        ("me/it", "no token for the Hub"),
    ):
        done = run_at("extend", "tiny", "--recipe", "six.yaml", "--push", repo)
        assert (done.returncode, message in done.stderr) == (2, True)
        assert sorted(place.iterdir()) == before
