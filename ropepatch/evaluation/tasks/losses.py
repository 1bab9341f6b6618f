"""Losses as cells, tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from ropepatch.evaluation.comparisons import Comparison, training_free
from ropepatch.evaluation.curves import difference
from ropepatch.evaluation.results import Row, document_sums, mean_nats
from ropepatch.evaluation.table import MISSING, Cell, Table


def nats_cell(row: Row) -> Cell:
    """The mean loss with its interval."""
    return Cell(f"{row['nats']:.3f}", _interval(row, "{:.3f}".format), float(row["nats"]))


def perplexity_cell(row: Row) -> Cell:
    """The perplexity with its interval."""
    return Cell(perplexity_text(row["nats"]), _interval(row, perplexity_text), float(row["nats"]))


def perplexity_text(nats: float) -> str:
    """exp(nats) as it is read: 1.702, 29.41, 1734, 1.3e6; ∞ where no number holds it."""
    if nats < math.log(1e4):
        value = math.exp(nats)
        return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.0f}"
    return f"{math.exp(nats):.1e}".replace("e+0", "e").replace("e+", "e") if nats < 700 else "∞"


def _interval(row: Row, text: Callable[[float], str]) -> str:
    low, high = row.get("interval") or (None, None)
    return "" if low is None or high is None else f"{text(low)} to {text(high)}"


def stretch_table(
    comparison: Comparison, caption: str, table: str, spans: Sequence[tuple[int, int]]
) -> Table:
    """The mean of a table by position, over longer stretches."""

    def cell(rows: Sequence[Row], begin: int, end: int) -> Cell:
        within = [row for row in rows if begin <= row["begin"] and row["end"] <= end]
        return Cell(f"{mean_nats(within):.3f}", value=mean_nats(within)) if within else MISSING

    rows = [
        [Cell(name, value=name), *(cell(result.tables[table], *span) for span in spans)]
        for name, result in comparison.named().items()
        if table in result.tables
    ]
    return Table(caption, [("Method", ""), *((f"{begin:,} to {end:,}", "") for begin, end in spans)], rows)


def training_sentences(comparison: Comparison) -> Iterator[str]:
    """What every adaptation brought, document by document, where the results say it."""
    results = comparison.results
    for name, result in results.items():
        before = training_free(results, result) if result.adapted else None
        if before is None or any("by_document" not in results[k].tables for k in (name, before)):
            continue
        first, then = (document_sums(results[k]) for k in (before, name))
        if then.num_documents < 2:
            continue
        gain, (low, high) = difference(first, then)
        verdict = "" if low > 0 else ": it does harm" if high < 0 else ", which may be nothing"
        yield (
            f"By its training {name} gains {gain:+.3f} nats per token over {before} "
            f"(95 % interval {low:+.3f} to {high:+.3f}){verdict}."
        )
