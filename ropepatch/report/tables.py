"""The tables of results and of a ranking, as data that terminal, report, cards and notebooks print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ropepatch.evaluation.comparisons import FLOOR, Comparison, by_place, comparisons
from ropepatch.evaluation.ranking import Ranked, Ranking
from ropepatch.evaluation.results import Result
from ropepatch.evaluation.table import MISSING, Cell, Table
from ropepatch.evaluation.tasks import task_of
from ropepatch.report.words import variants
from ropepatch.settings import short_length


def results_tables(results: Sequence[Result]) -> list[Table]:
    """The outcome at the target, where there is one, and the tables of every comparison."""
    places = by_place(comparisons(results))
    apart = {key: words for here in places.values() for key, words in variants(here).items()}
    summary = summary_table([*places.values()], apart)
    tables = [summary] if len(summary.heads) > summary.labels else []
    for (model, target), groups in places.items():
        place = f"{model} to {short_length(target)}" if len(places) > 1 else ""
        for group in groups:
            prefix = ", ".join(filter(None, [place, apart[id(group)]]))
            tables += [
                table._replace(caption=f"{prefix}: {table.caption}" if prefix else table.caption)
                for table in task_of(group.task).tables(group)
            ]
    return tables


def summary_table(places: Sequence[Sequence[Comparison]], variants: Mapping[int, str]) -> Table:
    """Every model, target and method in one row, with what each task says of the target.

    Args:
        places: The comparisons of each model and target.
        variants: What sets a comparison apart from others of its task, by its `id`.
    """
    columns: dict[tuple[str, str], None] = {}
    lines: list[tuple[list[Cell], dict[tuple[str, str], Cell]]] = []
    for groups in places:
        names = dict.fromkeys(name for group in groups for name in group.results)
        cells: dict[str, dict[tuple[str, str], Cell]] = {name: {} for name in names}
        for group in groups:
            for caption, column in task_of(group.task).outcome(group).items():
                columns[caption, variants[id(group)]] = None
                for name in group.results:
                    cells[name][caption, variants[id(group)]] = column.get(name, MISSING)
        labels = [
            Cell(groups[0].model, value=groups[0].model),
            Cell(short_length(groups[0].target), value=groups[0].target),
        ]
        lines += [([*labels, Cell(name, value=name)], row) for name, row in cells.items()]
    shown = [len(places) > 1 and len({label[k].text for label, _ in lines}) > 1 for k in (0, 1)] + [True]
    heads = [(head, "") for head, show in zip(("Model", "Target", "Method"), shown, strict=True) if show]
    rows = [
        [
            *(cell for cell, show in zip(label, shown, strict=True) if show),
            *(row.get(key, MISSING) for key in columns),
        ]
        for label, row in lines
    ]
    return Table("The outcome at the target", [*heads, *columns], rows, sum(shown))


def ranking_table(ranking: Ranking, results: Sequence[Result]) -> Table:
    """The scalings, best first, and the floor of the text where it is known.

    Args:
        ranking: The ranking of the results.
        results: What was measured.
    """
    loss = next(result for result in results if task_of(result.task).ranks == "loss")
    to, trained = f"{loss.target:,}", f"{loss.model['trained']:,}"
    heads = ["", f"nats/token to {to}", "Δ loss vs best", f"nats/token to {trained}", "short context cost"]
    heads += [f"found at {to}", "Pareto"]
    rows = [_ranked(row, first=row is ranking.rows[0]) for row in ranking.rows]
    for result in results:
        if result.label == FLOOR:
            nats = result.tables["by_length"][-1]["nats"]
            rows.append([Cell(FLOOR), Cell(f"{nats:.3f}", value=nats), *[Cell("")] * (len(heads) - 2)])
    return Table("The ranking", [(head, "") for head in heads], rows)


def _ranked(row: Ranked, *, first: bool) -> list[Cell]:
    behind = " ".join(filter(None, ["tied" * row.tied, _interval(row.behind_interval)]))
    found = row.found_interval and f"{row.found_interval[0]:.0%} to {row.found_interval[1]:.0%}"
    return [
        Cell(row.label, value=row.label, best=first),
        Cell(f"{row.nats:.3f}", _interval(row.interval), row.nats),
        Cell("", value=0.0) if first else Cell(f"{row.behind:.3f}", behind, row.behind),
        Cell(f"{row.inside:.3f}", value=row.inside),
        Cell(f"{row.price:+.3f}", _interval(row.price_interval, sign="+"), row.price),
        Cell("") if row.found is None else Cell(f"{row.found:.0%}", found or "", row.found),
        Cell("*" * row.front, value=float(row.front)),
    ]


def _interval(interval: tuple[float, float], sign: str = "") -> str:
    low, high = interval
    return f"{low:{sign}.3f} to {high:{sign}.3f}" if math.isfinite(low) else ""
