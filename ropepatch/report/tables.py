"""The tables of results and of a ranking: as data for reports and cards, and as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ropepatch.evaluation.comparisons import FLOOR, Comparison, comparisons
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.ranking import Ranked, Ranking
from ropepatch.evaluation.results import Measure, Result, Row, Series, measure_of
from ropepatch.evaluation.retrieval import THRESHOLD, effective_length
from ropepatch.evaluation.tasks import task_of
from ropepatch.report.printers import MISSING, Cell, Table, table_text
from ropepatch.report.verdict import ranking_lines

EFFECTIVE = f"Effective length at {THRESHOLD:.1%}"


def tables_of(comparison: Comparison) -> list[Table]:
    """Tables of a comparison: by length, by positions, and by task of lm-eval."""
    tables = []
    for series in comparison.series:
        measure = measure_of(series.measure)
        title = series.title + comparison.reservation(series)
        tables.append(_by_length(comparison, series, measure, title))
        if series.measure == "loss":
            as_perplexity = measure._replace(text=perplexity_text)
            tables.append(_by_length(comparison, series, as_perplexity, "Perplexity"))
    for name, keys in comparison.kinds_of_rows():
        if keys == ("begin", "end"):
            tables.append(_by_position(comparison, name))
    scores = _scores(comparison)
    return [*tables, scores] if scores.rows else tables


def _by_length(
    comparison: Comparison, series: Series, measure: Measure, title: str
) -> Table:
    """A row for every method and the floor, a column for every length."""
    by_name = {
        name: {row.length: row for row in series.of(result)}
        for name, result in comparison.named().items()
    }
    lengths = sorted({length for rows in by_name.values() for length in rows})
    heads = ["Method", *(f"{length:,} tokens" for length in lengths)]
    columns = []
    for length in lengths:
        at = {name: rows[length] for name, rows in by_name.items() if length in rows}
        columns.append(_cells(at, measure))
    if series.measure == "found" and comparison.counts(series):
        heads.append(EFFECTIVE)
        columns.append({name: _effective(row) for name, row in by_name.items()})
    lines = []
    for name, rows in by_name.items():
        if rows:
            cells = [column.get(name, MISSING) for column in columns]
            lines.append([Cell(name, value=name), *cells])
    return Table(title, heads, lines)


def _effective(by_length: Mapping[int, Row]) -> Cell:
    """The effective length, with the lower end of the accuracy there."""
    known = {n: row.value for n, row in by_length.items() if row.value is not None}
    length = effective_length(known)
    if length is None:
        return Cell("none", value=0.0)
    low = by_length[length].low
    detail = "" if low is None else f"accuracy at least {low:.0%}"
    return Cell(f"{length:,}", detail, float(length))


def _by_position(comparison: Comparison, measure: str) -> Table:
    """A row for every range of positions, a column for every method and the floor."""
    by_name: dict[str, dict[tuple[Cell, ...], Row]] = {}
    for name, result in comparison.named().items():
        for row in result.of(measure, "begin", "end"):
            begin, end = row.at["begin"], row.at["end"]
            place = (Cell(f"{begin:,} to {end:,}", value=begin),)
            by_name.setdefault(name, {})[place] = row
    title = f"{measure_of(measure).title}, by position"
    return _by_place(title, ["Tokens"], by_name)


def _scores(comparison: Comparison) -> Table:
    """A row for every metric of every task of lm-eval, a column for every method."""
    by_name: dict[str, dict[tuple[Cell, ...], Row]] = {}
    for name, result in comparison.results.items():
        for row in result.rows:
            if "task" in row.at:
                parts = row.at["task"], row.at.get("version", ""), row.measure
                place = tuple(Cell(str(part), value=str(part)) for part in parts)
                by_name.setdefault(name, {})[place] = row
    return _by_place("Scores", ["Task", "Version", "Metric"], by_name)


def _by_place(
    title: str,
    heads: list[str],
    by_name: Mapping[str, Mapping[tuple[Cell, ...], Row]],
) -> Table:
    """A row for every place, a column for every method."""
    places = dict.fromkeys(place for rows in by_name.values() for place in rows)
    lines = []
    for place in places:
        rows = {name: rows[place] for name, rows in by_name.items() if place in rows}
        measure = next(iter(rows.values())).measure
        cells = _cells(rows, measure_of(measure))
        lines.append([*place, *(cells.get(name, MISSING) for name in by_name)])
    return Table(title, [*heads, *by_name], lines, labels=len(heads))


# Cells


def _cells(rows: Mapping[str, Row], measure: Measure) -> dict[str, Cell]:
    """The value of every row with its interval; the best of several methods is marked."""
    values = {
        row.value
        for name, row in rows.items()
        if name != FLOOR and row.value is not None
    }
    best = None
    if len(values) > 1 and measure.better:
        best = max(values, key=lambda value: measure.better * value)
    cells = {}
    for name, row in rows.items():
        cells[name] = MISSING
        if row.value is not None:
            interval = ""
            if row.low is not None and row.high is not None:
                interval = f"{measure.text(row.low)} to {measure.text(row.high)}"
            is_best = row.value == best
            cells[name] = Cell(measure.text(row.value), interval, row.value, is_best)
    return cells


def perplexity_text(nats: float) -> str:
    """exp(nats) as text: 1.702, 29.41, 1734, 1.628e+05; ∞ if it overflows."""
    return "∞" if nats >= 700 else f"{math.exp(nats):.4g}"


def _mean_cell(mean: Mean, text: Callable[[float], str]) -> Cell:
    low, high = mean.interval()
    detail = "" if mean.missing else f"{text(low)} to {text(high)}"
    return Cell(text(mean.value), detail, mean.value)


# A ranking


def ranking_tables(ranking: Ranking, results: Sequence[Result]) -> list[Table]:
    """The methods of a ranking, best first: a table of losses, and one of answers by kind of question.

    The last row of the first is the floor of the text, if it is known.
    """
    target, original = f"{ranking.target:,}", f"{ranking.original:,}"
    losses = [_losses(ranking, row) for row in ranking.rows]
    for result in results:
        floor = result.row("loss", length=result.target)
        if result.label == FLOOR and floor is not None:
            losses.append([Cell(FLOOR), Cell(floor.text)])
    heads = ["", f"loss at {target}", "gain over baseline", f"loss at {original}"]
    heads.append("short-context cost")
    tables = [Table("Ranking by loss (nats/token)", heads, losses)]
    kinds = ranking.rows[0].answers
    if kinds:
        heads = ["kind", "", f"accuracy at {target}", "log-prob"]
        heads += ["gain over baseline", "verdict"]
        answers = [
            _answers(ranking, row, kind) for kind in kinds for row in ranking.rows
        ]
        caption = "Retrieval by kind of question (log-prob in nats/token)"
        tables.append(Table(caption, heads, answers, labels=2))
    return tables


def _losses(ranking: Ranking, row: Ranked) -> list[Cell]:
    # Without intervals: those of the paired differences decide.
    loss = Cell(f"{row.loss.value:z.3f}")
    short = Cell(f"{row.short_context_loss.value:.3f}")
    if row.label == ranking.base:
        return [Cell(row.label), loss, Cell(""), short]
    gain = _mean_cell(row.loss_gain, "{:+z.3f}".format)
    cost = _mean_cell(row.short_context_cost, "{:+z.3f}".format)
    return [Cell(row.label), loss, gain, short, cost]


def _answers(ranking: Ranking, row: Ranked, kind: str) -> list[Cell]:
    answers = row.answers[kind]
    correct = answers.found.value * answers.found.weight
    found = _mean_cell(answers.found, "{:.0%}".format)
    share = found._replace(text=f"{correct:.0f}/{answers.found.weight:.0f}")
    gain = Cell("")
    if row.label != ranking.base:
        gain = _mean_cell(answers.log_prob_gain, "{:+z.2f}".format)
    log_prob = Cell(f"{answers.log_prob.value:z.2f}")
    verdict = Cell(ranking.verdict(row, kind))
    title = f"{kind} (taught)" if kind in row.taught else kind
    return [Cell(title), Cell(row.label), share, log_prob, gain, verdict]


# As text


def results_text(results: Sequence[Result], width: int | None = None) -> str:
    """The tables of every comparison; ``width`` is the most characters of a line of a table."""
    blocks = []
    for group in comparisons(results):
        method = task_of(group.task).method(group.parameters)
        blocks.append(f"{group.model}, {group.history}. {method}")
        blocks += [table_text(table, width) for table in tables_of(group)]
        blocks += [f"Warning: {warning}." for warning in group.warnings()]
    return "\n\n".join(blocks)


def ranking_text(
    ranking: Ranking, results: Sequence[Result], width: int | None = None
) -> str:
    """The tables of a ranking and its verdict; see `results_text`."""
    tables = [table_text(table, width) for table in ranking_tables(ranking, results)]
    return "\n\n".join([*tables, "\n".join(ranking_lines(ranking))])
