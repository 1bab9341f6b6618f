"""The tables of `parallel_study.py` and of `killed_together.py`; docs/tables.py writes them into the page."""

from __future__ import annotations

from typing import Any

from parallel_study import WAYS

from ropepatch.report.printers import markdown_rows

Row = dict[str, Any]
HEADS = ("way", "processes", "MiB per process", "loss, greatest difference")


def difference(row: Row, alone: Row) -> str:
    """The greatest difference of a step's loss from that of one process."""
    pairs = zip(row["losses"], alone["losses"], strict=True)
    return f"{max(abs(ours - theirs) for ours, theirs in pairs):.1e}"


def ways_table(rows: list[Row]) -> str:
    """A line for every way that has run."""
    (alone,) = (row for row in rows if row["way"] == "one process")
    lines = [
        (
            row["way"],
            str(row["processes"]),
            f"{row['memory']:,}",
            "–" if row is alone else difference(row, alone),
        )
        for row in sorted(rows, key=lambda row: ([*WAYS].index(row["way"]), row["processes"]))
    ]
    return markdown_rows(HEADS, lines)


def killed_table(result: Row) -> str:
    """The deaths of a run, and how far its weights are from those of the run that nobody killed."""
    heads = "killed at step", "who", "the others ended after"
    lines = [
        (str(kill["step"]), kill["killed"], f"{kill['seconds to the end']} s") for kill in result["kills"]
    ]
    apart = "equal to the bit" if result["equal to the bit"] else result["greatest difference of a weight"]
    table = markdown_rows(heads, lines)
    return f"{table}\n\nAfter {result['steps']} steps the weights are: {apart}."
