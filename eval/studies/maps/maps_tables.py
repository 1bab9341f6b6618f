"""The tables of `maps_study.py`, from its result file; docs/tables.py writes them into the pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from maps_study import OWN
from study import Row, by_case, counted, excess, signed

from ropepatch.evaluation.comparisons import BASELINE
from ropepatch.evaluation.intervals import Mean
from ropepatch.report.printers import markdown_rows

HEADS = ("method", "settings", "excess", "first L", "passkeys at the target")


def of(rows: Iterable[Row], method: str, kind: str) -> Row | None:
    """The row of one method, if it was measured."""
    mine = (row for row in rows if (row["method"], row["kind"]) == (method, kind) and "refused" not in row)
    return next(mine, None)


def found(row: Row | None) -> str:
    """How many keys were found of how many, with the interval; each stood in a haystack of its own."""
    if row is None:
        return "–"
    correct, n = row["correct"], row["n"]
    return counted(Mean.of([(1, 1)] * correct + [(0, 1)] * (n - correct), share=True))


def cells(rows: list[Row], method: str) -> Iterator[str]:
    """A row of the table."""
    read, base = of(rows, method, "loss"), of(rows, OWN, "loss")
    assert read is not None
    assert base is not None
    yield method
    yield read["settings"] or "–"
    yield from (signed(excess(read, base, span)) for span in ("all", "short"))
    yield found(of(rows, method, "passkey"))


def maps_table(rows: list[Row]) -> str:
    """For each checkpoint and factor, the methods by what they add to the loss through the own window."""
    blocks = []
    for (model, factor, target), here in by_case(rows).items():
        base = of(here, OWN, "loss")
        assert base is not None
        read = {row["method"]: row for row in here if row["method"] != OWN and "digest" in row}
        ordered = sorted(read, key=lambda name: excess(read[name], base).value)
        lines = [
            f"**{model}, {target // factor:,} to {target:,} tokens**: through its own window "
            f"{Mean.of(base['all']).value:.4f} nats per token; {len(base['all'])} windows.",
            "",
            markdown_rows(HEADS, [list(cells(here, name)) for name in ordered]),
        ]
        refused = {row["method"]: row["refused"] for row in here if "refused" in row}
        lines += [f"\nRefused: {refusal}." for refusal in refused.values()]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


SHORT = (BASELINE, "yarn", "llama3", "self-extend", "rerope", "leaky-rerope", "dca", "lampe", "lambda")


def short_table(rows: list[Row]) -> str:
    """What each method adds to the loss through the own window, and the passkeys, by checkpoint."""
    cases = by_case(rows)
    asked = {case for case, here in cases.items() if any(row["kind"] == "passkey" for row in here)}
    heads = [f"{case[0]}, {case[1]} x{', keys' * (case in asked)}" for case in cases]
    lines = []
    for method in SHORT:
        line = [f"`{method}`" if method != BASELINE else method]
        for here in cases.values():
            read, base, keys = of(here, method, "loss"), of(here, OWN, "loss"), of(here, method, "passkey")
            loss = f"{excess(read, base).value:+.3f}" if read and base else "–"
            line.append(f"{loss}, {keys['correct']}/{keys['n']}" if keys else loss)
        lines.append(line)
    return markdown_rows(["", *heads], lines)


def cost_table(result: dict[str, Any]) -> str:
    """Of `eval/benchmarks/attention_cost.py`: ratios to stock sdpa, and the memory of a training step."""
    heads = ("map", "tokens", "prefill", "decode step", "training step", "memory")
    lines = []
    for cell in result["cells"]:
        ratios = (cell[kind]["ratio"] for kind in ("prefill", "decode", "training"))
        shown = [f"{one['median']:.2f} ({one['min']:.2f} to {one['max']:.2f})" for one in ratios]
        lines.append([cell["map"], f"{cell['tokens']:,}", *shown, f"{cell['training_mib']:.0f} MiB"])
    return markdown_rows(heads, lines)
