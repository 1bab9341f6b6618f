"""The tables of `parallel_study.py`, from its result file.

python eval/studies/parallel/parallel_tables.py eval/results/parallel.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from parallel_study import WAYS

Row = dict[str, Any]
HEADS = (
    "way",
    "processes",
    "seconds per step",
    "tokens per second",
    "MiB per process",
    "loss, greatest difference",
)


def difference(row: Row, alone: Row) -> str:
    """The greatest difference of a step's loss from that of one process."""
    pairs = zip(row["losses"], alone["losses"], strict=True)
    return f"{max(abs(ours - theirs) for ours, theirs in pairs):.1e}"


def ways_table(rows: list[Row]) -> str:
    """A line for every way that has run."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    (alone,) = (row for row in rows if row.get("way") == "one process" and "failed" not in row)
    ways = [row for row in rows if "way" in row]
    for row in sorted(ways, key=lambda row: ([*WAYS].index(row["way"]), row["processes"])):
        name, count = row["way"], str(row["processes"])
        if "failed" in row:
            cells = [name, count, "failed", "–", "–", "–"]
        else:
            apart = "–" if row is alone else difference(row, alone)
            cells = [name, count, f"{row['step']:.2f}", f"{row['tokens']:,}", f"{row['memory']:,}", apart]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def longest_table(rows: list[Row]) -> str:
    """The longest row, by processes."""
    lines = ["| processes | MiB each | longest row trained | the next |", "|---|---|---|---|"]
    for row in rows:
        if "longest" in row:
            ended = "out of memory" if "memory" in row["ended"] else row["ended"]
            lines.append(f"| {row['longest']} | {row['room']} | {row['length']:,} tokens | {ended} |")
    return "\n".join(lines)


def killed_table(result: Row) -> str:
    """The deaths of a run, and how far its weights are from those of the run that nobody killed."""
    lines = ["| killed at step | who | the others ended after |", "|---|---|---|"]
    for kill in result["kills"]:
        lines.append(f"| {kill['step']} | {kill['killed']} | {kill['seconds to the end']} s |")
    apart = "equal to the bit" if result["equal to the bit"] else result["greatest difference of a weight"]
    return "\n".join([*lines, "", f"After {result['steps']} steps the weights are: {apart}."])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path)
    found = json.loads(parser.parse_args().results.read_text(encoding="utf-8"))["rows"]
    print(f"{ways_table(found)}\n\n{longest_table(found)}")
