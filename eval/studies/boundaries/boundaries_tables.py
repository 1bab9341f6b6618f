"""The table of `boundaries_study.py`, from its file; docs/tables.py writes it."""

from __future__ import annotations

from boundaries_study import JOINED, LONG, UNTRAINED
from study import Row, by_case, excess, signed

from ropepatch.evaluation.intervals import Mean
from ropepatch.report.printers import markdown_rows

SPANS = {"all": "whole", "short": "first L", "last": "last quarter"}
READ = {JOINED: "joined documents", LONG: "one document"}


def boundaries_table(rows: list[Row]) -> str:
    """The loss after either training, and what not masking changes, paired by document, seed by seed."""
    heads = ["read on", "tokens", "untrained", "masked", "not masked", "not masked less masked, by seed"]
    blocks = []
    for (model, factor, target), here in by_case(rows).items():
        trained = {(row["boundaries"], row["seed"]): row for row in here if row["boundaries"] != UNTRAINED}
        seeds = [seed for (masked, seed) in trained if masked and (False, seed) in trained]
        (before,) = (row for row in here if row["boundaries"] == UNTRAINED)
        lines = []
        for read, shown in READ.items():
            for span, named in SPANS.items():
                losses = [
                    sum(Mean.of(trained[masked, seed][read][span]).value for seed in seeds) / len(seeds)
                    for masked in (True, False)
                ]
                changed = "; ".join(
                    signed(excess(trained[False, seed][read], trained[True, seed][read], span))
                    for seed in seeds
                )
                values = [Mean.of(before[read][span]).value, *losses]
                lines.append([shown, named, *(f"{value:.4f}" for value in values), changed])
        title = f"**{model}, {target // factor:,} to {target:,} tokens**, {len(seeds)} seeds"
        blocks.append(f"{title}\n\n{markdown_rows(heads, lines)}")
    return "\n\n".join(blocks)
