"""The tables of results and of a ranking, as data for terminal, report, cards and notebooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ropepatch.evaluation.comparisons import FLOOR, Comparison, by_place, comparisons
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.ranking import Ranked, Ranking
from ropepatch.evaluation.results import Result, Row, Series, joined, measure_of
from ropepatch.evaluation.retrieval import THRESHOLD, effective_length
from ropepatch.evaluation.table import MISSING, Cell, Table
from ropepatch.report.verdict import variant
from ropepatch.settings import short_length

EFFECTIVE = f"Effective length at {THRESHOLD:.1%}"
Form = Callable[[Row], Cell]
Number = Callable[[float], str]


def tables_of(comparison: Comparison) -> list[Table]:
    """Tables of a comparison: by length, by stretch of positions, and by task of lm-eval."""
    tables = []
    for series in comparison.series:
        tables.append(_by_length(comparison, series, row_cell))
        if series.measure == "loss":
            tables.append(
                _by_length(comparison, series, _perplexity_cell)._replace(
                    caption="Perplexity"
                )
            )
    for measure, keys in comparison.kinds_of_rows():
        if keys == ("begin", "end"):
            tables.append(_by_stretch(comparison, measure))
    if any("task" in keys for _, keys in comparison.kinds_of_rows()):
        tables.append(_scores(comparison))
    return tables


def results_tables(results: Sequence[Result]) -> list[Table]:
    """The tables of every comparison; captions name what differs between them."""
    places = by_place(comparisons(results))
    tables = []
    for (model, target), groups in places.items():
        place = f"{model} to {short_length(target)}" if len(places) > 1 else ""
        for group in groups:
            title = ", ".join(filter(None, [place, variant(group, groups)]))
            for table in tables_of(group):
                caption = f"{title}: {table.caption}" if title else table.caption
                tables.append(table._replace(caption=caption))
    return tables


def _by_length(comparison: Comparison, series: Series, form: Form) -> Table:
    """A row for every method and the floor, a column for every length."""
    lengths = comparison.lengths(series)
    caption = series.title + comparison.reservation(series)
    heads = ["Method", *(f"{length:,} tokens" for length in lengths)]
    columns = []
    for length in lengths:
        rows = comparison.at(series.measure, **series.at(length))
        columns.append(
            _marked({name: form(row) for name, row in rows.items()}, series.measure)
        )
    if comparison.floor is not None:
        for row in series.of(comparison.floor):
            columns[lengths.index(row.length)][FLOOR] = form(row)._replace(detail="")
    if series.measure == "found" and not comparison.reservation(series):
        heads.append(EFFECTIVE)
        columns.append(
            {
                name: _effective(series.of(result))
                for name, result in comparison.results.items()
            }
        )
    return _table(caption, heads, columns, [*comparison.named()])


def _table(
    caption: str,
    heads: list[str],
    columns: Sequence[Mapping[str, Cell]],
    names: list[str],
) -> Table:
    """A row for every name that has a cell."""
    rows = []
    for name in names:
        cells = [column.get(name, MISSING) for column in columns]
        if any(cell != MISSING for cell in cells):
            rows.append([Cell(name, value=name), *cells])
    return Table(caption, heads, rows)


def _effective(rows: Sequence[Row]) -> Cell:
    """The effective length, with the lower end of the accuracy there."""
    by_length = {row.length: row for row in rows if row.value is not None}
    length = effective_length(
        {tokens: row.value or 0.0 for tokens, row in by_length.items()}
    )
    if length is None:
        return Cell("none", value=0.0)
    low = by_length[length].low
    return Cell(
        f"{length:,}",
        "" if low is None else f"accuracy at least {low:.0%}",
        float(length),
    )


def _by_stretch(comparison: Comparison, measure: str) -> Table:
    """A row per method and the floor, a column for the original length and every doubling beyond."""
    by_name = {
        name: result.of(measure, "begin", "end")
        for name, result in comparison.named().items()
    }
    rows = [row for rows in by_name.values() for row in rows]
    ends = {int(row.at["end"]) for row in rows}
    begin = min(int(row.at["begin"]) for row in rows)
    spans = _spans(comparison.extended_from or comparison.trained, max(ends))
    if not all(end in ends for _, end in spans):  # half octaves around another length
        spans = _spans(comparison.trained, max(ends))
    spans = [span for span in spans if span[0] >= begin]
    columns = [
        {name: _stretch(rows, *span) for name, rows in by_name.items()}
        for span in spans
    ]
    heads = ["Method", *(f"{first:,} to {last:,}" for first, last in spans)]
    return _table(
        f"{measure_of(measure).title}, by position", heads, columns, [*by_name]
    )


def _stretch(rows: Sequence[Row], begin: int, end: int) -> Cell:
    """The mean of the rows within a stretch of positions."""
    within = [
        row
        for row in rows
        if begin <= int(row.at["begin"]) and int(row.at["end"]) <= end
    ]
    if not within or not all(row.clusters for row in within):
        return MISSING
    return row_cell(joined(within, {"begin": begin, "end": end}))


def _spans(first: int, last: int) -> list[tuple[int, int]]:
    """From 0 to a length, and its doublings."""
    spans = [(0, min(first, last))]
    while spans[-1][1] < last:
        spans.append((spans[-1][1], min(2 * spans[-1][1], last)))
    return spans


def _scores(comparison: Comparison) -> Table:
    """A row for every metric of every task of lm-eval, a column for every method."""
    places: dict[tuple[str, str, str], dict[str, Cell]] = {}
    for name, result in comparison.results.items():
        for row in result.rows:
            if "task" in row.at:
                place = str(row.at["task"]), str(row.at.get("version", "")), row.measure
                places.setdefault(place, {})[name] = row_cell(row)
    names = [*comparison.results]
    rows = []
    for place, cells in places.items():
        marked = _marked(cells, place[-1])
        labels = [Cell(part, value=part) for part in place]
        rows.append(labels + [marked.get(name, MISSING) for name in names])
    return Table("Scores", ["Task", "Version", "Metric", *names], rows, labels=3)


def _marked(cells: dict[str, Cell], measure: str) -> dict[str, Cell]:
    """Cells with the best of several marked."""
    better = measure_of(measure).better
    values = {
        name: better * cell.value
        for name, cell in cells.items()
        if isinstance(cell.value, float)
    }
    best = max(values.values(), default=0.0)
    if not better or all(value == best for value in values.values()):
        return cells
    return {
        name: cell._replace(best=values.get(name) == best)
        for name, cell in cells.items()
    }


# Cells


def row_cell(row: Row) -> Cell:
    """A value with its interval."""
    return Cell(row.text, row.interval, row.value)


def _perplexity_cell(row: Row) -> Cell:
    if row.value is None:
        return MISSING
    if row.low is None or row.high is None:
        return Cell(perplexity_text(row.value), "", row.value)
    interval = f"{perplexity_text(row.low)} to {perplexity_text(row.high)}"
    return Cell(perplexity_text(row.value), interval, row.value)


def perplexity_text(nats: float) -> str:
    """exp(nats) as text: 1.702, 29.41, 1734, 1.3e6; ∞ if it overflows."""
    if nats < math.log(1e4):
        value = math.exp(nats)
        return (
            f"{value:.3f}"
            if value < 10
            else f"{value:.2f}"
            if value < 100
            else f"{value:.0f}"
        )
    return (
        f"{math.exp(nats):.1e}".replace("e+0", "e").replace("e+", "e")
        if nats < 700
        else "∞"
    )


def _mean_cell(mean: Mean, text: Number, *, interval: bool = True) -> Cell:
    low, high = mean.interval()
    detail = f"{text(low)} to {text(high)}" if interval and not mean.missing else ""
    return Cell(text(mean.value), detail, mean.value)


# A ranking


def ranking_tables(ranking: Ranking, results: Sequence[Result]) -> list[Table]:
    """The methods of a ranking, best first: a table of losses, and one of answers by kind of question.

    The last row of the first is the floor of the text, if it is known.
    """
    losses = [_losses(ranking, row) for row in ranking.rows]
    for result in results:
        floor = (
            result.row("loss", length=result.target) if result.label == FLOOR else None
        )
        if floor is not None:
            losses.append(
                [
                    Cell(FLOOR),
                    Cell(floor.text, value=floor.value),
                    Cell(""),
                    Cell(""),
                    Cell(""),
                ]
            )
    target, original = f"{ranking.target:,}", f"{ranking.original:,}"
    heads = [
        "",
        f"loss at {target}",
        "gain over baseline",
        f"loss at {original}",
        "short-context cost",
    ]
    tables = [Table("Ranking by loss (nats/token)", heads, losses)]
    kinds = list(ranking.rows[0].answers)
    if kinds:
        heads = [
            "kind",
            "",
            f"accuracy at {target}",
            "log-prob",
            "gain over baseline",
            "verdict",
        ]
        answers = [
            _answers(ranking, row, kind) for kind in kinds for row in ranking.rows
        ]
        caption = "Retrieval by kind of question (log-prob in nats/token)"
        tables.append(Table(caption, heads, answers, labels=2))
    return tables


def _losses(ranking: Ranking, row: Ranked) -> list[Cell]:
    return [
        Cell(row.label, value=row.label, best=row is ranking.rows[0]),
        _mean_cell(
            row.loss, "{:z.3f}".format, interval=False
        ),  # the paired gain has the interval
        _gain_cell(ranking, row, row.loss_gain, "{:+z.3f}".format),
        _mean_cell(row.short_context_loss, "{:.3f}".format, interval=False),
        _gain_cell(ranking, row, row.short_context_cost, "{:+z.3f}".format),
    ]


def _answers(ranking: Ranking, row: Ranked, kind: str) -> list[Cell]:
    answers, verdict = row.answers[kind], ranking.verdict(row, kind)
    found = answers.found
    low, high = found.interval()
    share = f"{found.value * found.weight:.0f}/{found.weight:.0f}"
    return [
        Cell(kind, value=kind),
        Cell(row.label, value=row.label),
        Cell(share, "" if found.missing else f"{low:.0%} to {high:.0%}", found.value),
        _mean_cell(answers.log_prob, "{:z.2f}".format, interval=False),
        _gain_cell(ranking, row, answers.log_prob_gain, "{:+z.2f}".format),
        Cell(verdict, value=verdict),
    ]


def _gain_cell(ranking: Ranking, row: Ranked, gain: Mean, text: Number) -> Cell:
    return Cell("", value=0.0) if row.label == ranking.base else _mean_cell(gain, text)
