"""CPU time of commands that need no model, and of a plan, against the imports.

    python eval/benchmarks/start_cost.py [--runs 5] [--json FILE]

Every run is a separate process; its time is the CPU time that the kernel counted. The baseline of commands
without a model is `import torch`. The baseline of a plan is the part of transformers that builds a model.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from reporting import ratio, run_benchmark, spread

TORCH, MODELS = "import torch", "import torch, transformers.modeling_utils"
COMMANDS = {  # with the exit code and the baseline
    "--help": (0, TORCH),
    "methods": (0, TORCH),
    "encodings": (0, TORCH),
    "recipes": (0, TORCH),
    "suites": (0, TORCH),
    "plan tiny --to 2q": (2, TORCH),
    "extend tiny --to 2k --method yarm": (2, TORCH),
    "train tiny --recipe tinny": (2, TORCH),
    "eval tiny --suite dmo": (2, TORCH),
    "plan tiny --to 2k": (0, MODELS),
}


def cpu_seconds(arguments: list[str], expected: int = 0) -> float:
    child = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != expected:
        raise SystemExit(
            f"exit {child.returncode}, expected {expected}: {' '.join(arguments)}"
        )
    return usage.ru_utime + usage.ru_stime


def benchmark(runs: int) -> dict[str, Any]:
    samples: dict[str, list[float]] = {name: [] for name in (TORCH, MODELS, *COMMANDS)}
    for number in range(runs + 1):
        for name, seconds in samples.items():
            code, _ = COMMANDS.get(name, (0, ""))
            arguments = (
                ["-m", "ropepatch", *name.split()] if name in COMMANDS else ["-c", name]
            )
            sample = cpu_seconds(arguments, code)
            if number:  # the first round fills the page cache
                seconds.append(sample)
    return {
        "n": runs,
        "cpu_seconds": {name: spread(seconds) for name, seconds in samples.items()},
        "ratio": {
            f"{name} / {baseline}": ratio(samples, name, baseline)
            for name, (_, baseline) in COMMANDS.items()
        },
    }


if __name__ == "__main__":
    run_benchmark(__doc__, benchmark, runs=5)
