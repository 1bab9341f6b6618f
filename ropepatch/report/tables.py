"""The tables of results and of a ranking, as data and as text, and the verdict on them in sentences.

`template.html` has the tables as HTML.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from ropepatch.columns import UNFOLDED, as_text, columns
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.ranking import Ranked, Ranking, rank
from ropepatch.evaluation.results import (
    BASELINE,
    FLOOR,
    MEASURES,
    Comparison,
    Measure,
    Result,
    Row,
    Series,
    comparisons,
    measure_of,
)
from ropepatch.evaluation.retrieval import THRESHOLD, effective_length
from ropepatch.evaluation.tasks import TASKS

EFFECTIVE = f"Effective length at {THRESHOLD:.1%}"


class Cell(NamedTuple):
    """One value.

    Args:
        text: Its text.
        detail: A smaller text behind it: an interval.
        value: The sort key in its column; None comes last.
        best: Whether it is the best of its kind.
    """

    text: str
    detail: str = ""
    value: float | str | None = None
    best: bool = False

    def line(self, gap: str = " ") -> str:
        """Text and detail with a gap between them."""
        return f"{self.text}{gap}({self.detail})" if self.detail else self.text


MISSING = Cell("–")
Place = tuple[Cell, ...]
Key = TypeVar("Key", Place, int)


class Table(NamedTuple):
    """Cells below heads.

    Args:
        caption: The caption.
        heads: The name of each column.
        rows: The cells by row; the first `labels` of each name the row.
        labels: The number of cells that name a row.
    """

    caption: str
    heads: list[str]
    rows: list[list[Cell]]
    labels: int = 1


def table_text(table: Table, width: int | None = None) -> str:
    """A table below its caption.

    Args:
        table: The table.
        width: The most characters of a line, beyond which details stand below their text, then cells are
            wrapped; None for no limit.
    """
    right = range(table.labels, len(table.heads))
    for gap in " ", "\n":
        lines = [[cell.line(gap) for cell in row] for row in table.rows]
        text = as_text([columns(lines, table.heads, right=right)], width or UNFOLDED)
        if text.count("\n") == len(lines):
            break
    return f"{table.caption}\n{text}"


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
    for name in MEASURES:
        if by_name := comparison.rows(name, "begin", "end"):
            tables.append(_by_position(name, by_name))
    scores = _scores(comparison)
    return [*tables, scores] if scores.rows else tables


def _by_length(
    comparison: Comparison, series: Series, measure: Measure, title: str
) -> Table:
    """A row for every method and the floor, a column for every length."""
    found = {name: series.of(result) for name, result in comparison.named.items()}
    by_name = {name: rows for name, rows in found.items() if rows}
    grid = _grid(by_name, lambda row: row.length, measure)
    lengths = sorted(grid)
    heads = ["Method", *(f"{length:,} tokens" for length in lengths)]
    effective = series.measure == "found" and comparison.counts(series)
    if effective:
        heads.append(EFFECTIVE)
    lines = []
    for name, rows in by_name.items():
        cells = [grid[length].get(name, MISSING) for length in lengths]
        if effective:
            cells.append(_effective(rows))
        lines.append([Cell(name, value=name), *cells])
    return Table(title, heads, lines)


def _effective(rows: Sequence[Row]) -> Cell:
    """The effective length, with the lower end of the accuracy there."""
    by_length = {row.length: row for row in rows}
    known = {n: row.value for n, row in by_length.items() if row.value is not None}
    length = effective_length(known)
    if length is None:
        return Cell("none", value=0.0)
    low = by_length[length].low
    detail = "" if low is None else f"accuracy at least {low:.0%}"
    return Cell(f"{length:,}", detail, float(length))


def _by_position(measure: str, by_name: Mapping[str, Sequence[Row]]) -> Table:
    """A row for every range of positions, a column for every method and the floor."""

    def place(row: Row) -> Place:
        begin, end = row.at["begin"], row.at["end"]
        return (Cell(f"{begin:,} to {end:,}", value=begin),)

    title = f"{measure_of(measure).title}, by position"
    return _by_place(title, ["Tokens"], by_name, place)


def _scores(comparison: Comparison) -> Table:
    """A row for every metric of every task of lm-eval, a column for every method."""

    def place(row: Row) -> Place:
        parts = row.at["task"], row.at.get("version", ""), row.measure
        return tuple(Cell(part, value=part) for part in parts)

    by_name = {}
    for name, result in comparison.results.items():
        by_name[name] = [row for row in result.rows if "task" in row.at]
    return _by_place("Scores", ["Task", "Version", "Metric"], by_name, place)


def _by_place(
    title: str,
    heads: list[str],
    by_name: Mapping[str, Sequence[Row]],
    place_of: Callable[[Row], Place],
) -> Table:
    """A row for every place, a column for every method."""
    lines = []
    for place, cells in _grid(by_name, place_of).items():
        lines.append([*place, *(cells.get(name, MISSING) for name in by_name)])
    return Table(title, [*heads, *by_name], lines, labels=len(heads))


# Cells


def _grid(
    by_name: Mapping[str, Sequence[Row]],
    place_of: Callable[[Row], Key],
    measure: Measure | None = None,
) -> dict[Key, dict[str, Cell]]:
    """The cells by place and name."""
    places: dict[Key, dict[str, Row]] = {}
    for name, rows in by_name.items():
        for row in rows:
            places.setdefault(place_of(row), {})[name] = row
    return {place: _cells(alike, measure) for place, alike in places.items()}


def _cells(rows: Mapping[str, Row], measure: Measure | None) -> dict[str, Cell]:
    """The value of every row with its interval; the best of several methods is marked."""
    measure = measure or measure_of(next(iter(rows.values())).measure)
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
            text, is_best = measure.text(row.value), row.value == best
            cells[name] = Cell(text, measure.interval(row), row.value, is_best)
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
    if row.label == BASELINE:
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
    if row.label != BASELINE:
        gain = _mean_cell(answers.log_prob_gain, "{:+z.2f}".format)
    log_prob = Cell(f"{answers.log_prob.value:z.2f}")
    verdict = Cell(ranking.verdict(row, kind))
    title = f"{kind} (taught)" if kind in row.taught else kind
    return [Cell(title), Cell(row.label), share, log_prob, gain, verdict]


# The verdict


def ranking_lines(ranking: Ranking) -> list[str]:
    """The warnings and the advice that follow from a ranking, for terminal, notebook and report."""
    lines = [f"Warning: {warning}." for warning in ranking.warnings]
    best = ranking.best
    if best is not None:
        lines += _recommendation(ranking, best)
    elif ranking.rows[0].loss.missing:
        lines.append(
            "No method is recommended: fewer than three documents. Give more text."
        )
    else:
        lines.append(
            f"Do not extend: at {ranking.target:,} tokens no method is better than the baseline in one "
            "measure and worse in none."
        )
    for control in ranking.controls:
        lines.append(f"Do not use {control}, a control that ignores distant tokens.")
    for kind, reason in ranking.not_counted.items():
        lines.append(f"{kind} does not count: {reason}.")
    for kind, reason in ranking.not_measured.items():
        lines.append(f"{kind} was not measured: {reason}.")
    if ranking.rows[0].answers and not ranking.kinds:
        lines.append("Retrieval does not rank: no kind of question counts.")
    return lines


def _recommendation(ranking: Ranking, best: Ranked) -> list[str]:
    """The method to use, with its gains, its costs, and what speaks for others."""
    gains = ", ".join(
        f"{measure} {_mean_cell(best.gain(measure), '{:+.3f}'.format).line()}"
        for measure in best.better
    )
    lines = [
        f"Use {best.label}. Gain at {ranking.target:,} tokens, in nats/token (95 %): {gains}."
    ]
    cost = best.short_context_cost
    if cost.value > 0 and cost.differs:
        lines.append(
            f"It is significantly worse within the original length of {ranking.original:,} tokens: loss "
            f"{_mean_cell(cost, '{:+.4f}'.format).line()} nats/token."
        )
    if best.label in ranking.remappings:
        lines.append(
            f"Only transformers runs {best.label}, with code from the checkpoint."
        )
        if ranking.best_scaling is not None:
            lines.append(
                f"The best method for other engines is {ranking.best_scaling.label}."
            )
    for kind in ranking.kinds:
        found = best.answers[kind].found
        for label, more in ranking.more_accurate(best, kind).items():
            outcome = "significant" if more.differs else "not significant"
            by = _mean_cell(more, "{:.0%}".format).line()
            lines.append(f"{label} has a higher {kind} accuracy, by {by}: {outcome}.")
        if found.value < THRESHOLD:
            lines.append(
                f"The {kind} accuracy of {best.label} is {_mean_cell(found, '{:.0%}'.format).line()}. "
                "Train it, or use a shorter target."
            )
    return lines


def verdict_lines(groups: Sequence[Comparison]) -> list[str]:
    """The warnings and the ranking, if any, of one model and target; of each task the first comparison."""
    first: dict[str, Comparison] = {}
    for group in groups:
        first.setdefault(group.task, group)
    results = [one for group in first.values() for one in group.results.values()]
    lines = [f"Warning: {warning}." for group in groups for warning in group.warnings()]
    with suppress(RopepatchError):  # too few, or not comparable
        lines += ranking_lines(rank(results))
    return list(dict.fromkeys(lines))


# As text


def results_text(results: Sequence[Result], width: int | None = None) -> str:
    """The tables of every comparison; ``width`` is the most characters of a line of a table."""
    blocks = []
    for group in comparisons(results):
        method = TASKS.find(group.task).method(group.parameters)
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
