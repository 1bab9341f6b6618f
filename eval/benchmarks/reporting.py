"""The frame of a benchmark: alternating runs, memory in a separate process, and a result with its spread."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("ropepatch", "transformers", "torch", "safetensors")


def spread(samples: Sequence[float]) -> dict[str, float]:
    """The median, quartiles and range, to six significant digits."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    values = {
        "median": middle,
        "q1": low,
        "q3": high,
        "min": min(samples),
        "max": max(samples),
    }
    return {name: float(f"{value:.6g}") for name, value in values.items()}


def resident_mib(field: str) -> float:
    """VmRSS (now) or VmHWM (peak) of this process; unlike ru_maxrss, not inherited from its parent."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def environment() -> dict[str, Any]:
    """The date, commit, command, versions and machine; does not import torch."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "command": shlex.join(["python", *sys.argv]),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _commit() -> str | None:
    """The current commit, marked if files differ from it; None outside a clone."""
    git = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
    ]
    done = subprocess.run(
        [*git, "--exclude=*"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")),
        "unknown",
    )


def shown(result: Any, place: str = "") -> Iterator[str]:
    """A line for each number of a result, with its path; for a spread its median and range."""
    if isinstance(result, dict) and "median" in result:
        yield f"{place}: {result['median']:.4g} ({result['min']:.4g} to {result['max']:.4g})"
    elif isinstance(result, dict | list):
        for name, value in (
            result.items() if isinstance(result, dict) else enumerate(result)
        ):
            yield from shown(value, f"{place} / {name}" if place else str(name))
    elif result is not None:
        yield f"{place}: {result}"


def in_turn(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    within: Callable[[str], AbstractContextManager[Any]] = lambda _: nullcontext(),
    warm_up: int = 1,
    seed: int = 0,
) -> tuple[dict[str, list[float]], dict[str, list[Any]]]:
    """Run all in every round, in shuffled order, each within its own context, which is not timed.

    Args:
        runs: The functions by name.
        rounds: The number of timed rounds.
        within: The context of a name.
        warm_up: The number of rounds before, which are not timed.
        seed: The seed of the order.

    Returns:
        The seconds of each by round, and what it returned.
    """
    order = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    returned: dict[str, list[Any]] = {name: [] for name in runs}
    for index in range(warm_up + rounds):
        for name in order.sample(list(runs), len(runs)):
            with within(name):
                begin = time.perf_counter()
                found = runs[name]()
                taken = time.perf_counter() - begin
            if index >= warm_up:
                seconds[name].append(taken)
                returned[name].append(found)
    return seconds, returned


def ratio(
    seconds: Mapping[str, Sequence[float]], ours: str, baseline: str
) -> dict[str, float]:
    """The spread of the ratios of two runs within a round."""
    return spread(
        [a / b for a, b in zip(seconds[ours], seconds[baseline], strict=True)]
    )


def in_own_process(*arguments: str) -> Any:
    """Run `measure` of this script with these arguments in a separate process."""
    command = [sys.executable, sys.argv[0], "--measure", *arguments]
    return json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    )


def run_benchmark(
    description: str | None,
    benchmark: Callable[..., dict[str, Any]],
    measure: Callable[..., Any] | None = None,
    **options: int | Sequence[int],
) -> dict[str, Any]:
    """The command line of a benchmark: its options with their defaults, and --json.

    Args:
        description: The docstring of the script.
        benchmark: Takes the options, and returns the result without name and environment.
        measure: The function that `in_own_process` runs.
        options: The options: whole numbers, or lists of them.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    for name, default in options.items():
        several: dict[str, Any] = {} if isinstance(default, int) else {"nargs": "+"}
        parser.add_argument(f"--{name}", type=int, default=default, **several)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    arguments = vars(parser.parse_args())
    file, asked = arguments.pop("json"), arguments.pop("measure")
    if asked and measure:
        print(json.dumps(measure(*asked)))
        sys.exit()
    name = Path(sys.argv[0]).stem
    result = {"benchmark": name, **benchmark(**arguments), "environment": environment()}
    print("\n".join(shown(result)))
    if file:
        file.write_text(lines(result), encoding="utf-8")
    return result


def lines(content: Mapping[str, Any]) -> str:
    """JSON with a line for each key, and for each row in a list of rows."""
    parts = []
    for key, value in content.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = (
                "[\n"
                + ",\n".join(json.dumps(row, ensure_ascii=False) for row in value)
                + "\n]"
            )
        parts.append(f"{json.dumps(key, ensure_ascii=False)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
