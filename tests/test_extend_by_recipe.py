"""`ropepatch extend --recipe --eval`: the main job in one line."""

import json
import os
import subprocess
import sys

import pytest
import yaml
from run_recipes import small_recipe
from transformers import AutoModelForCausalLM

from ropepatch.evaluation.results import as_read

SUITE = """
to: [2x]
tasks:
  - {task: perplexity, windows: 2, lengths: [128, 512]}
  - {task: passkey, trials: 1, lengths: [128], depths: [0.5]}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a recipe and a suite."""
    folder = tmp_path_factory.mktemp("place")
    recipe = as_read(small_recipe().to_dict())
    (folder / "six.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "suite.yaml").write_text(SUITE)
    return folder


def ropepatch(place, *words):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "ropepatch", *words]
    return subprocess.run(line, cwd=place, env=environment, capture_output=True, text=True, check=False)


LINE = ("extend", "tiny", "--recipe", "six.yaml", "--eval", "suite.yaml", "--out", "out")


@pytest.fixture(scope="module")
def done(place):
    done = ropepatch(place, *LINE)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def record(done, place):
    return json.loads((place / "out" / "ropepatch.json").read_text())


def test_the_target_and_the_method_are_those_of_the_recipe(record):
    assert (record["target"], record["method"]) == (512, "yarn")


def test_stock_transformers_loads_what_it_makes(done, place):
    assert AutoModelForCausalLM.from_pretrained(place / "out").config.max_position_embeddings == 512


def test_it_is_measured_as_it_is_scaled_and_trained(record):
    assert [task["task"] for task in record["evaluation"]["tasks"]] == ["perplexity", "passkey"]
    for task in record["evaluation"]["tasks"]:
        assert {"as it is", "yarn", "yarn + six"} <= task["results"].keys()


def test_the_evidence_lies_in_the_folder(done, place):
    assert len(list((place / "out" / "evaluation").glob("*.json"))) >= 6
    assert "yarn + six" in (place / "out" / "evaluation.html").read_text()
    assert (place / "out" / "adaptation" / "history.json").is_file()


def test_it_says_how_far_it_is_and_how_fast_on_stderr(done):
    assert "step 6/6, loss" in done.stderr
    assert "tokens/s" in done.stderr
    assert "short-context loss" in done.stderr


def test_it_prints_the_outcome_and_nothing_else_on_stdout(done):
    assert "yarn + six" in done.stdout
    assert "out: 256 -> 512 tokens, yarn" in done.stdout
    assert "tokens/s" not in done.stdout


def test_the_same_command_again_finds_all_of_it_done(done, place):
    before = (place / "out" / "model.safetensors").stat().st_mtime_ns
    again = ropepatch(place, *LINE)
    assert again.returncode == 0, again.stderr
    assert "is finished" in again.stderr
    assert "step" not in again.stderr
    assert again.stdout == done.stdout
    assert (place / "out" / "model.safetensors").stat().st_mtime_ns == before


def test_a_failed_gate_is_exit_code_1_where_it_is_asked_for(done, place):
    gated = ropepatch(place, *LINE[:4], "--out", "out", "--max-short-loss-increase", "0%")
    assert gated.returncode == 1
    assert "beyond the 0.00% allowed" in gated.stderr
    allowed = ropepatch(place, *LINE[:4], "--out", "out", "--max-short-loss-increase", "50%")
    assert allowed.returncode == 0


def test_without_a_recipe_the_scaled_model_is_measured_beside_the_base(place):
    done = ropepatch(
        place, "extend", "tiny", "--to", "512", "--eval", "suite.yaml", "--out", "free", "--json"
    )
    assert done.returncode == 0, done.stderr
    tasks = json.loads(done.stdout)["evaluation"]["tasks"]
    assert all({"as it is", "yarn"} == task["results"].keys() - {"floor"} for task in tasks)


def test_a_dry_run_prints_the_plan_and_writes_nothing(place):
    done = ropepatch(place, "extend", "tiny", "--recipe", "six.yaml", "--out", "dry", "--dry-run")
    assert done.returncode == 0
    assert "512" in done.stdout
    assert not [path for path in place.iterdir() if path.name.startswith("dry")]


def test_the_command_line_goes_before_the_recipe(place):
    words = ("extend", "tiny", "--recipe", "six.yaml", "--to", "1k", "--method", "ntk", "--dry-run", "--json")
    plan = json.loads(ropepatch(place, *words).stdout)
    assert (plan["target"], plan["method"]) == (1024, "ntk")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("extend", "tiny"), "--to is missing"),
        (("extend", "tiny", "--to", "1k", "--max-short-loss-increase", "2%"), "needs a --recipe"),
        (("extend", "tiny", "--recipe", "six.yaml", "--link-weights"), "--link-weights beside --recipe"),
        (
            ("extend", "tiny", "--recipe", "six.yaml", "--max-short-loss-increase", "two"),
            "'two' is not a share",
        ),
        (
            ("extend", "tiny", "--recipe", "six.yaml", "--max-short-loss-increase", "-1%"),
            "'-1%' is not a share",
        ),
        (("extend", "tiny", "--recipe", "six.yaml", "--eval", "dem"), "unknown suite 'dem'"),
        (("extend", "tiny", "--recipe", "tyni"), "unknown recipe 'tyni'"),
        (("extend", "tiny", "--recipe", "none.yaml"), "none.yaml is not a recipe"),
        (("extend", "tiny", "--recipe", "six.yaml", "--out", "taken"), "already exists"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(place, words, message):
    (place / "taken").mkdir(exist_ok=True)
    before = sorted(path.name for path in place.iterdir())
    done = ropepatch(place, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in place.iterdir()) == before
