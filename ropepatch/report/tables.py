"""The tables of a report."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from ropepatch.settings import short_length

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ropepatch.evaluation.comparisons import Comparison
    from ropepatch.evaluation.results import Row


class Cell(NamedTuple):
    """One value.

    Args:
        text: What is read.
        detail: What stands below it, smaller.
        value: By which a column is sorted; None comes last.
        best: Whether it is the best of its column.
    """

    text: str
    detail: str = ""
    value: float | str | None = None
    best: bool = False


MISSING = Cell("–")


class Table(NamedTuple):
    """Cells below heads.

    Args:
        caption: What it shows.
        heads: The name of each column and what stands below it.
        rows: Their first `labels` cells say what they are about.
        labels: How many those are.
    """

    caption: str
    heads: list[tuple[str, str]]
    rows: list[list[Cell]]
    labels: int = 1


def loss_table(comparison: Comparison) -> Table:
    """Nats per token by length."""
    return _by_length(comparison, "Nats per token", nats_cell)


def perplexity_table(comparison: Comparison) -> Table:
    """Perplexity by length."""
    return _by_length(comparison, "Perplexity", perplexity_cell)


def passkey_table(comparison: Comparison) -> Table:
    """Pass keys found by length, all depths together."""
    return _by_length(comparison, "Pass keys found", keys_cell)


def scores_table(comparison: Comparison) -> Table:
    """Scores of lm-eval, a row per task and metric."""
    found = {
        name: {(row["task"], row["metric"]): row for row in rows}
        for name, rows in comparison.rows("scores").items()
    }
    keys = list(dict.fromkeys(key for rows in found.values() for key in rows))
    heads = [("Task", ""), ("Metric", ""), *((name, "± standard error") for name in found)]
    rows = [
        [
            *(Cell(part, value=part) for part in key),
            *(score_cell(rows[key]) if key in rows else MISSING for rows in found.values()),
        ]
        for key in keys
    ]
    return Table("Scores", heads, rows, labels=2)


def summary_table(places: Sequence[Sequence[Comparison]], variants: Mapping[int, str]) -> Table:
    """Every model, target and method in one row: the loss over the whole target, and the keys found there.

    Args:
        places: The comparisons of each model and target.
        variants: What sets a comparison apart from others of its task, by its `id`.
    """
    columns: dict[tuple[str, str], tuple[str, str]] = {}
    lines: list[tuple[list[Cell], dict[tuple[str, str], Cell]]] = []
    for groups in places:
        names = list(dict.fromkeys(name for group in groups for name in group.results))
        found: dict[str, dict[tuple[str, str], Cell]] = {name: {} for name in names}
        for group in groups:
            for head, cells in _outcomes(group):
                key = (head, variants[id(group)])
                columns[key] = key
                for name, cell in cells.items():
                    found[name][key] = cell
        labels = [
            Cell(groups[0].model, value=groups[0].model),
            Cell(short_length(groups[0].target), value=groups[0].target),
        ]
        lines += [([*labels, Cell(name, value=name)], cells) for name, cells in found.items()]
    kept = [len(places) > 1 and len({line[0][k].text for line in lines}) > 1 for k in (0, 1)] + [True]
    heads = [head for head, keep in zip(("Model", "Target", "Method"), kept, strict=True) if keep]
    rows = [
        [
            *(cell for cell, keep in zip(label, kept, strict=True) if keep),
            *(cells.get(key, MISSING) for key in columns),
        ]
        for label, cells in lines
    ]
    return Table("The outcome at the target", [*((head, "") for head in heads), *columns], rows, sum(kept))


def _outcomes(group: Comparison) -> list[tuple[str, dict[str, Cell]]]:
    """The columns that a comparison adds to the summary."""
    lengths = group.lengths()
    if not lengths:
        return []
    rows = group.at(lengths[-1])
    if group.task == "perplexity":
        return [
            ("Nats per token", _marked(rows, nats_cell)),
            ("Perplexity", _marked(rows, perplexity_cell)),
        ]
    effective = {name: effective_cell(table[0]) for name, table in group.rows("effective_length").items()}
    columns = [("Pass keys", _marked(rows, keys_cell))]
    return [*columns, ("Effective length", effective)] if effective else columns


def _by_length(comparison: Comparison, caption: str, cell: Callable[[Row], Cell]) -> Table:
    lengths = comparison.lengths()
    columns = {length: _marked(comparison.at(length), cell) for length in lengths}
    floor = {} if comparison.floor is None else comparison.floor.tables
    bounds = {row["length"]: cell(row)._replace(detail="") for row in floor.get("by_length", ())}
    rows = [
        [Cell(name, value=name), *(columns[length].get(name, MISSING) for length in lengths)]
        for name in comparison.results
    ]
    if bounds:
        rows.append([Cell("floor", value="floor"), *(bounds.get(length, MISSING) for length in lengths)])
    return Table(caption, [("Method", ""), *((short_length(length), "tokens") for length in lengths)], rows)


def _marked(rows: Mapping[str, Row], cell: Callable[[Row], Cell]) -> dict[str, Cell]:
    """The cells, with the best of several marked."""
    cells = {name: cell(row) for name, row in rows.items()}
    values = [cell.value for cell in cells.values() if isinstance(cell.value, float)]
    best = (max if cell is keys_cell else min)(values, default=None)
    if best is None or values.count(best) == len(values):
        return cells
    return {name: cell._replace(best=cell.value == best) for name, cell in cells.items()}


def nats_cell(row: Row) -> Cell:
    """The mean loss with its interval."""
    low, high = row.get("interval") or (None, None)
    detail = "" if low is None or high is None else f"{low:.3f} to {high:.3f}"
    return Cell(f"{row['nats']:.3f}", detail, float(row["nats"]))


def perplexity_cell(row: Row) -> Cell:
    """The perplexity with its interval."""
    low, high = row.get("interval") or (None, None)
    detail = "" if low is None or high is None else f"{perplexity(low)} to {perplexity(high)}"
    return Cell(perplexity(row["nats"]), detail, float(row["nats"]))


def keys_cell(row: Row) -> Cell:
    """The keys found of those asked for, with the interval of the share."""
    low, high = row["interval"]
    return Cell(f"{row['correct']}/{row['n']}", f"{low:.0%} to {high:.0%}", row["correct"] / row["n"])


def effective_cell(row: Row) -> Cell:
    """The greatest length that was read well enough."""
    length = row["length"]
    return Cell(short_length(length), value=float(length)) if length else Cell("none", value=0.0)


def score_cell(row: Row) -> Cell:
    """A score with its standard error."""
    error = row.get("stderr")
    return Cell(
        f"{row['value']:.4g}", f"± {error:.2g}" if isinstance(error, int | float) else "", float(row["value"])
    )


def perplexity(nats: float) -> str:
    """exp(nats) as it is read: 1.70, 29.4, 1.3e6."""
    if nats < math.log(1e4):
        value = math.exp(nats)
        return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.0f}"
    return f"{math.exp(nats):.1e}".replace("e+0", "e").replace("e+", "e") if nats < 700 else "∞"
