"""Position remappings next to published formulas, training-free: excess loss and passkeys.

    python eval/studies/remappings/remappings_study.py [--only "model=tiny,factor=4"]

Each model runs on windows of factor x L tokens in one pass: unscaled, scaled, and remapped. The table
subtracts the loss of the base model with a sliding window of its original length L (stride L/2). Passkeys
are measured at the target length where the model retrieves any.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ropepatch
from ropepatch.attention import REMAPPINGS
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.results import BASELINE
from ropepatch.report.printers import markdown_rows

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from study import (
    KEYS,
    OWN,
    Row,
    Study,
    by,
    by_case,
    checkpoint,
    counted,
    excess,
    first,
    share,
    signed,
    table,
)

FORMULAS = ("linear", "ntk", "yarn", "llama3", "giraffe-power")
LOG_N = " with log_n"  # a suffix of remappings: scores grow with the logarithm of the position
METHODS = (OWN, BASELINE, *FORMULAS, *REMAPPINGS, f"rerope{LOG_N}", f"dca{LOG_N}")
CASES = (("tiny", 4), ("tiny", 8), ("babyllama-361", 4), ("stories-260k", 4))


def cases(given: Namespace) -> Iterator[Row]:
    """The measurements of each checkpoint; only tiny retrieves passkeys."""
    for name, factor in CASES:
        for kind in ("loss", "passkey") if name == "tiny" else ("loss",):
            for method in METHODS if kind == "loss" else METHODS[1:]:
                yield checkpoint(name, factor).named | {"kind": kind, "method": method}


def measure(case: Row, given: Namespace) -> Row:
    """The losses or the passkey accuracy under a method; or the error of a method that cannot be applied."""
    place, method = checkpoint(case["model"], case["factor"]), case["method"]
    model, tokenizer = place.loaded
    if method == OWN:
        return {"settings": None} | place.through_own_window()
    options = {"log_n": True} if LOG_N in method else {}
    name = method.removesuffix(LOG_N)
    try:
        baseline = method == BASELINE
        patch = (
            nullcontext()
            if baseline
            else ropepatch.patch(model, name, to=case["target"], **options)
        )
        with patch as handle:
            settings = {
                "settings": handle.distances.described() if name in REMAPPINGS else None
            }
            if case["kind"] == "loss":
                return settings | place.losses(model)
            answers = ropepatch.passkey(
                model, tokenizer, lengths=[case["target"]], haystacks=KEYS
            )
            found = answers.found(case["target"]).clusters
            return settings | {
                "correct": sum(int(one) for one, _ in found),
                "n": len(found),
            }
    except RopepatchError as error:
        return {"settings": None, "refused": str(error)}


STUDY = Study(name="position-remappings", about=__doc__, cases=cases, measure=measure)


# The tables, for docs/tables.py


def remappings_table(rows: list[Row]) -> str:
    """A table for each checkpoint and factor: the methods by excess loss."""
    return "\n\n".join(block(*case, here) for case, here in by_case(rows).items())


def block(model: str, factor: int, target: int, rows: list[Row]) -> str:
    """The table of a checkpoint and factor, between its reference and the errors."""
    losses = {row["method"]: row for row in rows if "digest" in row}
    base = losses.pop(OWN)
    keys = {
        row["method"]: counted(share(row["correct"], row["n"]))
        for row in rows
        if "n" in row
    }
    columns = {
        "method": lambda row: row["method"],
        "settings": lambda row: row["settings"] or "–",
        "excess loss": lambda row: signed(excess(row, base)),
        "excess loss, first L tokens": lambda row: signed(excess(row, base, "short")),
        "passkey accuracy at the target": lambda row: keys.get(row["method"], "–"),
    }
    head = (
        f"**{model}, {target // factor:,} to {target:,} tokens**: the base model within its original "
        f"length has a loss of {Mean.of(base['all']).value:.4f} nats/token; n = {len(base['all'])} documents."
    )
    ordered = sorted(losses.values(), key=lambda row: excess(row, base).value)
    refused = {
        row["method"]: f"\n\nRefused: {row['refused']}."
        for row in rows
        if "refused" in row
    }
    return f"{head}\n\n{table(ordered, columns)}{''.join(refused.values())}"


SHORT = (
    BASELINE,
    "yarn",
    "llama3",
    "self-extend",
    "rerope",
    "leaky-rerope",
    "dca",
    "lampe",
    "lambda",
)


def short_table(rows: list[Row]) -> str:
    """The excess loss and the passkey accuracy of each method, by checkpoint."""
    cases = by_case(rows)
    heads = [
        f"{model}, {factor} x"
        + ", passkeys" * any(row["kind"] == "passkey" for row in here)
        for (model, factor, _), here in cases.items()
    ]

    def cell(here: list[Row], method: str) -> str:
        own, base = (first(here, kind="loss", method=name) for name in (method, OWN))
        keys = first(here, kind="passkey", method=method)
        loss = (
            f"{excess(own, base).value:+.3f}"
            if own and base and "digest" in own
            else "–"
        )
        return (
            f"{loss}, {keys['correct']}/{keys['n']}" if keys and "n" in keys else loss
        )

    lines = [
        [
            f"`{name}`" if name != BASELINE else name,
            *(cell(here, name) for here in cases.values()),
        ]
        for name in SHORT
    ]
    return markdown_rows(["", *heads], lines)


def cost_table(rows: list[Row]) -> str:
    """The table of `eval/benchmarks/attention_cost.py`: ratios to stock SDPA, and memory."""

    def ratio(kind: str) -> Any:
        form = "{median:.2f} ({min:.2f} to {max:.2f})"
        return lambda row: (
            form.format(**row[kind]["ratio"]) if kind in row else "does not fit"
        )

    columns = {
        "remapping": lambda row: row["map"],
        "tokens": lambda row: f"{row['tokens']:,}",
    }
    columns |= {
        head: ratio(head.split()[0])
        for head in ("prefill", "decode step", "training step")
    }
    columns["memory"] = lambda row: (
        f"{row['training_mib']:.0f} MiB" if "training_mib" in row else "–"
    )
    own = by(rows, "device")
    heads = {("cuda",): "On a GPU, in bfloat16:\n\n"}
    return "\n\n".join(
        heads.get(device, "") + table(here, columns) for device, here in own.items()
    )


if __name__ == "__main__":
    STUDY.main()
