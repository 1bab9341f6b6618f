"""The tables of `pages_study.py`, from its rows; the study prints them, docs/tables.py writes them.

A row is a page under a method: `losses`, the sum of each block, and `KIND LENGTH`, its answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from study import Row, counted, signed

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import BASELINE
from ropepatch.evaluation.intervals import Mean, difference, significant
from ropepatch.report.printers import markdown_rows

KINDS = ("number", "sentence")
Pages = Mapping[int, Row]  # the rows of a method by page


def by_method(rows: list[Row], target: int) -> dict[str, Pages]:
    """The pages that each method has read, the baseline's first."""
    found: dict[str, dict[int, Row]] = {BASELINE: {}}
    for row in rows:
        if row["target"] == target:
            found.setdefault(row["method"], {})[row["page"]] = row
    return found


def mean(pages: Pages, of: Callable[[Row], tuple[float, float]], *, share: bool = False) -> Mean:
    """A mean whose clusters are pages."""
    return Mean(tuple(of(pages[number]) for number in sorted(pages)), share)


def log_prob(row: Row, length: int) -> tuple[float, float]:
    """The sum of the answers' log-probabilities at a length, and their number."""
    every = [value for kind in KINDS for value in row[f"{kind} {length}"]["log_prob"]]
    return sum(every), float(len(every))


def found(row: Row, length: int) -> tuple[float, float]:
    """The answers found at a length, and all."""
    every = "".join(row[f"{kind} {length}"]["found"] for kind in KINDS)
    return float(every.count("1")), float(len(every))


def block_of(window: int) -> int:
    """How many tokens' losses are added up, by the window."""
    return min(512, window // 4)


def loss(row: Row, begin: int, end: int, block: int) -> tuple[float, float]:
    """The sum of the losses of tokens ``begin`` to ``end``, and their number."""
    blocks = row["losses"][begin // block : end // block]
    return sum(blocks), float(block * len(blocks))


def over(pages: Pages, base: Pages, of: Callable[[Row], tuple[float, float]]) -> Mean:
    """The difference to the baseline, page by page, on the pages that both have read."""
    both = sorted(pages.keys() & base.keys())
    return difference(mean({one: pages[one] for one in both}, of), mean({one: base[one] for one in both}, of))


def in_order(methods: Mapping[str, Pages], target: int) -> list[str]:
    """The methods by the log-probability of their answers at the target, the best first."""
    return sorted(methods, key=lambda name: -mean(methods[name], lambda row: log_prob(row, target)).value)


def lengths_of(row: Row) -> list[int]:
    """The lengths at which questions were asked."""
    return sorted(int(key.removeprefix(KINDS[0])) for key in row if key.startswith(f"{KINDS[0]} "))


def keys_of(row: Row) -> int:
    """How many questions of each kind were asked at each length."""
    return len(row[f"{KINDS[0]} {lengths_of(row)[0]}"]["found"])


def answers_table(rows: list[Row], target: int) -> str:
    """Tabulate answers found and their log-probability by length, the best at the target first."""
    methods = by_method(rows, target)
    lengths = lengths_of(next(row for row in rows if row["target"] == target))
    lines = []
    for name in in_order(methods, target):
        pages, line = methods[name], [f"`{name}`" if name != BASELINE else name]
        for length in lengths:
            share = mean(pages, lambda row, n=length: found(row, n), share=True)
            nats = mean(pages, lambda row, n=length: log_prob(row, n)).value
            line.append(f"{counted(share)}, {nats:.2f}")
        lines.append(line)
    return markdown_rows(["", *(f"{length:,}" for length in lengths)], lines)


def differences_table(rows: list[Row], window: int, target: int) -> str:
    """Each method less the baseline: log-probability at the target, loss beyond the window and within it."""
    methods = by_method(rows, target)
    base, block = methods.pop(BASELINE), block_of(window)
    parts = {
        "answers at the target": lambda row: log_prob(row, target),
        "loss beyond the window": lambda row: loss(row, window, target, block),
        "loss within it": lambda row: loss(row, 0, window, block),
    }
    columns = {
        part: {name: over(pages, base, of) for name, pages in methods.items()} for part, of in parts.items()
    }
    named = {part: significant(means) for part, means in columns.items()}
    ordered = sorted(methods, key=lambda name: -columns["answers at the target"][name].value)
    lines = [
        [
            f"`{name}`",
            str(len(methods[name].keys() & base.keys())),
            *(signed(columns[part][name]) + "*" * (name in named[part]) for part in parts),
        ]
        for name in ordered
    ]
    return markdown_rows(["", "pages", *parts], lines)


def in_pairs(methods: Mapping[str, Pages], target: int) -> tuple[dict[tuple[str, str], Mean], set[Any]]:
    """Every two methods by their answers at the target, the better one first; and the pairs that differ."""
    ordered = in_order(methods, target)
    pairs = {
        (one, other): over(methods[one], methods[other], lambda row: log_prob(row, target))
        for place, one in enumerate(ordered)
        for other in ordered[place + 1 :]
    }
    return pairs, set(significant(pairs))


def pairs_table(rows: list[Row], target: int) -> str:
    """Every two methods in the order of the answers' log-probability at the target, paired by page."""
    pairs, apart = in_pairs(by_method(rows, target), target)
    lines = [[f"{a} above {b}", signed(pairs[a, b]) + "*" * ((a, b) in apart)] for a, b in pairs]
    return markdown_rows(["", "nats of an answer's token"], lines)


def in_short(rows: list[Row], target: int) -> str:
    """Which methods differ from the baseline by their answers at the target, in a sentence."""
    methods = by_method(rows, target)
    line, (_, told_apart) = in_order(methods, target), in_pairs(methods, target)
    steps = [f" {'>' if (one, other) in told_apart else '='} `{other}`" for one, other in pairwise(line)]
    base = methods.pop(BASELINE)
    gains = {
        name: over(methods[name], base, lambda row: log_prob(row, target))
        for name in in_order(methods, target)
    }
    apart = significant(gains)
    groups = {
        "above it": [name for name in gains if name in apart and gains[name].value > 0],
        "below it": [name for name in gains if name in apart and gains[name].value < 0],
        "not told from it": [name for name in gains if name not in apart],
    }
    told = [
        f"{title} {', '.join(f'`{name}` ({gains[name].value:+.2f} nats)' for name in names)}"
        for title, names in groups.items()
        if names
    ]
    return (
        f"Against the baseline at {target:,} tokens, by the log-probability of the answers, paired by page, "
        f"at an error rate of 5 % over all {len(gains)} methods: {'; '.join(told)}. "
        f"In order, with > between neighbours that differ (5 % over all pairs): `{line[0]}`{''.join(steps)}."
    )


def all_tables(rows: list[Row], window: int, target: int) -> str:
    """The tables of one model at one target, each below what it says."""
    if not any(row["target"] == target for row in rows):
        raise RopepatchError(f"the file holds no page of this model to {target} tokens")
    apart = "a star: different from 0, at an error rate of 5 % over the column (Holm)"
    parts = {
        "Found (95 % interval over pages), and the mean log-probability of the answers": answers_table(
            rows, target
        ),
        f"Less the baseline, paired by page, in nats per token; {apart}": differences_table(
            rows, window, target
        ),
        f"By the log-probability of the answers at {target:,} tokens; {apart}": pairs_table(rows, target),
    }
    return "\n\n".join(f"{title}:\n\n{table}" for title, table in parts.items())
