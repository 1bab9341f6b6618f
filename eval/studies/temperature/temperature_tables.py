"""The tables of `temperature_study.py`, from its file; docs/tables.py writes them."""

from __future__ import annotations

from study import Row, by_case, counted, excess, signed
from temperature_study import BETAS, half, picked

from ropepatch.evaluation.intervals import Mean, difference
from ropepatch.report.printers import markdown_rows


def later(row: Row, base: Row, span: str) -> str:
    """A difference over the second half of the documents, which chose nothing."""
    return signed(difference(half(row, span, first=False), half(base, span, first=False)))


def picked_table(rows: list[Row]) -> str:
    """For each checkpoint and scaling the best constant and the best pair, and what the pair changes."""
    heads = ["scaling", "c alone", "loss", "c, β", "the pair less c alone: all", "first L", "last quarter"]
    heads += ["keys by c alone", "by the pair"]
    blocks = []
    for (model, factor, target), here in by_case(rows).items():
        lines = []
        for method in dict.fromkeys(row["method"] for row in here):
            losses = [row for row in here if row["kind"] == "loss" and row["method"] == method]
            alone, pair = picked(losses)
            keys = {
                (row["constant"], row["beta"]): counted(Mean.of(row["keys"], share=True))
                for row in here
                if row["kind"] == "keys" and row["method"] == method
            }
            found = [keys.get((row["constant"], row["beta"]), "–") for row in (alone, pair)]
            spans = ("all", "short", "last")
            changed = [later(pair, alone, span) if pair is not alone else "the same" for span in spans]
            named = [f"{alone['constant']:g}", f"{half(alone, 'all', first=False).value:.4f}"]
            lines.append([f"`{method}`", *named, f"{pair['constant']:g}, {pair['beta']:g}", *changed, *found])
        count = len(here[0]["all"])
        title = f"**{model}, {target // factor:,} to {target:,} tokens**, {count} documents"
        blocks.append(f"{title}\n\n{markdown_rows(heads, lines)}")
    return "\n\n".join(blocks)


def growth_table(rows: list[Row]) -> str:
    """What a constant changes, and what the growth changes beside it, over all documents."""
    heads = [
        "checkpoint",
        "scaling",
        "c",
        "c less c = 1",
        *(f"β = {beta:g} less β = 0" for beta in BETAS[1:]),
    ]
    lines = []
    for (model, factor, _), here in by_case(rows).items():
        for method in dict.fromkeys(row["method"] for row in here):
            losses = [row for row in here if row["kind"] == "loss" and row["method"] == method]
            by = {(row["constant"], row["beta"]): row for row in losses}
            for constant in sorted({row["constant"] for row in losses}):
                alone = by[constant, 0.0]
                pairs = [(alone, by[1.0, 0.0]), *((by[constant, beta], alone) for beta in BETAS[1:])]
                cells = [signed(excess(row, base)) for row, base in pairs]
                lines.append([f"{model}, {factor} x", f"`{method}`", f"{constant:g}", *cells])
    return markdown_rows(heads, lines)
