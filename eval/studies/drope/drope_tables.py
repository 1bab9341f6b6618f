"""The table of `drope_study.py`, from its file; docs/tables.py writes it."""

from __future__ import annotations

from drope_study import ALL, SOME, TEXT
from study import Row, by_case, counted, excess

from ropepatch.evaluation.intervals import Mean
from ropepatch.report.printers import markdown_rows

SPANS = ("short", "2 L", "4 L")
NAMES = {ALL: "dropped", SOME: "dropped on every second layer, others YaRN"}


def cell(row: Row, span: str) -> str:
    """Nats per token with the interval over documents."""
    mean = Mean.of(row[span])
    low, high = mean.interval()
    return f"{mean.value:.3f} [{low:.3f}, {high:.3f}]"


def above(row: Row, base: Row) -> str:
    """By how much the loss within L is above the base's, paired by document, as a share of it."""
    change, loss = excess(row, base, "short"), Mean.of(base["short"]).value
    low, high = change.interval()
    return f"{change.value / loss:+.1%} [{low / loss:+.1%}, {high / loss:+.1%}]"


def drope_table(rows: list[Row]) -> str:
    """For each checkpoint the base and every training, by the layers without rope and the tokens read."""
    heads = ["rope", "trained by", "tokens, M (steps x rows)", "learning rate", "first L above the base's"]
    heads += ["nats to L", "L to 2 L", "2 L to 4 L", "minutes"]
    blocks = []
    for (model, factor, target), here in by_case(rows).items():
        length = target // factor
        (base,) = (row for row in here if row["of"] == "base")
        asked = "keys" in base
        lines = []
        for row in [base, *sorted((row for row in here if row["of"] == "trial"), key=order)]:
            named = ["as trained", "–", "–", "–", "–"]
            if row["of"] == "trial":
                named = [NAMES.get(row["without"], "YaRN"), "–", "0", "–", above(row, base)]
            if row.get("steps"):
                rate = f"{row['learning_rate']:g}"
                read = f"{row['tokens'] / 1e6:.1f} ({row['steps']} x {row['rows']})"
                named[1:4] = [row["loss"], read, rate]
            minutes = f"{row['seconds'] / 60:.0f}" if row.get("seconds") else "–"
            found = [counted(Mean.of(one, share=True)) for one in row["keys"].values()] if asked else []
            lines.append([*named, *(cell(row, span) for span in SPANS), minutes, *found])
        keys = [f"keys at {length * times:,}" for times in (1, 2, 4)] if asked else []
        title = f"**{model}, trained on {length:,} tokens**, {len(base['short'])} documents"
        blocks.append(f"{title}\n\n{markdown_rows(heads + keys, lines)}")
    return "\n\n".join(blocks)


def order(row: Row) -> tuple[int, int, int, int, float]:
    """Dropped on all layers first; by the loss, then by what was read."""
    layers = (ALL, SOME).index(row["without"]) if row["without"] in (ALL, SOME) else 2
    return layers, int(row["loss"] != TEXT), row.get("tokens") or 0, row["rows"], row["learning_rate"]
