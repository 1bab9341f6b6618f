"""The table of `distil_study.py`, from its file; docs/tables.py writes it."""

from __future__ import annotations

from distil_study import DISTILLED, FLOOR, OWN, TEACHER, UNTRAINED
from study import Row, by_case, excess, signed

from ropepatch.evaluation.intervals import Mean
from ropepatch.report.printers import markdown_rows

HEADS = (
    "trained on",
    "loss, learning rate",
    "above its own window",
    "of what the scaling leaves",
    "first L",
    "last quarter",
    "steps, seconds",
)


def line(row: Row, own: Row, untrained: Row | None) -> list[str]:
    """A row of the table."""
    if row["of"] == "trial":
        place = "skipped positions" if row["skipped"] else "rows of the target"
        seed = f", seed {row['seed']}" if row["seed"] else ""
        warmth = f" at T = {row['temperature']:g}" if row["loss"] == DISTILLED else ""
        what, loss = (
            f"{row['rows']}, {place}, {row['method']}{seed}",
            f"{row['loss']}{warmth}, {row['learning_rate']:g}",
        )
        cost = f"{row['steps']}, {row['seconds']:.0f}"
    else:
        names = {TEACHER: "– (the base under the teacher's map)", UNTRAINED: f"– ({row.get('method')})"}
        what, loss, cost = names[row["of"]], "–", "–"
    share = "–" if untrained is None else f"{excess(row, own).value / excess(untrained, own).value:.0%}"
    spans = [signed(excess(row, own, span)) for span in ("all", "short", "last")]
    cells = [what, loss, spans[0], share, *spans[1:], cost]
    if own["of"] == FLOOR:
        cells[2] += f", {excess(row, own).value / Mean.of(own['all']).value:.1%}"
    return cells


def distil_table(rows: list[Row]) -> str:
    """For each checkpoint and factor, the trainings by what is left of the excess."""
    blocks = []
    for (model, factor, target), here in by_case(rows).items():
        (own,) = (row for row in here if row["of"] in (OWN, FLOOR))
        untrained = {row["method"]: row for row in here if row["of"] == UNTRAINED}
        others = sorted((row for row in here if row is not own), key=lambda row: excess(row, own).value)
        least, heads = "through its own window", list(HEADS)
        if own["of"] == FLOOR:
            least, heads = "the floor is", [*HEADS[:2], "above the floor", *HEADS[3:]]
        title = (
            f"**{model}, {target // factor:,} to {target:,} tokens**: {least} "
            f"{Mean.of(own['all']).value:.4f} nats per token; {len(own['all'])} windows."
        )
        lines = [line(row, own, untrained.get(row.get("method", "yarn"))) for row in others]
        blocks.append(f"{title}\n\n{markdown_rows(heads, lines)}")
    return "\n\n".join(blocks)
