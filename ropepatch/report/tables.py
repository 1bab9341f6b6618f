"""The tables of results and of a ranking, as data for terminal, report, cards and notebooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ropepatch.evaluation.comparisons import FLOOR, Comparison, by_place, comparisons
from ropepatch.evaluation.intervals import Mean, difference
from ropepatch.evaluation.ranking import Ranked, Ranking
from ropepatch.evaluation.results import Result, Row, Series, joined, measure_of
from ropepatch.evaluation.retrieval import THRESHOLD, effective_length
from ropepatch.evaluation.table import MISSING, Cell, Table
from ropepatch.report.verdict import variant
from ropepatch.settings import short_length

EFFECTIVE = f"Effective length at {THRESHOLD:.1%}"
Form = Callable[[Row], Cell]


def tables_of(comparison: Comparison) -> list[Table]:
    """Tables of a comparison: by length, by stretch of positions, by kind, or by task of lm-eval."""
    tables = [table for series in comparison.series for table in _by_length(comparison, series)]
    for measure, keys in comparison.kinds_of_rows():
        if keys == ("begin", "end"):
            tables += _by_stretch(comparison, measure)
    tables += _differences(comparison)
    scores = [measure for measure, keys in comparison.kinds_of_rows() if "task" in keys]
    if scores:
        heads = {"task": "Task", "version": "Version"}
        tables.append(_across(comparison, "Scores", scores, heads, metric="Metric"))
    return tables


def results_tables(results: Sequence[Result]) -> list[Table]:
    """The summary at the target length, if any, and the tables of every comparison."""
    places = by_place(comparisons(results))
    summary = summary_table([*places.values()])
    tables = [summary] if len(summary.heads) > summary.labels else []
    for (model, target), groups in places.items():
        place = f"{model} to {short_length(target)}" if len(places) > 1 else ""
        for group in groups:
            for table in tables_of(group):
                parts = (", ".join(filter(None, [place, variant(group, groups)])), table.caption)
                tables.append(table._replace(caption=": ".join(filter(None, parts))))
    return tables


def summary_table(places: Sequence[Sequence[Comparison]]) -> Table:
    """A row for every model, target and method, with each measure at the greatest length.

    The comparisons are grouped by model and target.
    """
    lines: list[tuple[list[Cell], dict[tuple[str, str], Cell]]] = []
    for groups in places:
        rows = {name: dict[tuple[str, str], Cell]() for group in groups for name in group.results}
        for group in groups:
            apart = variant(group, groups)
            for caption, column in _outcome(group):
                for name in group.results:
                    rows[name][caption, apart] = column.get(name, MISSING)
        model, target = groups[0].model, groups[0].target
        labels = [Cell(model, value=model), Cell(short_length(target), value=target)]
        lines += [([*labels, Cell(name, value=name)], row) for name, row in rows.items()]
    columns = dict.fromkeys(key for _, row in lines for key in row)
    shown = [k for k in range(3) if k == 2 or len({label[k].text for label, _ in lines}) > 1]
    heads = [(("Model", "Target", "Method")[k], "") for k in shown]
    cells = [
        [*(label[k] for k in shown), *(row.get(key, MISSING) for key in columns)] for label, row in lines
    ]
    return Table("Summary at the target length", [*heads, *columns], cells, len(shown))


def _outcome(comparison: Comparison) -> Iterator[tuple[str, dict[str, Cell]]]:
    """The columns at the greatest length and those over all lengths, with their captions."""
    for series in comparison.series:
        for table in _by_length(comparison, series):
            last = len(comparison.lengths(series))
            yield table.caption, table.column(last)
            for k, (head, _) in enumerate(table.heads[last + 1 :], start=last + 1):
                yield ", ".join(filter(None, [head, series.kind])), table.column(k)


def _by_length(comparison: Comparison, series: Series) -> list[Table]:
    """A row for every method and the floor, a column for every length."""
    lengths, known = comparison.lengths(series), measure_of(series.measure)
    forms: dict[str, Form] = {series.title + comparison.reservation(series): row_cell}
    if series.measure == "loss":
        forms["Perplexity"] = _perplexity_cell
    elif series.measure == "key_loss":
        forms = {"LongPPL": _key_cell}
    tables = []
    for caption, form in forms.items():
        here = [comparison.at(series.measure, **series.at(n)) for n in lengths]
        columns = [_marked(rows, form, known.better) for rows in here]
        heads = [(f"{length:,}", "tokens") for length in lengths]
        if series.measure == "found" and not comparison.reservation(series):
            columns.append(_effective(comparison, series))
            heads.append((EFFECTIVE, ""))
        rows = [
            [Cell(name, value=name), *(cells.get(name, MISSING) for cells in columns)]
            for name in comparison.results
        ]
        if comparison.floor is not None and (bounds := series.of(comparison.floor)):
            least = {row.length: form(row)._replace(detail="") for row in bounds}
            cells = [least.get(length, MISSING) for length in lengths]
            rows.append([Cell(FLOOR, value=FLOOR), *cells, *[MISSING] * (len(heads) - len(lengths))])
        tables.append(Table(caption, [("Method", ""), *heads], rows))
    return tables


def _effective(comparison: Comparison, series: Series) -> dict[str, Cell]:
    """The effective length by method, with the lower end of the accuracy there."""
    cells = {}
    for name, result in comparison.results.items():
        of_length = {row.length: row for row in series.of(result) if row.value is not None}
        length = effective_length({tokens: row.value or 0.0 for tokens, row in of_length.items()})
        if length is None:
            cells[name] = Cell("none", value=0.0)
        else:
            low = of_length[length].low
            cells[name] = Cell(
                f"{length:,}", "" if low is None else f"accuracy at least {low:.0%}", float(length)
            )
    return cells


def _by_stretch(comparison: Comparison, measure: str) -> list[Table]:
    """A row per method and the floor, a column for the original length and every doubling beyond."""
    results = {
        name: rows for name, r in comparison.named().items() if (rows := r.of(measure, "begin", "end"))
    }
    begins, ends = (
        [int(row.at[key]) for rows in results.values() for row in rows] for key in ("begin", "end")
    )
    spans = _spans(comparison.extended_from or comparison.trained, max(ends))
    if not {end for _, end in spans} <= {*ends}:  # half octaves around another length
        spans = _spans(comparison.trained, max(ends))
    spans = [span for span in spans if span[0] >= min(begins)]

    def cell(rows: Sequence[Row], begin: int, end: int) -> Cell:
        within = [row for row in rows if begin <= int(row.at["begin"]) and int(row.at["end"]) <= end]
        if not within or not all(row.clusters for row in within):
            return MISSING
        return row_cell(joined(within, {"begin": begin, "end": end}))

    lines = [
        [Cell(name, value=name), *(cell(rows, *span) for span in spans)] for name, rows in results.items()
    ]
    heads = [("Method", ""), *((f"{begin:,} to {end:,}", "") for begin, end in spans)]
    return [Table(f"{measure_of(measure).title}, by position", heads, lines)] if spans else []


def _differences(comparison: Comparison) -> list[Table]:
    """Paired differences of each server from the checkpoint itself or from the first server."""
    if comparison.served is None:
        return []
    base, others = comparison.served
    parts: list[tuple[str, str, list[Any]]] = [
        (series.title, series.measure, [series.at(length) for length in comparison.lengths(series)])
        for series in comparison.series
    ]
    if stretches := [row.at for row in comparison.results[base].of("loss", "begin", "end")]:
        parts.append((f"{measure_of('loss').title}, by position", "loss", stretches))

    def cell(name: str, measure: str, at: Mapping[str, Any]) -> Cell:
        rows = [comparison.results[one].row(measure, **at) for one in (name, base)]
        means = [row.mean for row in rows if row is not None and row.clusters]
        if len(means) < 2 or len({tuple(weight for _, weight in mean.clusters) for mean in means}) > 1:
            return MISSING
        return _mean_cell(difference(*means), ("{:+z.0%}" if measure == "found" else "{:+z.3f}").format)

    return [
        Table(
            f"{title}: difference from {base}",
            [
                ("Method", ""),
                *(
                    (f"{at['length']:,}", "tokens")
                    if "length" in at
                    else (f"{at['begin']:,} to {at['end']:,}", "")
                    for at in places
                ),
            ],
            [[Cell(name, value=name), *(cell(name, measure, at) for at in places)] for name in others],
        )
        for title, measure, places in parts
    ]


def _spans(first: int, last: int) -> list[tuple[int, int]]:
    """From 0 to a length, and its doublings."""
    spans = [(0, min(first, last))]
    while spans[-1][1] < last:
        spans.append((spans[-1][1], min(2 * spans[-1][1], last)))
    return spans


def _across(
    comparison: Comparison, caption: str, measures: Sequence[str], keys: Mapping[str, str], metric: str = ""
) -> Table:
    """A row for every place, a column for every method; the heads of the places by their keys."""
    places: dict[tuple[str, ...], dict[str, Row]] = {}
    for measure in measures:
        for name, rows in comparison.rows(measure, *keys).items():
            for row in rows:
                place = (*(str(row.at[key]) for key in keys), *([measure] if metric else []))
                places.setdefault(place, {})[name] = row
    lines = []
    for place, here in places.items():
        cells = _marked(here, row_cell, measure_of(next(iter(here.values())).measure).better)
        methods = (cells.get(name, MISSING) for name in comparison.results)
        lines.append([*(Cell(part, value=part) for part in place), *methods])
    labels = [*keys.values(), *([metric] if metric else [])]
    heads = [(label, "") for label in (*labels, *comparison.results)]
    return Table(caption, heads, lines, labels=len(labels), across=True)


def _marked(rows: Mapping[str, Row], form: Form, better: int) -> dict[str, Cell]:
    """A cell for every row, the best of several marked."""
    cells = {name: form(row) for name, row in rows.items()}
    values = [better * cell.value for cell in cells.values() if isinstance(cell.value, float)]
    best = max(values, default=None)
    if not better or best is None or values.count(best) == len(values):
        return cells
    return {
        name: cell._replace(best=isinstance(cell.value, float) and better * cell.value == best)
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


def _key_cell(row: Row) -> Cell:
    cell = _perplexity_cell(row)
    return cell._replace(detail=", ".join(filter(None, [cell.detail, f"{row.n:,} tokens"])))


def perplexity_text(nats: float) -> str:
    """exp(nats) as text: 1.702, 29.41, 1734, 1.3e6; ∞ if it overflows."""
    if nats < math.log(1e4):
        value = math.exp(nats)
        return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.0f}"
    return f"{math.exp(nats):.1e}".replace("e+0", "e").replace("e+", "e") if nats < 700 else "∞"


def _mean_cell(mean: Mean, text: Callable[[float], str]) -> Cell:
    low, high = mean.interval()
    return Cell(text(mean.value), "" if mean.missing else f"{text(low)} to {text(high)}", mean.value)


# A ranking


def ranking_tables(ranking: Ranking, results: Sequence[Result]) -> list[Table]:
    """The methods of a ranking, best first: a table of losses, and one of answers by kind of question.

    The last row of the first is the floor of the text, if it is known.
    """
    loss = next(result for result in results if result.of("loss", "length"))
    losses = [_losses(row, row is ranking.rows[0], row.label == ranking.base) for row in ranking.rows]
    for result in results:
        if result.label == FLOOR and (least := result.row("loss", length=result.target)):
            losses.append([Cell(FLOOR), Cell(least.text, value=least.value), *[Cell("")] * 3])
    to, trained = f"{loss.target:,}", f"{loss.model['trained']:,}"
    heads = ["", f"loss at {to}", "gain over baseline", f"loss at {trained}", "short-context cost"]
    tables = [_ranking("Ranking by loss (nats/token)", heads, losses)]
    if kinds := ranking.rows[0].answers:
        answers = [_answers(ranking, row, kind) for kind in kinds for row in ranking.rows]
        heads = ["kind", "", f"accuracy at {to}", "log-prob", "gain over baseline", "verdict"]
        tables.append(
            _ranking("Retrieval by kind of question (log-prob in nats/token)", heads, answers, labels=2)
        )
    return tables


def _ranking(caption: str, heads: Sequence[str], rows: list[list[Cell]], labels: int = 1) -> Table:
    return Table(caption, [(head, "") for head in heads], rows, labels=labels)


def _losses(row: Ranked, first: bool, baseline: bool) -> list[Cell]:
    return [
        Cell(row.label, value=row.label, best=first),
        _mean_cell(row.loss, "{:z.3f}".format)._replace(detail=""),  # the paired gain has the interval
        _gain_cell(row.loss_gain, "{:+z.3f}".format, baseline),
        _mean_cell(row.short_context_loss, "{:.3f}".format)._replace(detail=""),
        _gain_cell(row.short_context_cost, "{:+z.3f}".format, baseline),
    ]


def _answers(ranking: Ranking, row: Ranked, kind: str) -> list[Cell]:
    answers = row.answers[kind]
    low, high = answers.found.interval()
    interval = "" if answers.found.missing else f"{low:.0%} to {high:.0%}"
    share = f"{answers.found.value * answers.found.weight:.0f}/{answers.found.weight:.0f}"
    return [
        Cell(kind, value=kind),
        Cell(row.label, value=row.label),
        Cell(share, interval, answers.found.value),
        _mean_cell(answers.log_prob, "{:z.2f}".format)._replace(detail=""),
        _gain_cell(answers.log_prob_gain, "{:+z.2f}".format, row.label == ranking.base),
        Cell(ranking.verdict(row, kind), value=ranking.verdict(row, kind)),
    ]


def _gain_cell(gain: Mean, text: Callable[[float], str], baseline: bool) -> Cell:
    return Cell("", value=0.0) if baseline else _mean_cell(gain, text)
