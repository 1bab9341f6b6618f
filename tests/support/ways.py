"""A small training run on one process, or on two with each file of recipes/accelerate.

As a program it is one of the processes: `ways.py RECIPE OUT [KILL]`.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import cache
from pathlib import Path

import yaml
from run_recipes import run_python, run_two_processes

CONFIGS = Path(__file__).parents[2] / "recipes" / "accelerate"
ROW, STEPS = 64, 4
FILES = ("ddp", "fsdp2")
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "train_norms": False}


def recipe_of(way, *, lora):
    """A recipe whose steps use the same sequences for any number of processes."""
    own = 2 if way else 1
    return {
        "model": "tiny",
        "to": 512,
        "method": "linear",
        "data": {
            "sources": [{"generated": "tales"}],
            "windows": [ROW],
            "tokens_per_batch": 2 * ROW,
        },
        "positions": "pose",
        "lora": LORA if lora else None,
        "trainer": {
            "max_steps": STEPS,
            "gradient_accumulation_steps": 4 // own,
            "learning_rate": 1e-3 if lora else 0.02,
            # Steps of SGD depend on the scale of gradients, and it has no state
            "optim": "adamw_torch" if lora else "sgd",
            "max_grad_norm": 0.0,
            "lr_scheduler_type": "linear",
            "weight_decay": 0.0,
            "logging_steps": 1,
            "save_steps": 2,
            "bf16": False,
        },
        "watch": {
            "every": 2,
            "windows": 1,
            "passkey_trials": 0,
            "max_short_loss_increase": 0.99,
        },
    }


@cache
def launcher_environment(way):
    """The variables that accelerate's launcher sets for its processes with a config file, in float32."""
    from accelerate.commands.launch import (
        _validate_launch_command,
        launch_command_parser,
    )
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--config_file", str(CONFIGS / f"{way}.yaml")]
    words += ["--num_processes", "2", "--mixed_precision", "no", "x.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    made = prepare_multi_gpu_env(arguments)
    set_here = {name for name in made if name.startswith(("ACCELERATE_", "FSDP_"))}
    return {"PYTHONWARNINGS": "ignore"} | {name: made[name] for name in set_here}


def start(way, place, *, lora, kill=""):
    """Train in a folder until the run ends or is killed.

    Args:
        way: A name in `FILES`; None for one process.
        place: The folder, which then contains `out`.
        lora: Train an adapter instead of all weights.
        kill: The killed process (`all` or its rank), and the event: `step N`, `checkpoint N` or `merge`.
    """
    recipe = place / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(way, lora=lora)), encoding="utf-8")
    words = [__file__, recipe, place / "out", *kill.split()]
    if way is None:
        return run_python(*words, check=False)
    return run_two_processes(*words, check=False, **launcher_environment(way))


# One of the processes


def work(recipe, out, whom="", event="", step="0"):
    """Train; kill this process at an event, if it is the chosen one."""
    from transformers import Trainer

    from ropepatch.cli import main
    from ropepatch.training import fine_tuning

    without_gpus()
    rank = os.environ.get("RANK", "0")

    def die():
        if whom == "all" and rank == "0":
            os.kill(os.getppid(), signal.SIGKILL)  # torchrun
        os.kill(os.getpid(), signal.SIGKILL)

    if whom in ("all", rank):
        if event == "merge":
            fine_tuning.merged_model = lambda *_: die()
        else:
            method = {"step": "training_step", "checkpoint": "_save_checkpoint"}[event]
            stock = getattr(Trainer, method)

            def deadly(trainer, *arguments, **options):
                # a checkpoint is then written, but not renamed
                done = stock(trainer, *arguments, **options)
                if trainer.state.global_step == int(step):
                    die()
                return done

            setattr(Trainer, method, deadly)
    sys.argv = ["ropepatch", "train", "tiny", "--recipe", recipe, "--out", out]
    main()


def without_gpus():
    """Make accelerate run FSDP, which it supports only on GPUs, over gloo."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        from accelerate import PartialState
        from accelerate.state import DistributedType

        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)


if __name__ == "__main__":
    work(*sys.argv[1:])
