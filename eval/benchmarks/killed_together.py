"""Sixty steps on two processes, killed five times, against the same run left alone.

    python eval/benchmarks/killed_together.py --work DIR [--json eval/results/killed_together.json]

Two processes of torchrun train the bundled checkpoint over gloo (DDP). A seed draws the steps at which it is
killed, and who: one of the two, or the launcher with both. One that is left must end by itself, and the same
command must go on and end with the weights of the run that nobody killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from reporting import environment, write
from safetensors.torch import load_file

STEPS, KILLS, SEED = 60, 5, 0
ROW = 512
WAIT = 180.0  # seconds, in which whoever is left must end
RECIPE: dict[str, Any] = {
    "model": "tiny",
    "to": ROW,
    "method": "yarn",
    "data": {"sources": [{"generated": "tales"}], "windows": [ROW], "tokens_per_batch": ROW},
    "positions": "true-length",
    "lora": {"r": 8},
    "trainer": {
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "save_steps": 5,
        "logging_steps": 1,
        "bf16": False,
    },
    "watch": {"every": 1000, "windows": 2, "passkey_trials": 0, "max_short_loss_increase": 0.99},
}


def started(recipe: Path, out: Path) -> subprocess.Popen[str]:
    """The command, in a group of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "ropepatch", "extend", "tiny", "--recipe", str(recipe), "--out", str(out)]
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command,
        env=os.environ | quiet,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def workers(launcher: int) -> list[int]:
    """The processes that a launcher started, by rank."""
    listed = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    ranks = {}
    for child in map(int, listed):
        pairs = Path(f"/proc/{child}/environ").read_bytes().decode().split("\0")
        if rank := dict(pair.split("=", 1) for pair in pairs if "=" in pair).get("RANK"):
            ranks[int(rank)] = child
    return [ranks[rank] for rank in sorted(ranks)]


def killed(recipe: Path, out: Path, step: int, whom: int | None) -> dict[str, Any]:
    """Run to a step, kill a rank or (None) all, and say how the others ended."""
    run = started(recipe, out)
    assert run.stderr is not None
    for line in run.stderr:
        if (at := re.match(rf"step (\d+)/{STEPS}", line)) and int(at[1]) >= step:
            break
    else:
        raise SystemExit(f"it ended before step {step}, with exit code {run.wait()}")
    if whom is None:
        os.killpg(run.pid, signal.SIGKILL)
    else:
        os.kill(workers(run.pid)[whom], signal.SIGKILL)
    began = time.perf_counter()
    try:
        run.communicate(timeout=WAIT)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        raise SystemExit(f"{WAIT:.0f} s after rank {whom} was killed the others still run") from None
    return {
        "step": step,
        "killed": "all" if whom is None else f"rank {whom}",
        "exit code": run.returncode,
        "seconds to the end": round(time.perf_counter() - began, 1),
    }


def finished(recipe: Path, out: Path) -> dict[str, torch.Tensor]:
    """The weights at the end."""
    run = started(recipe, out)
    said = run.communicate()[1]
    if run.returncode:
        raise SystemExit(said)
    return load_file(out / "model.safetensors")


def compare(work: Path) -> dict[str, Any]:
    """Both runs, and how far their weights are apart."""
    recipe = work / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    draw = random.Random(SEED)
    steps = sorted(draw.sample(range(2, STEPS - 10), KILLS))  # progress is not said at every step
    kills = []
    for step in steps:
        kills.append(killed(recipe, work / "killed", step, draw.choice([0, 1, None])))
        print(kills[-1], file=sys.stderr, flush=True)
    ours, theirs = (finished(recipe, work / name) for name in ("killed", "alone"))
    return {
        "kills": kills,
        "equal to the bit": all(torch.equal(ours[name], theirs[name]) for name in theirs),
        "greatest difference of a weight": max(
            (ours[name] - theirs[name]).abs().max().item() for name in theirs
        ),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="an empty folder for both runs")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True)
    result = {
        "benchmark": "killed_together",
        "steps": STEPS,
        "processes": 2,
        "seed": SEED,
        **compare(arguments.work),
        "environment": environment(),
    }
    print(json.dumps(result, indent=2))
    if arguments.json:
        write(arguments.json, result)


if __name__ == "__main__":
    main()
