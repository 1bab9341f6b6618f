"""Several processes in every way: what a step takes, what each holds, and how far the losses differ.

    python eval/studies/parallel/parallel_study.py --json eval/results/parallel.json --work DIR [--only WAY]

Every row is one start of `ropepatch extend tiny` by torchrun, in the environment that accelerate's launcher
makes of the way's file in recipes/accelerate; `context` is context_parallel.py beside it, called from
Python. All train all weights on the same batches, so that the losses must be those of one process. What
`--json` holds already is not run again.
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
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
WAYS: dict[str, str | None] = {  # accelerate's file
    "one process": None,
    "ddp": None,
    "fsdp2": "fsdp2",
    "zero2": "zero2",
    "zero3": "zero3",
    "sp": "alst",
    "context": None,
}
SPLIT = ("sp", "context")  # which split a row, where the others take rows of their own
ROW, ROWS, STEPS = 2048, 4, 4  # tokens of a row, rows of a step
PROCESSES = (2, 4)
OTHERWISE = {"one process": (1,), "sp": (2,)}  # six heads are not shared by four
ROOM = 256  # MiB that a process may take for the longest row, beside what it holds before the first
LONGEST = 32  # times the shortest row tried
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
    command = [sys.executable, *(launcher if processes > 1 else []), __file__, "--worker", way, *words]
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
    losses = found[0]["losses"]
    step = sum(seconds) / len(seconds)
    return row | {
        "step": round(step, 3),
        "tokens": round(ROW * ROWS / step),
        "memory": round(max(one["memory"] for one in found)),
        "losses": losses,
    }


def longest(processes: int, work: Path) -> Row:
    """The longest row that a number of processes trains on, each with `ROOM` MiB for it."""
    row, length, reached = {"longest": processes, "room": ROOM}, ROW, 0
    while length <= LONGEST * ROW:
        found = launched("context", processes, ["--length", str(length)], work)
        if isinstance(found, str):
            return row | {"length": reached, "ended": found}
        reached, length = length, 2 * length
    return row | {"length": reached, "ended": "not tried further"}


# One of the processes


def resident() -> float:
    """MiB that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def work_as(way: str, words: list[str], length: int | None, work: Path) -> None:
    """Train, and write what it took."""
    import torch
    from transformers import TrainerCallback

    import ropepatch  # noqa: F401  # its modules count as what is held before
    from ropepatch.training import adaptation

    torch.set_num_threads(1)
    before, ends = resident(), [time.perf_counter()]
    if way == "context":
        losses = with_context(words, length, ends)
    else:

        class Watch(TrainerCallback):
            def on_step_end(self, *told: Any, **more: Any) -> None:
                ends.append(time.perf_counter())

        without_gpus()
        make = adaptation.make_trainer
        adaptation.make_trainer = lambda **told: make(**told | {"callbacks": [*told["callbacks"], Watch()]})
        from ropepatch.cli import main

        sys.argv = ["ropepatch", "extend", "tiny", "--recipe", words[0], "--out", words[1]]
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
        losses = []
        if os.environ.get("RANK", "0") == "0":
            history = json.loads(Path(words[1], "adaptation", "history.json").read_text())
            losses = [row["loss"] for row in history if "loss" in row]
    seconds = [after - first for first, after in pairwise(ends)]
    told = {"seconds": seconds, "memory": resident() - before, "losses": losses}
    (work / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(told))


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


def with_context(words: list[str], length: int | None, ends: list[float]) -> list[float]:
    """The losses of steps on rows that all processes share, by the recipe, or on one row of a length."""
    import torch
    import torch.distributed as dist
    from context_parallel import context_parallel, shard_row

    import ropepatch
    from ropepatch.training.loss import causal_lm_loss, linear_head

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    model, tokenizer = ropepatch.load("tiny")
    batches = read_batches(words[0], tokenizer) if words else [one_row(length or ROW)]
    accumulated = ROWS if words else 1
    with ropepatch.patch(model, "linear", to=length or ROW):
        head = linear_head(model.train())
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0), []
        if length:
            limited()
        for first in range(0, len(batches), accumulated):
            step = [batches[number] for number in range(first, first + accumulated)]
            count, total = sum(int((row["labels"] != -100).sum()) for row in step), torch.zeros(())
            with context_parallel(model):
                for row in step:
                    loss = causal_lm_loss(model, shard_row(row), count, head=head)
                    loss.backward()
                    total += loss.detach()
            for value in (
                [total, *(weight.grad for weight in model.parameters())] if dist.is_initialized() else ()
            ):
                dist.all_reduce(value)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item())
            ends.append(time.perf_counter())
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


def read_batches(file: str, tokenizer: Any) -> Any:
    """The batches of a recipe."""
    from ropepatch.model.source import TINY
    from ropepatch.training.recipe import read_recipe
    from ropepatch.training.supply import RecipeReader

    told = {
        "tokenizer": tokenizer,
        "trained": 256,
        "target": ROW,
        "vocabulary": len(tokenizer),
        "folder": TINY,
    }
    return RecipeReader(recipe=read_recipe(file), **told).supply(per_step=ROWS).batches


def one_row(length: int) -> Row:
    """A row of one document."""
    import torch

    ids = torch.arange(length)[None] % 900 + 5
    edges, positions = torch.tensor([0, length]), torch.arange(length)[None]
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "cu_seq_lens_q": edges}


def limited() -> None:
    """Let this process take so many MiB more."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    held = int(status["VmData"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + ROOM * 2**20,) * 2)


def main() -> None:
    """Run what the file does not hold yet, and write it after every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="the file of results")
    parser.add_argument("--work", type=Path, required=True, help="a folder for what is trained")
    parser.add_argument("--only", choices=[*WAYS, "longest"], help="one way")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        way, *words = arguments.worker
        return work_as(way, words, arguments.length, arguments.work)

    import ropepatch
    from ropepatch.evaluation.results import environment as of_machine
    from ropepatch.files import whole_file

    arguments.work.mkdir(parents=True, exist_ok=True)
    known = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json.exists() else {}
    rows = [row for row in known.get("rows", []) if "failed" not in row]
    starts = [(way, count) for way in WAYS for count in OTHERWISE.get(way, PROCESSES)]
    tasks = {(way, count): partial(measured, way, count) for way, count in starts}
    tasks |= {("longest", count): partial(longest, count) for count in (1, 2)}
    env = of_machine(ropepatch.load("tiny")[0])
    done = {(row.get("way", "longest"), row.get("processes", row.get("longest"))) for row in rows}
    for (way, count), run in tasks.items():
        if (way, count) in done or arguments.only not in (None, way):
            continue
        rows.append(run(arguments.work.resolve()))
        record = {"task": "parallel", "rows": rows, "cores": os.cpu_count(), "env": env}
        with whole_file(arguments.json) as file:
            file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(rows[-1], file=sys.stderr, flush=True)
    return None


if __name__ == "__main__":
    main()
