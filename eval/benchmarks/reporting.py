"""How a benchmark reports: the spread of its samples, a table, and a JSON file with its provenance."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("ropepatch", "transformers", "torch", "safetensors")


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and range, to six significant digits."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    values = {"median": middle, "q1": low, "q3": high, "min": min(samples), "max": max(samples)}
    return {name: float(f"{value:.6g}") for name, value in values.items()}


def resident_mib(field: str) -> float:
    """VmRSS (now) or VmHWM (peak) of this process; unlike ru_maxrss, not inherited from its parent."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def environment() -> dict[str, Any]:
    """Versions and machine; torch is not imported for it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def run_repeatedly(
    description: str, benchmark: Callable[[int], dict[str, Any]], render: Callable[[dict[str, Any]], str]
) -> None:
    """The command line of a benchmark that takes a number of runs: print its result, and keep it if asked."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, choices=range(2, 101), metavar="2..100")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    result = benchmark(arguments.runs)
    print(render(result))
    if arguments.json:
        write(arguments.json, result)


def write(path: Path, result: dict[str, Any]) -> None:
    """One result as JSON."""
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
