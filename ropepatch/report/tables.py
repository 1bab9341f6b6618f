"""The tables of results and of a ranking, as data that terminal, report, cards and notebooks print."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ropepatch.evaluation.comparisons import FLOOR, Comparison, by_place, comparisons
from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.ranking import Ranked, Ranking
from ropepatch.evaluation.results import Result, Row, joined, measure_of
from ropepatch.evaluation.retrieval import THRESHOLD, effective_length
from ropepatch.evaluation.table import MISSING, Cell, Table
from ropepatch.report.words import perplexity_text, variants
from ropepatch.settings import short_length

EFFECTIVE = f"Effective length at {THRESHOLD:.1%}"


def tables_of(comparison: Comparison) -> list[Table]:
    """All tables of a comparison: by length, by stretch of positions, by kind, or by task of lm-eval."""
    tables: list[Table] = []
    several = len(comparison.parameters.get("kinds") or ()) > 1
    for measure, keys in comparison.kinds_of_rows():
        if keys == ("length",):
            tables += _by_length(comparison, measure)
        elif keys == ("begin", "end"):
            tables += _by_stretch(comparison, measure)
        elif keys == ("kind", "length") and several:
            tables.append(_across(comparison, measure_of(measure).title, [measure], keys, ["Kind", "Tokens"]))
    scores = [measure for measure, keys in comparison.kinds_of_rows() if "task" in keys]
    if scores:
        tables.append(_across(comparison, "Scores", scores, ("task", "version"), ["Task", "Version"]))
    return tables


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
                for table in tables_of(group)
            ]
    return tables


def summary_table(places: Sequence[Sequence[Comparison]], variants: Mapping[int, str]) -> Table:
    """Every model, target and method in one row, with each measure at the greatest length.

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
            for caption, column in _outcome(group).items():
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
    loss = next(result for result in results if result.of("loss", "length"))
    to, trained = f"{loss.target:,}", f"{loss.model['trained']:,}"
    heads = [
        "",
        f"nats/token to {to}",
        "loss gain over baseline",
        f"nats/token to {trained}",
        "short-context cost",
    ]
    heads += [f"answer log-probability at {to}", "log-probability gain", f"found at {to}"]
    unscaled = {result.label for result in results if result.scaling is None}
    rows = [
        _ranked(row, first=row is ranking.rows[0], baseline=row.label in unscaled) for row in ranking.rows
    ]
    for result in results:
        if result.label == FLOOR and (least := result.row("loss", length=result.target)):
            rows.append([Cell(FLOOR), Cell(least.text, value=least.value), *[Cell("")] * (len(heads) - 2)])
    asked = any(row.found for row in ranking.rows)
    shown = len(heads) if asked else 5
    return Table("The ranking", [(head, "") for head in heads[:shown]], [row[:shown] for row in rows])


def _ranked(row: Ranked, *, first: bool, baseline: bool) -> list[Cell]:
    def gain(mean: Mean | None, text: Callable[[float], str]) -> Cell:
        return Cell("", value=0.0) if baseline else _mean_cell(mean, text)

    return [
        Cell(row.label, value=row.label, best=first),
        _mean_cell(row.loss, "{:z.3f}".format),
        gain(row.loss_gain, "{:+z.3f}".format),
        _mean_cell(row.short_context_loss, "{:.3f}".format)._replace(detail=""),
        gain(row.short_context_cost, "{:+z.3f}".format),
        _mean_cell(row.log_prob, "{:z.2f}".format),
        gain(row.log_prob_gain, "{:+z.2f}".format),
        _mean_cell(row.found, "{:.0%}".format),
    ]


def _mean_cell(mean: Mean | None, text: Callable[[float], str]) -> Cell:
    if mean is None:
        return Cell("")
    low, high = mean.interval()
    return Cell(text(mean.value), "" if mean.missing else f"{text(low)} to {text(high)}", mean.value)


def row_cell(row: Row) -> Cell:
    """A value with its interval."""
    return Cell(row.text, row.interval, row.value)


def _perplexity_cell(row: Row) -> Cell:
    if row.value is None:
        return MISSING
    doubt = ""
    if row.low is not None and row.high is not None:
        doubt = f"{perplexity_text(row.low)} to {perplexity_text(row.high)}"
    return Cell(perplexity_text(row.value), doubt, row.value)


def _columns(comparison: Comparison, measure: str) -> dict[str, Callable[[Row], Cell]]:
    """How a measure by length is shown, by caption."""
    shown: dict[str, Callable[[Row], Cell]] = {measure_of(measure).title: row_cell}
    return shown | ({"Perplexity": _perplexity_cell} if measure == "loss" else {})


