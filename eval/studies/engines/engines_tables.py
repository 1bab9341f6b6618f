"""The tables of what real servers were found to compute."""

from __future__ import annotations

import re
from typing import Any

from ropepatch.model.reading_file import RIGHT
from ropepatch.probing.judging import UNDECIDED, WORDS
from ropepatch.report.printers import markdown_rows

Rows = list[dict[str, Any]]
LARGEST = re.compile(r"largest (\S+) nats beyond the old window")


def probed_table(rows: Rows) -> str:
    """Each saved rope by engine: what `probe` says of it, and how many wrong ones it named."""
    engines = list(dict.fromkeys((row["engine"], row["version"]) for row in rows))
    table = []
    for case in dict.fromkeys(row["case"] for row in rows):
        cells = []
        for engine in engines:
            own = [row for row in rows if row["case"] == case and (row["engine"], row["version"]) == engine]
            right = [row for row in own if row["served"] == RIGHT]
            wrong = [row["verdict"] == row["served"] for row in own if row["served"] != RIGHT]
            cells.append(f"{_found(right[0])}; {sum(wrong)} of {len(wrong)}" if right else "not asked")
        table.append((case, *cells))
    return markdown_rows(("saved as", *(" ".join(engine) for engine in engines)), table)


def in_short(rows: Rows) -> str:
    """How many of the saved ropes each engine computes, and the largest divergence, in a sentence."""
    engines = []
    read = [
        row for row in rows if row["engine"] != "llama.cpp"
    ]  # which was given the frequencies as a tensor
    for engine in dict.fromkeys((row["engine"], row["version"]) for row in read):
        own = [row for row in rows if (row["engine"], row["version"]) == engine and row["served"] == RIGHT]
        right = [row for row in own if row["verdict"] == RIGHT]
        largest = max((LARGEST.findall(row["why"])[0] for row in right), key=float)
        undecided = sum(row["verdict"] == UNDECIDED for row in own)
        left = f"; {undecided} undecided" if undecided else ""
        engines.append(f"{' '.join(engine)} {len(right)} of {len(own)} ({largest} nats{left})")
    return (
        "Written once, read the same: of the saved ropes of `tiny` that were probed on a CPU, each computes "
        f"as transformers does (largest divergence beyond the old window): {', '.join(engines)}."
    )


def trainers_table(rows: Rows) -> str:
    """Count, by the way of loading, the checkpoints whose verdict is right."""
    ways: dict[tuple[str, str], Rows] = {}
    for row in rows:
        ways.setdefault((row["engine"], row["version"]), []).append(row)
    table = [
        (*way, f"{sum(row['verdict'] == row['served'] for row in own)} of {len(own)}")
        for way, own in ways.items()
    ]
    return markdown_rows(("loaded by", "version", "named rightly"), table)


def _found(row: dict[str, Any]) -> str:
    if row["verdict"] is None:
        return "no answer"
    nats = "" if row["beyond"] is None else f" ({row['beyond']:.0e} nats)"
    return WORDS.get(row["verdict"], row["verdict"]).partition(":")[0] + nats
