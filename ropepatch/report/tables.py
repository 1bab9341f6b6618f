"""The tables of results and of a ranking, as data for reports, cards and notebooks, and in a terminal."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence

from ropepatch.errors import printable
from ropepatch.evaluation.comparisons import FLOOR, Comparison, by_place, comparisons
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.ranking import Ranked, Ranking
from ropepatch.evaluation.results import (
    Measure,
    Result,
    Row,
    Series,
    joined,
    measure_of,
)
from ropepatch.evaluation.retrieval import THRESHOLD, effective_length
from ropepatch.evaluation.tasks import task_of
from ropepatch.report.printers import MISSING, Cell, Table, table_text
from ropepatch.report.verdict import ranking_lines, variant
from ropepatch.settings import short_length

EFFECTIVE = f"Effective length at {THRESHOLD:.1%}"
PROSE = 100  # characters of a line of advice where there is no terminal
Column = Mapping[str, Cell]  # by name of the result


def tables_of(comparison: Comparison) -> list[Table]:
    """Tables of a comparison: by length, by stretch of positions, and by task of lm-eval."""
    tables = []
    for series in comparison.series:
        measure = measure_of(series.measure)
        title = series.title + comparison.reservation(series)
        tables.append(_by_length(comparison, series, measure, title))
        if series.measure == "loss":
            as_perplexity = measure._replace(text=perplexity_text)
            tables.append(_by_length(comparison, series, as_perplexity, "Perplexity"))
    places = comparison.kinds_of_rows()
    for measured, keys in places:
        if keys == ("begin", "end"):
            tables.append(_by_stretch(comparison, measured))
    if any("task" in keys for _, keys in places):
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


def _by_length(
    comparison: Comparison, series: Series, measure: Measure, title: str
) -> Table:
    """A row for every method and the floor, a column for every length."""
    rows_by_name = {
        name: {row.length: row for row in series.of(result)}
        for name, result in comparison.named().items()
    }
    of_results = [rows_by_name[name] for name in comparison.results]
    lengths = sorted({length for rows in of_results for length in rows})
    heads = [f"{length:,} tokens" for length in lengths]
    columns: list[Column] = []
    for length in lengths:
        rows = {n: row[length] for n, row in rows_by_name.items() if length in row}
        floor = rows.pop(FLOOR, None)
        column = _marked(_cells(rows, measure), measure)
        if floor is not None:
            column[FLOOR] = _cells({FLOOR: floor}, measure)[FLOOR]._replace(detail="")
        columns.append(column)
    if series.measure == "found" and not comparison.reservation(series):
        heads.append(EFFECTIVE)
        columns.append({n: _effective(row) for n, row in rows_by_name.items() if row})
    return _table(title, heads, columns, [*rows_by_name])


def _table(
    caption: str, heads: list[str], columns: Sequence[Column], names: Sequence[str]
) -> Table:
    """A row for every name that has a cell."""
    rows = []
    for name in names:
        cells = [column.get(name, MISSING) for column in columns]
        if any(cell != MISSING for cell in cells):
            rows.append([Cell(name, value=name), *cells])
    return Table(caption, ["Method", *heads], rows)


def _effective(by_length: Mapping[int, Row]) -> Cell:
    """The effective length, with the lower end of the accuracy there."""
    known = {n: row.value for n, row in by_length.items() if row.value is not None}
    length = effective_length(known)
    if length is None:
        return Cell("none", value=0.0)
    low = by_length[length].low
    detail = "" if low is None else f"accuracy at least {low:.0%}"
    return Cell(f"{length:,}", detail, float(length))


def _by_stretch(comparison: Comparison, measured: str) -> Table:
    """A row per method and the floor, a column for the original length and every doubling beyond."""
    by_name = {
        name: result.of(measured, "begin", "end")
        for name, result in comparison.named().items()
    }
    places = [row.at for rows in by_name.values() for row in rows]
    ends = {int(at["end"]) for at in places}
    spans = _spans(comparison.extended_from or comparison.trained, max(ends))
    if not all(end in ends for _, end in spans):  # half octaves around another length
        spans = _spans(comparison.trained, max(ends))
    first = min(int(at["begin"]) for at in places)
    spans = [span for span in spans if span[0] >= first]
    measure = measure_of(measured)
    columns = []
    for begin, end in spans:
        parts = {name: _within(rows, begin, end) for name, rows in by_name.items()}
        known = {name: rows for name, rows in parts.items() if rows}
        whole = joined([*known.values()], {"begin": begin, "end": end})
        columns.append(_cells(dict(zip(known, whole, strict=True)), measure))
    heads = [f"{begin:,} to {end:,}" for begin, end in spans]
    return _table(f"{measure.title}, by position", heads, columns, [*by_name])


def _within(rows: Sequence[Row], begin: int, end: int) -> list[Row]:
    """The rows within a stretch of positions; none if one has no clusters."""
    within = [
        row
        for row in rows
        if begin <= int(row.at["begin"]) and int(row.at["end"]) <= end
    ]
    return within if all(row.clusters for row in within) else []


def _spans(first: int, last: int) -> list[tuple[int, int]]:
    """From 0 to a length, and its doublings."""
    spans = [(0, min(first, last))]
    while spans[-1][1] < last:
        spans.append((spans[-1][1], min(2 * spans[-1][1], last)))
    return spans


def _scores(comparison: Comparison) -> Table:
    """A row for every metric of every task of lm-eval, a column for every method."""
    places: dict[tuple[str, str, str], dict[str, Row]] = {}
    for name, result in comparison.results.items():
        for row in result.rows:
            if "task" in row.at:
                place = str(row.at["task"]), str(row.at.get("version", "")), row.measure
                places.setdefault(place, {})[name] = row
    names = [*comparison.results]
    lines = []
    for place, rows in places.items():
        measure = measure_of(place[-1])
        cells = _marked(_cells(rows, measure), measure)
        labels = [Cell(part, value=part) for part in place]
        lines.append(labels + [cells.get(name, MISSING) for name in names])
    return Table("Scores", ["Task", "Version", "Metric", *names], lines, labels=3)


# Cells


def _cells(rows: Mapping[str, Row], measure: Measure) -> dict[str, Cell]:
    """The value of every row with its interval."""
    cells = {}
    for name, row in rows.items():
        if row.value is None:
            cells[name] = MISSING
            continue
        interval = ""
        if row.low is not None and row.high is not None:
            interval = f"{measure.text(row.low)} to {measure.text(row.high)}"
        cells[name] = Cell(measure.text(row.value), interval, row.value)
    return cells


def _marked(cells: Mapping[str, Cell], measure: Measure) -> dict[str, Cell]:
    """Cells with the best of several marked."""
    values = {cell.value for cell in cells.values() if isinstance(cell.value, float)}
    if len(values) < 2 or not measure.better:
        return dict(cells)
    best = max(values, key=lambda value: measure.better * value)
    return {n: cell._replace(best=cell.value == best) for n, cell in cells.items()}


def perplexity_text(nats: float) -> str:
    """exp(nats) as text: 1.702, 29.41, 1734, 1.3e6; ∞ if it overflows."""
    if nats >= 700:
        return "∞"
    value = math.exp(nats)
    if value >= 1e4:
        return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
    digits = 3 if value < 10 else 2 if value < 100 else 0
    return f"{value:.{digits}f}"


def _mean_cell(
    mean: Mean, text: Callable[[float], str], *, interval: bool = True
) -> Cell:
    low, high = mean.interval()
    detail = f"{text(low)} to {text(high)}" if interval and not mean.missing else ""
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
            cell = Cell(floor.text, value=floor.value)
            losses.append([Cell(FLOOR), cell, Cell(""), Cell(""), Cell("")])
    heads = ["", f"loss at {target}", "gain over baseline", f"loss at {original}"]
    heads.append("short-context cost")
    tables = [Table("Ranking by loss (nats/token)", heads, losses)]
    kinds = list(ranking.rows[0].answers)
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
    loss = _mean_cell(row.loss, "{:z.3f}".format, interval=False)
    short = _mean_cell(row.short_context_loss, "{:.3f}".format, interval=False)
    gain = cost = Cell("", value=0.0)
    if row.label != ranking.base:
        gain = _mean_cell(row.loss_gain, "{:+z.3f}".format)
        cost = _mean_cell(row.short_context_cost, "{:+z.3f}".format)
    name = Cell(row.label, value=row.label, best=row is ranking.rows[0])
    return [name, loss, gain, short, cost]


def _answers(ranking: Ranking, row: Ranked, kind: str) -> list[Cell]:
    answers, verdict = row.answers[kind], ranking.verdict(row, kind)
    found = _mean_cell(answers.found, "{:.0%}".format)
    correct = answers.found.value * answers.found.weight
    share = found._replace(text=f"{correct:.0f}/{answers.found.weight:.0f}")
    gain = Cell("", value=0.0)
    if row.label != ranking.base:
        gain = _mean_cell(answers.log_prob_gain, "{:+z.2f}".format)
    return [
        Cell(kind, value=kind),
        Cell(row.label, value=row.label),
        share,
        _mean_cell(answers.log_prob, "{:z.2f}".format, interval=False),
        gain,
        Cell(verdict, value=verdict),
    ]


# In a terminal


def print_results(results: Sequence[Result]) -> None:
    """Print the tables of every task, model and target."""
    _write(results_text(results, _width()))


def results_text(results: Sequence[Result], width: int | None = None) -> str:
    """The text of `print_results`, in lines of at most ``width`` characters."""
    blocks = []
    for group in comparisons(results):
        method = task_of(group.task).method(group.parameters)
        blocks += _folded([f"{group.model}, {group.history}. {method}"], width)
        blocks += [_titled(table, width) for table in tables_of(group)]
        blocks += _folded(
            [f"Warning: {warning}." for warning in group.warnings()], width
        )
    return "\n\n".join(blocks)


def _titled(table: Table, width: int | None) -> str:
    """A table below its caption."""
    return f"{table.caption}\n{table_text(table, width)}"


def print_ranking(
    ranking: Ranking, results: Sequence[Result], *, command: str = ""
) -> None:
    """Print the methods with their intervals, and the verdict.

    Args:
        ranking: The ranking of the results.
        results: The measurements; if they contain the floor of the text, it is the last row.
        command: The command that writes the recommended checkpoint.
    """
    text = ranking_text(ranking, results, _width())
    _write("\n".join([text, *([f"  {command}"] if command else [])]))


def ranking_text(
    ranking: Ranking, results: Sequence[Result], width: int | None = None
) -> str:
    """The text of `print_ranking`, in lines of at most ``width`` characters."""
    tables = [_titled(table, width) for table in ranking_tables(ranking, results)]
    verdict = "\n".join(_folded(ranking_lines(ranking), width or PROSE))
    return "\n\n".join([*tables, verdict])


def _write(text: str) -> None:
    """Print lines, escaped: names of folders and models may contain control characters."""
    sys.stdout.write(
        "".join(f"{printable(line, len(line))}\n" for line in text.split("\n"))
    )


def _folded(lines: Sequence[str], width: int | None) -> list[str]:
    if width is None:
        return [*lines]
    return [
        textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False)
        for line in lines
    ]


def _width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