def _by_length(comparison: Comparison, measure: str) -> list[Table]:
    """A row for every method and the floor, a column for every length."""
    lengths = comparison.lengths(measure)
    tables = []
    for caption, cell in _columns(comparison, measure).items():
        cells = {
            length: _marked(comparison.at(measure, length=length), cell, measure_of(measure).better)
            for length in lengths
        }
        rows = [
            [Cell(name, value=name), *(cells[length].get(name, MISSING) for length in lengths)]
            for name in comparison.results
        ]
        if comparison.floor is not None and (bounds := comparison.floor.of(measure, "length")):
            least = {row.length: cell(row)._replace(detail="") for row in bounds}
            rows.append([Cell(FLOOR, value=FLOOR), *(least.get(length, MISSING) for length in lengths)])
        heads = [("Method", ""), *((f"{length:,}", "tokens") for length in lengths)]
        if measure == "found":
            heads.append((EFFECTIVE, ""))
            reached = _effective(comparison)
            rows = [[*row, reached.get(row[0].text, MISSING)] for row in rows]
        tables.append(Table(caption, heads, rows))
    return tables


def _effective(comparison: Comparison) -> dict[str, Cell]:
    """By method the effective length, with the lower end of what is found there."""
    cells = {}
    for name, rows in comparison.rows("found", "length").items():
        of_length = {row.length: row for row in rows if row.value is not None}
        length = effective_length({tokens: row.value or 0.0 for tokens, row in of_length.items()})
        if length is None:
            cells[name] = Cell("none", value=0.0)
        else:
            low = of_length[length].low
            doubt = "" if low is None else f"at least {low:.0%} found"
            cells[name] = Cell(f"{length:,}", doubt, float(length))
    return cells


def _by_stretch(comparison: Comparison, measure: str) -> list[Table]:
    """A row for every method and the floor, a column for the trained context and every doubling beyond."""
    results = {
        name: rows for name, r in comparison.named().items() if (rows := r.of(measure, "begin", "end"))
    }
    ends = [int(row.at["end"]) for rows in results.values() for row in rows]
    begins = [int(row.at["begin"]) for rows in results.values() for row in rows]
    spans = [(0, min(comparison.trained, max(ends)))]
    while spans[-1][1] < max(ends):
        spans.append((spans[-1][1], min(2 * spans[-1][1], max(ends))))
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


def _across(
    comparison: Comparison, caption: str, measures: Sequence[str], keys: Sequence[str], heads: Sequence[str]
) -> Table:
    """A row for every place and measure, a column for every method."""
    several = len(measures) > 1 or "task" in keys
    places: dict[tuple[str, ...], dict[str, Row]] = {}
    for measure in measures:
        for name, rows in comparison.rows(measure, *keys).items():
            for row in rows:
                place = tuple(str(row.at[key]) for key in keys) + ((measure,) if several else ())
                places.setdefault(place, {})[name] = row
    lines = []
    for place, rows_here in places.items():
        better = measure_of(next(iter(rows_here.values())).measure).better
        cells = _marked(rows_here, row_cell, better)
        lines.append(
            [
                *(Cell(part, value=part) for part in place),
                *(cells.get(n, MISSING) for n in comparison.results),
            ]
        )
    labels = [*heads, "Metric"] if several else list(heads)
    names = [(label, "") for label in (*labels, *comparison.results)]
    return Table(caption, names, lines, labels=len(labels), across=True)


def _outcome(comparison: Comparison) -> dict[str, dict[str, Cell]]:
    """The cells of every method at the greatest length, by caption."""
    outcome: dict[str, dict[str, Cell]] = {}
    for measure, keys in comparison.kinds_of_rows():
        if keys == ("length",):
            rows = comparison.at(measure, length=comparison.lengths(measure)[-1])
            for caption, cell in _columns(comparison, measure).items():
                outcome[caption] = _marked(rows, cell, measure_of(measure).better)
            if measure == "found":
                outcome[EFFECTIVE] = _effective(comparison)
    return outcome


def _marked(rows: Mapping[str, Row], cell: Callable[[Row], Cell], better: int) -> dict[str, Cell]:
    """A cell for every row, the best of several marked."""
    cells = {name: cell(row) for name, row in rows.items()}
    values = [better * cell.value for cell in cells.values() if isinstance(cell.value, float)]
    best = max(values, default=None)
    if not better or best is None or values.count(best) == len(values):
        return cells
    return {
        name: one._replace(best=isinstance(one.value, float) and better * one.value == best)
        for name, one in cells.items()
    }
