"""Results as tables in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ropepatch.evaluation.comparisons import Comparison
    from ropepatch.evaluation.results import Result, Row

Line = tuple[str, list[str]]  # its name, and a cell for every result; none for a heading


def print_results(results: Sequence[Result]) -> None:
    """A table for every task, model and target; the scalings are its columns."""
    from rich.console import Console
    from rich.table import Table

    from ropepatch.evaluation.comparisons import FLOOR, comparisons

    for number, group in enumerate(comparisons(results)):
        columns = dict(group.results) if group.floor is None else {FLOOR: group.floor, **group.results}
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("")
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for heading, cells in LINES[group.task](list(columns.values())):
            table.add_row(heading, *cells)
        print("\n" * bool(number) + _headline(group))
        width = 44 + sum(
            max(20, len(name)) + 2 for name in columns
        )  # cells are never cut: a narrow terminal folds lines instead
        Console(highlight=False, markup=False, emoji=False, width=width).print(table)


def _headline(group: Comparison) -> str:
    model, given = f"{group.model}, trained on {group.trained} tokens", group.parameters
    if group.task == "perplexity":
        protocol = "" if given["protocol"] == "one-pass" else f", {given['protocol']}"
        return f"{model}: {given['text']}, {given['pieces']} x {given['read']} tokens{protocol}"
    if group.task == "passkey":
        others = f", {given['distractors']} others in the text" if given["distractors"] else ""
        return f"{model}: pass keys, {given['trials']} per depth{others}"
    return f"{model}: lm-eval at {group.target} tokens"


def _perplexity_lines(results: Sequence[Result]) -> Iterator[Line]:
    one_pass = results[0].parameters["protocol"] == "one-pass"
    yield "perplexity of the first" if one_pass else "perplexity with windows of", []
    yield from _rows(results, "by_length", lambda row: f"  {row['length']} tokens", _perplexity)
    if not one_pass:
        return
    trained, end = results[0].model["trained"], results[0].parameters["lengths"][-1]
    spans = [(0, min(trained, end))]
    while spans[-1][1] < end:
        spans.append((spans[-1][1], min(2 * spans[-1][1], end)))
    yield "nats per token, positions", []
    yield from _stretches(results, "by_position", spans)
    if any("gain" in result.tables for result in results):
        yield "nats gained from beyond the trained context", []
        yield from _stretches(results, "gain", spans[1:])


def _stretches(results: Sequence[Result], table: str, spans: Sequence[tuple[int, int]]) -> Iterator[Line]:
    for begin, end in spans:
        yield f"  {begin} to {end}", [_mean(result.tables.get(table, []), begin, end) for result in results]


def _mean(rows: Sequence[Row], begin: int, end: int) -> str:
    from ropepatch.evaluation.results import mean_nats

    within = [row for row in rows if begin <= row["begin"] and row["end"] <= end]
    return f"{mean_nats(within):.3f}" if within else ""


def _passkey_lines(results: Sequence[Result]) -> Iterator[Line]:
    yield from _rows(results, "by_length", lambda row: f"{row['length']} tokens", _found)
    reached = (result.tables["effective_length"][0]["length"] for result in results)
    threshold = results[0].parameters["threshold"]
    yield f"longest with {threshold:.1%}", [str(length or "none") for length in reached]


def _score_lines(results: Sequence[Result]) -> Iterator[Line]:
    yield from _rows(results, "scores", lambda row: f"{row['task']} {row['metric']}", _score)


def _rows(
    results: Sequence[Result], table: str, name: Callable[[Row], str], cell: Callable[[Row], str]
) -> Iterator[Line]:
    for rows in zip(*(result.tables[table] for result in results), strict=True):
        yield name(rows[0]), [cell(row) for row in rows]


def _perplexity(row: Row) -> str:
    return "inf" if row["perplexity"] is None else f"{row['perplexity']:.2f}"


def _found(row: Row) -> str:
    low, high = row["interval"]
    return f"{row['correct']}/{row['n']} ({low:.0%}-{high:.0%})"


def _score(row: Row) -> str:
    return "none" if row["value"] is None else f"{row['value']:.4g}"


LINES = {"perplexity": _perplexity_lines, "passkey": _passkey_lines, "lm-eval": _score_lines}
