"""Small recipes for tests, and runs of them in separate processes."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from checkpoint_folders import edit_json
from transformers import TrainerCallback

import ropepatch
from ropepatch.evaluation.results import as_read
from ropepatch.model.checkpoint import TINY
from ropepatch.progress import silent
from ropepatch.training import fine_tuning
from ropepatch.training.recipe import Data, Generated, Lora, Recipe, Watch
from ropepatch.training.run import Run

STEPS = 6
SUITE = """
to: [2x]
tasks:
  - {task: perplexity, windows: 2, lengths: [128, 512]}
  - {task: retrieval, haystacks: 3, lengths: [128]}
"""


def small_recipe(**changes):
    """Six steps on two sequences of 64 tokens, a checkpoint every two; dropout makes random state matter."""
    settings = {
        "model": "tiny",
        "to": 512,
        "data": Data(
            sources=(Generated(generated="tales"), Generated(generated="copies")),
            windows=(64,),
            tokens_per_batch=128,
        ),
        "positions": "pose",
        "lora": Lora(r=4, lora_alpha=8, lora_dropout=0.1),
        "trainer": {
            "max_steps": STEPS,
            "learning_rate": 1e-3,
            "save_steps": 2,
            "logging_steps": 5,
            "bf16": False,
        },
        "watch": Watch(every=3, windows=1, passkey_trials=0),
    }
    trainer = settings["trainer"] | changes.pop("trainer", {})
    return Recipe(**settings | changes | {"trainer": trainer})


def ask_little(patch):
    """Let `answerable` ask few questions."""
    patch.setattr("ropepatch.evaluation.retrieval.EXAM_MOST", 6)


def fine_tune(plan, recipe, out, **how):
    """Check a run and train, and return what was written."""
    run = Run(plan, recipe, Path(out).absolute(), **how)
    run.check()
    return fine_tuning.fine_tune(run)


def yarn():
    """The plan of the small recipe."""
    return ropepatch.plan("tiny", to=512, method="yarn")


def train(out, say=silent, **changes):
    """Train the bundled checkpoint by the small recipe with some changes."""
    return fine_tune(yarn(), small_recipe(**changes), out, say=say)


@contextmanager
def trainers(*callbacks):
    """Add callbacks to every trainer created within the block, and yield these trainers."""
    made, make = [], fine_tuning.LongContextTrainer

    def remembered(**arguments):
        made.append(
            make(**arguments | {"callbacks": [*arguments["callbacks"], *callbacks]})
        )
        return made[-1]

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(fine_tuning, "LongContextTrainer", remembered)
        yield made


def gone():
    """Interrupt the run as a killed process would be."""
    raise KeyboardInterrupt


def interrupted(plan, recipe, out, point, step, end=gone):
    """Run until an event of a step: `step_begin`, `step_end`, `save` or another one of callbacks."""

    def end_at(args, state, control, **_):
        if state.global_step == step:
            end()

    callback = TrainerCallback()
    setattr(callback, f"on_{point}", end_at)
    with trainers(callback), pytest.raises(KeyboardInterrupt):
        fine_tune(plan, recipe, out)


def tiny_with(folder, **keys):
    """A copy of the bundled checkpoint with other keys in its config.json."""
    shutil.copytree(TINY, folder)
    edit_json(folder / "config.json", **keys)
    return folder


def record_of(folder):
    return json.loads((folder / "ropepatch.json").read_text())


def history_of(folder):
    return json.loads((folder / "training" / "run.json").read_text())["history"]


def model_bytes(folder):
    return (folder / "model.safetensors").read_bytes()


@torch.inference_mode()
def logits(model):
    """The logits of 400 tokens, more than the original length of the bundled checkpoint."""
    return model.eval()(torch.arange(3, 403)[None], use_cache=False).logits


def write_recipe(folder, recipe):
    """Write a recipe as `six.yaml` to a folder."""
    (folder / "six.yaml").write_text(yaml.safe_dump(as_read(recipe.to_dict())))


def write_recipe_and_suite(folder):
    """Write the small recipe as `six.yaml` and a small suite as `suite.yaml` to a folder."""
    write_recipe(folder, small_recipe())
    (folder / "suite.yaml").write_text(SUITE)
    return folder


def run_python(*words, check=True, cwd=None, **variables):
    """Run a new interpreter with these arguments, on one thread and with the test modules in its path."""
    places = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    path = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
    line = [sys.executable, *map(str, words)]
    with subprocess.Popen(
        line,
        cwd=cwd,
        env=os.environ | path | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            said = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its processes, which would survive a kill
            raise
    assert not check or process.returncode == 0, said[1][-4000:]
    return subprocess.CompletedProcess(line, process.returncode, *said)


def run_two_processes(*words, **variables):
    """Run a program with its arguments by torchrun in two processes."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return run_python(*launcher, *words, **variables)
