"""How ropepatch takes damaged configurations and the kill -9 of its commands, counted.

    python eval/benchmarks/robustness.py [--seeds 2000] [--kills 25] [--json FILE]

The attacks are those of the tests (tests/support/config_clinic.py and killed_commands.py), drawn from seeds:
the same numbers attack in the same way on every machine. It counts, and times nothing; needs what tests need.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reporting import run_benchmark, table

SUPPORT = Path(__file__).parents[2] / "tests" / "support"  # where the attacks are


def attack_configs(seeds: int, folder: Path) -> dict[str, Any]:
    """Ask every entry point for the damaged configuration of every seed."""
    from config_clinic import ENTRIES, Clinic
    from damaged_configs import FAMILIES, mutant

    clinic = Clinic(folder / "clinic")
    failures, answered = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about the configurations
        for seed in range(seeds):
            case = mutant(seed)
            came = clinic.ask(case)
            answered += came.answered
            failures += [f"{case}: {'; '.join(came.faults)}"] if came.faults else []
    calls = seeds * len(ENTRIES)
    return {
        "attack": f"damaged config.json of {len(FAMILIES)} model types",
        "given to": ", ".join(f"`{entry}`" for entry in ENTRIES),
        "tried": seeds,
        "failures": failures,
        "calls": calls,
        "answered": answered,
        "refused": calls - answered,
    }


def attack_commands(kills: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Kill every command so many times, and give it again."""
    from killed_commands import attacks, attempt, kills_of, reference_of

    for name, attack in attacks(folder).items():
        reference = reference_of(attack, folder / "reference")
        failures = []
        for number, kill in enumerate(kills_of(reference, kills, name)):
            place = folder / f"{name}-{number}"
            if faults := attempt(attack, place, reference, kill):
                failures.append(f"{kill}: {'; '.join(faults)}".replace(str(folder), "."))
        yield {
            "attack": "kill -9, then the same command",
            "given to": f"`{name}`",
            "tried": kills,
            "failures": failures,
            "points": len(reference.events),
        }


def benchmark(seeds: int, kills: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ropepatch-") as temporary:
        folder = Path(temporary)
        counted = [attack_configs(seeds, folder), *attack_commands(kills, folder)]
    return {"attacks": counted}


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """What was tried and what survived, a row for each attack."""
    counts = [
        (
            f"{one['attack']}: {one['given to']}",
            *map(str, (one["tried"], one["tried"] - len(one["failures"]))),
        )
        for one in result["attacks"]
    ]
    return [("attack", "tried", "survived"), *counts]


def render(result: dict[str, Any]) -> str:
    failures = [failure for one in result["attacks"] for failure in one["failures"]]
    return "\n".join([table(rows(result)), *failures, f"{len(failures)} failures"])


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # before torch is imported
    sys.path.insert(0, str(SUPPORT))
    result = run_benchmark(__doc__, benchmark, render, seeds=2000, kills=25)
    sys.exit(any(attack["failures"] for attack in result["attacks"]))
