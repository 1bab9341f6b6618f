"""The scripts that start a recipe elsewhere: they parse, their commands are ours, and a lost job goes on."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from hub_server import Hub, environment, serving
from run_recipes import model_bytes, run_python, write_recipe_and_suite
from torch.distributed.run import get_args_parser

import ropepatch
from ropepatch.cli import app
from ropepatch.settings import RECIPES, find_shipped, shipped_names
from ropepatch.training.recipe import read_recipe

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "recipes" / "jobs"
GUIDES = [
    ROOT / "docs" / "guides" / f"{name}.md"
    for name in ("several-gpus", "serve", "trainers")
]
RUN, RESULT = "local/run", "local/result"


def parse(words):
    """A command as its programs parse it: ours, behind a launcher of torch, accelerate or Slurm."""
    if words[0] in ("torchrun", "accelerate"):
        if words[0] == "torchrun":
            given = get_args_parser().parse_args(words[1:])
        else:
            given = launch_command_parser().parse_args(words[2:])
            assert load_config_from_file(str(ROOT / given.config_file))
        if given.training_script == "train.py":  # a trainer of one's own
            return
        assert (given.module, given.training_script) == (True, "ropepatch")
        words = ["ropepatch", *given.training_script_args]
    elif words[0] == "sbatch":
        assert ROOT / words[1] == JOBS / "slurm.sh"
        words = ["ropepatch", "train", *words[2:]]
    elif words[0] == "hf":
        words = words[words.index("recipes/jobs/train.py") + 3 :]
    assert words[0] == "ropepatch"
    _, bound, _ = app.parse_args(words[1:], exit_on_error=False, print_error=False)
    assert bound.arguments.get("recipe", "tiny") in (
        *shipped_names(RECIPES),
        "mine.yaml",
    )


HEADERS = [find_shipped(name, RECIPES, "recipe") for name in shipped_names(RECIPES)]
PROGRAMS = "ropepatch|torchrun|accelerate|sbatch|hf"


@pytest.mark.parametrize(
    "page",
    [*GUIDES, ROOT / "recipes" / "README.md", *HEADERS],
    ids=lambda page: page.stem,
)
def test_the_commands_of_pages_and_recipe_headers_parse(page):
    text = re.sub(
        "^#", " ", page.read_text(encoding="utf-8"), flags=re.MULTILINE
    ).replace("\\\n", " ")
    lines = [
        shlex.split(line.partition(" > ")[0])
        for line in re.findall(rf"^    ((?:{PROGRAMS}) .*)", text, re.MULTILINE)
    ]
    assert lines
    for words in lines:
        parse(words)
        if page in HEADERS:
            recipe = read_recipe(page.stem)
            assert words[words.index("train") :][:4] == [
                "train",
                recipe.model,
                "--recipe",
                page.stem,
            ]


def test_a_job_whose_result_would_be_lost_is_refused():
    ended = run_python(
        str(JOBS / "train.py"), RUN, RESULT, "ropepatch", "train", "tiny", check=False
    )
    assert ended.returncode == 2
    assert "--out" in ended.stderr


@pytest.mark.slow
def test_a_killed_job_resumes_exactly_on_an_empty_disk(tmp_path):
    """Killed as its first commit has arrived; the Hub is all that the next job has."""
    words = ["-m", "ropepatch", "train", "tiny", "--recipe", "six.yaml", "--out", "out"]
    for place in ("first", "second"):
        write_recipe_and_suite((tmp_path / place).mkdir() or tmp_path / place)
    with serving(Hub()) as hub:
        variables = environment(hub, tmp_path / "home") | {
            "PYTHONPATH": os.environ.get("PYTHONPATH", "")
        }
        script = (
            (JOBS / "train.py")
            .read_text(encoding="utf-8")
            .replace("SECONDS = 20", "SECONDS = 0.05")
        )
        (tmp_path / "train.py").write_text(script, encoding="utf-8")
        line = [
            sys.executable,
            tmp_path / "train.py",
            RUN,
            RESULT,
            sys.executable,
            *words,
        ]
        job = subprocess.Popen(
            line, cwd=tmp_path / "first", env=variables, start_new_session=True
        )
        hub.fail(
            "POST",
            f"/api/models/{RUN}/commit/",
            lambda: os.killpg(job.pid, signal.SIGKILL),
        )
        assert job.wait() == -signal.SIGKILL
        with hub.lock:  # the commit that had arrived is made
            hub.faults.clear()
        [kept] = {
            name.split("/")[0]
            for name in hub.files(RUN)
            if name.startswith("checkpoint-")
        }
        assert hub.models[RUN].private
        again = subprocess.run(
            line,
            cwd=tmp_path / "second",
            env=variables,
            check=True,
            capture_output=True,
            text=True,
        )
        assert f"resuming from {kept}" in again.stderr
    recipe = str(tmp_path / "first" / "six.yaml")
    weights = model_bytes(
        ropepatch.train("tiny", recipe=recipe, out=tmp_path / "alone").folder
    )
    assert model_bytes(tmp_path / "second" / "out") == weights
    assert hub.files(RESULT)["model.safetensors"] == weights
