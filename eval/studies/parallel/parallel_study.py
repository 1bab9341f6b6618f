"""Several processes in every way: what a step takes, what each holds, and how far the losses differ.

    python eval/studies/parallel/parallel_study.py --json eval/results/parallel.json --work DIR [--only WAY]

Every row is one start of `ropepatch extend tiny` by torchrun, in the environment that accelerate's launcher
makes of the way's file in recipes/accelerate. All train all weights on the same batches, so that the losses
must be those of one process: a row that says otherwise is not written. What `--json` holds already is not
run again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

ROOT = Path(__file__).resolve().parents[3]
WAYS: dict[str, str | None] = {  # accelerate's file
    "one process": None,
    "ddp": None,
    "fsdp2": "fsdp2",
    "zero2": "zero2",
    "zero3": "zero3",
    "sp": "alst",
}
SPLIT = ("sp",)  # which split a row, where the others take rows of their own
ROW, ROWS, STEPS = 2048, 4, 4  # tokens of a row, rows of a step
PROCESSES = (2, 4)
OTHERWISE = {"one process": (1,), "sp": (2,)}  # six heads are not shared by four
APART = 2e-3  # nats by which a loss may differ
LIMIT = 300.0  # seconds of a start
Row = dict[str, Any]


def recipe_of(way: str, processes: int) -> Row:
    """The recipe: a step reads the same rows, however many processes share them."""
    parts = processes if way in SPLIT else 1
    recipe: Row = {
        "model": "tiny",
        "to": ROW,
        "method": "linear",
        "data": {
            "sources": [{"generated": "tales"}],
            "windows": [ROW],
            "tokens_per_batch": ROW,
            "boundaries": False,
        },
        "positions": "true-length",
        "lora": None,
        "trainer": {
            "max_steps": STEPS,
            "gradient_accumulation_steps": ROWS * parts // processes,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "weight_decay": 0.0,
            "logging_steps": 1,
            "bf16": False,
        },
        "watch": {"every": 1000, "windows": 1, "passkey_trials": 0, "max_short_loss_increase": 0.99},
    }
    return recipe | ({"parallel": {"sequence": processes}} if way == "sp" else {})


def launched(way: str, processes: int, words: list[str], work: Path) -> list[Row] | str:
    """What each process measured, or the last line of what went wrong."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), __file__, "--worker", *words]
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "DS_ACCELERATOR": "cpu"}
    env = os.environ | quiet | environment(WAYS[way], processes)
    for old in work.glob("rank*.json"):
        old.unlink()
    try:
        done = subprocess.run(
            [*command, "--work", str(work)],
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {LIMIT:.0f} s"
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "rror" in line]
        return (said or done.stderr.splitlines() or ["no word"])[0][:200]
    return [json.loads((work / f"rank{rank}.json").read_text()) for rank in range(processes)]


def environment(file: str | None, processes: int) -> dict[str, str]:
    """What accelerate's launcher hands its processes for one of our files, in float32."""
    if file is None:
        return {}
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    place = ROOT / "recipes" / "accelerate" / f"{file}.yaml"
    words = [
        "--config_file",
        str(place),
        "--num_processes",
        str(processes),
        "--mixed_precision",
        "no",
        "x.py",
    ]
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        made = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        made = prepare_multi_gpu_env(arguments)
    if "PARALLELISM_CONFIG_SP_SIZE" in made:
        made["PARALLELISM_CONFIG_SP_SIZE"] = str(processes)
    return {name: made[name] for name in made if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))}


def measured(way: str, processes: int, work: Path) -> Row:
    """One row of the table."""
    recipe, out = work / "recipe.yaml", work / "out"
    recipe.write_text(yaml.safe_dump(recipe_of(way, processes)), encoding="utf-8")
    for folder in (out, Path(f"{out}.run")):
        shutil.rmtree(folder, ignore_errors=True)
    found = launched(way, processes, [str(recipe), str(out)], work)
    row = {"way": way, "processes": processes}
    if isinstance(found, str):
        return row | {"failed": found}
    seconds = [max(times) for times in zip(*(one["seconds"] for one in found), strict=True)][1:]
    step = sum(seconds) / len(seconds)
    return row | {
        "step": round(step, 3),
        "tokens": round(ROW * ROWS / step),
        "memory": round(max(one["memory"] for one in found)),
        "losses": found[0]["losses"],
    }


# One of the processes


def resident() -> float:
    """MiB that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def work_as(recipe: str, out: str, work: Path) -> None:
    """Train by a recipe, and write what it took."""
    import torch
    from transformers import TrainerCallback

    from ropepatch.cli import main
    from ropepatch.training import adaptation

    torch.set_num_threads(1)
    before, ends = resident(), [time.perf_counter()]

    class Watch(TrainerCallback):
        def on_step_end(self, *given: Any, **more: Any) -> None:
            ends.append(time.perf_counter())

    without_gpus()
    make = adaptation.make_trainer
    adaptation.make_trainer = lambda **given: make(**given | {"callbacks": [*given["callbacks"], Watch()]})
    sys.argv = ["ropepatch", "extend", "tiny", "--recipe", recipe, "--out", out]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    losses = []
    if os.environ.get("RANK", "0") == "0":
        history = json.loads(Path(out, "adaptation", "history.json").read_text())
        losses = [row["loss"] for row in history if "loss" in row]
    seconds = [after - first for first, after in pairwise(ends)]
    measured = {"seconds": seconds, "memory": resident() - before, "losses": losses}
    (work / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(measured))


def without_gpus() -> None:
    """Have accelerate start FSDP, which it has for GPUs alone, over gloo, and DeepSpeed compile nothing."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        from accelerate import PartialState
        from accelerate.state import DistributedType

        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # minutes to compile; gloo serves


def main() -> None:
    """Run what the file does not hold yet, and write it after every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="the file of results")
    parser.add_argument("--work", type=Path, required=True, help="a folder for what is trained")
    parser.add_argument("--only", choices=WAYS, help="one way")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work_as(*arguments.worker, arguments.work)

    from study import Rows

    import ropepatch

    arguments.work.mkdir(parents=True, exist_ok=True)
    rows, model = Rows(arguments.json, "parallel"), ropepatch.load("tiny", device="cpu")[0]
    for way in WAYS:
        for processes in OTHERWISE.get(way, PROCESSES):
            if rows.of(way=way, processes=processes) or arguments.only not in (None, way):
                continue
            row = measured(way, processes, arguments.work.resolve())
            if "failed" not in row:
                (alone,) = rows.of(way="one process") or [row]
                pairs = zip(row["losses"], alone["losses"], strict=True)
                assert all(abs(one - other) < APART for one, other in pairs), f"other losses: {row}"
                rows.add(row, model)
            print(row, file=sys.stderr, flush=True)
    return None


if __name__ == "__main__":
    main()
