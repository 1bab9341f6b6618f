"""The tables of `parallel_study.py`, from its result file.

python eval/studies/parallel/parallel_tables.py eval/results/parallel.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from parallel_study import WAYS

from ropepatch.training.estimates import GIB, SHAPES, estimate_gpu, longest_row
from ropepatch.training.recipe import Recipe

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


MODEL, GPUS, ROOM = "meta-llama/Llama-3.1-8B", 8, 80e9 / GIB  # GiB of a GPU of 80 GB
LENGTHS = (128 * 1024, 256 * 1024, 1024 * 1024)
PUBLISHED = {  # tokens of a row, of an 8B model on 8 H100: arXiv:2506.13996 and TRL's documentation
    "ALST, with a tiled MLP and offload": 3_700_000,
    "TRL, context parallelism with FSDP2": 300_000,
}


def shared_recipe(*, lora: bool) -> Recipe:
    """A recipe for rows that all GPUs share."""
    return Recipe.model_validate(
        {
            "model": MODEL,
            "to": "8x",
            "data": {"sources": [{"text": "x"}], "windows": ["1x"], "tokens_per_batch": "1x"},
            "positions": "true-length",
            "lora": {"train_norms": False} if lora else None,
            "trainer": {"max_steps": 1, "learning_rate": 1e-4, "bf16": True},
            "gradient_checkpointing": True,
            "parallel": {"sequence": GPUS},
        }
    )


def estimates_table() -> str:
    """Memory of a GPU and time of a row, for rows that 8 GPUs of 80 GB share."""
    heads = ("tokens", "trained", "weights", "optimiser", "activations", "exchange", "GiB per GPU", "row")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for lora in (True, False):
        for tokens in LENGTHS:
            cost = estimate_gpu(shared_recipe(lora=lora), SHAPES[MODEL], tokens, GPUS)
            parts = (cost.weights_gib, cost.optimizer_gib, cost.activations_gib, cost.exchange_gib)
            fits = "" if cost.total_gib <= ROOM else " (too much)"
            cells = [f"{tokens:,}", "adapter" if lora else "all weights", *(f"{part:.1f}" for part in parts)]
            lines.append(f"| {' | '.join(cells)} | {cost.total_gib:.1f}{fits} | {cost.seconds:,.0f} s |")
    return "\n".join(lines)


def published_table() -> str:
    """The longest row that is estimated to fit, over those that others have published."""
    lines = ["| published | tokens | ours, all weights | ratio |", "|---|---|---|---|"]
    ours = longest_row(shared_recipe(lora=False), SHAPES[MODEL], GPUS, ROOM)
    for name, tokens in PUBLISHED.items():
        lines.append(f"| {name} | {tokens:,} | {ours:,} | {ours / tokens:.2f} |")
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
