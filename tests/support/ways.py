"""A small run on one process or on two, in each way that recipes/accelerate has a file for.

Run as a program it is one of the processes: `ways.py RECIPE OUT [KILL]`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import parallel_study
import yaml

SUPPORT = Path(__file__).parent
LIMIT = 150.0  # seconds, after which a start counts as hanging
PROCESSES, ROW, STEPS = 2, 64, 4
FILES = {"ddp": "ddp", "fsdp2": "fsdp2", "zero2": "zero2", "zero3": "zero3", "alst": "alst"}
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "train_norms": False}


def recipe_of(way: str | None, *, lora: bool) -> dict[str, Any]:
    """A recipe whose steps read the same rows in every way."""
    own = PROCESSES if way and way != "alst" else 1
    recipe: dict[str, Any] = {
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
            "learning_rate": 0.02,
            "optim": "sgd",  # unlike Adam it shows gradients of another scale
            "max_grad_norm": 0.0,
            "lr_scheduler_type": "linear",
            "weight_decay": 0.0,
            "logging_steps": 1,
            "save_steps": 2,
            "bf16": False,
        },
        "watch": {"every": 2, "windows": 1, "passkey_trials": 0, "max_short_loss_increase": 0.99},
    }
    return recipe | ({"parallel": {"sequence": PROCESSES}} if way == "alst" else {})


@cache
def launcher_environment(way: str) -> dict[str, str]:
    """What accelerate's launcher sets for the file of a way."""
    return parallel_study.environment(FILES[way], PROCESSES)


def start(way: str | None, place: Path, *, lora: bool, kill: str = "") -> subprocess.CompletedProcess[str]:
    """Train in a folder, to the end or to a death.

    Args:
        way: A name in `FILES`; None for one process.
        place: The folder, which then holds `out`.
        lora: Train an adapter instead of all weights.
        kill: Who dies, and when: `all` or the number of a process, and `step N`, `checkpoint N` or `merge`.
    """
    recipe = place / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(way, lora=lora)), encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    words = [*(launcher if way else []), __file__, str(recipe), str(place / "out"), *kill.split()]
    found = [str(SUPPORT), str(Path(parallel_study.__file__).parent), os.environ.get("PYTHONPATH")]
    env = (
        os.environ
        | (launcher_environment(way) if way else {})
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, found)),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "DS_ACCELERATOR": "cpu",
        }
    )
    return subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, timeout=LIMIT, check=False
    )


# One of the processes


def work(recipe: str, out: str, whom: str = "", event: str = "", step: str = "0") -> None:
    """Train; kill this process at an event, if it is meant."""
    from transformers import Trainer

    from ropepatch.cli import main
    from ropepatch.training import adaptation

    parallel_study.without_gpus()
    rank = os.environ.get("RANK", "0")

    def die() -> None:
        if whom == "all" and rank == "0":
            os.kill(os.getppid(), signal.SIGKILL)  # torchrun, which lives as long as this process
        os.kill(os.getpid(), signal.SIGKILL)

    if whom in ("all", rank):
        if event == "merge":
            adaptation.merged_model = lambda *_: die()
        else:
            method = {"step": "training_step", "checkpoint": "_save_checkpoint"}[event]
            stock = getattr(Trainer, method)

            def deadly(trainer: Trainer, *arguments: Any, **options: Any) -> Any:
                done = stock(trainer, *arguments, **options)  # of a checkpoint: it is written, and not sealed
                if trainer.state.global_step == int(step):
                    die()
                return done

            setattr(Trainer, method, deadly)
    sys.argv = ["ropepatch", "extend", "tiny", "--recipe", recipe, "--out", out]
    main()


if __name__ == "__main__":
    work(*sys.argv[1:])
