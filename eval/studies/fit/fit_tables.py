"""What the study of learned frequencies found: tables and figures from its result file.

    python eval/studies/fit/fit_tables.py eval/results/fit.json --figures eval/results

The means are over seeds; the 95 % intervals are of the documents in which the test windows begin, by paired
differences.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from divisors import LearnedDivisors, plot_divisors

from ropepatch.evaluation.intervals import Mean
from ropepatch.model.source import find_source
from ropepatch.model.survey import survey_checkpoint
from ropepatch.report.plots import save_figure
from ropepatch.scaling import METHODS

BOUND = "on the test windows"  # the label of fit_study.py


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One checkpoint, text and factor.

    Args:
        model: Its name.
        text: What was read.
        factor: s.
        own: The baseline through its own window, nats per token.
        published: The published method that reads the test windows best.
        published_excess: Its loss less `own`.
        excess: The loss of the learned vector less `own`, mean over the seeds.
        by_seed: The same for each seed.
        behind: Its loss less that of `published`.
        share: Of the published excess, what is left; of the loss above the least possible one where that is
            known. None where one of the two is not above 0.
        bound: The share that the best vector leaves which was fitted on the test windows themselves.
        short: Its loss within the trained context less that of `published`.
        forward_tokens: Of a fit, mean.
    """

    model: str
    text: str
    factor: int
    own: float
    published: str
    published_excess: float
    excess: float
    by_seed: tuple[float, ...]
    behind: Mean
    share: Mean | None
    bound: float | None
    short: Mean
    forward_tokens: float


def summaries(rows: Sequence[dict[str, Any]]) -> Iterator[Summary]:
    """A summary per checkpoint, text and factor."""
    order = sorted(rows, key=lambda row: (row["model"], row["text"], row["factor"]))
    for (model, text, factor), cell in groupby(
        order, key=lambda row: (row["model"], row["text"], row["factor"])
    ):
        of_cell = list(cell)
        known = [row for row in of_cell if row["label"] in METHODS and row["label"] != "none"]
        best = min(known, key=lambda row: _mean(row["nats"]))
        bound = min((_mean(row["nats"]) for row in of_cell if row["label"] == BOUND), default=None)
        documents = next((row["documents"] for row in of_cell if "documents" in row), None)
        fits = [row for row in of_cell if row["label"] == "descent"]
        yield _summary(model, text, factor, best, fits, bound, documents)


def _summary(
    model: str,
    text: str,
    factor: int,
    best: dict[str, Any],
    fits: list[dict[str, Any]],
    bound: float | None,
    documents: list[int] | None,
) -> Summary:
    own, published = best["own"], best["nats"]
    learned, short = (
        [_mean(window) for window in zip(*(row[key] for row in fits), strict=True)]
        for key in ("nats", "short")
    )
    over, left = _less(published, own), _less(learned, own)
    behind, nearby = _less(learned, published), _less(short, best["short"])
    least = best.get("floor", own)
    above, remaining = _less(published, least), _less(learned, least)
    positive = _mean(above) > 0 and _mean(remaining) > 0
    return Summary(
        model=model,
        text=text,
        factor=factor,
        own=_mean(own),
        published=best["label"],
        published_excess=_mean(over),
        excess=_mean(left),
        by_seed=tuple(_mean(_less(row["nats"], own)) for row in fits),
        behind=_by_document(behind, documents),
        share=_by_document(remaining, documents, above) if positive else None,
        bound=(bound - _mean(least)) / _mean(above) if positive and bound is not None else None,
        short=_by_document(nearby, documents),
        forward_tokens=_mean([row["forward_tokens"] for row in fits]),
    )


def table(found: Sequence[Summary]) -> str:
    """Learned against published, as Markdown."""
    lines = [
        "| checkpoint, text | factor | best published | its excess | learned | of it | at best "
        "| learned less published | within the window | forward tokens |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        seeds = f"{one.excess:.4f} ({', '.join(f'{value:.4f}' for value in one.by_seed)})"
        share = ""
        if one.share is not None:
            low, high = one.share.interval()
            share = f"{one.share.value:.0%} [{low:.0%}, {high:.0%}]"
        bound = "" if one.bound is None else f"{one.bound:.0%}"
        learned = f"{_signed(one.behind)} | {_signed(one.short)}"
        lines.append(
            f"| {one.model}, {one.text} | {one.factor} | {one.published} | {one.published_excess:.4f} "
            f"| {seeds} | {share} | {bound} | {learned} | {one.forward_tokens / 1e6:.1f} M |"
        )
    return "\n".join(lines)


def means_table(rows: Sequence[dict[str, Any]]) -> str:
    """What other means leave of the excess, as Markdown."""
    lines = [
        "| checkpoint | factor | means | settings | excess | of the published | within the window |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["model"], row["factor"])):
        kept = (f"{key} {_rounded(value)}" for key, value in row["settings"].items() if key != "tried")
        share = "" if row["share_of_published"] is None else f"{row['share_of_published']:.0%}"
        lines.append(
            f"| {row['model']} | {row['factor']} | {row['mean']} | {', '.join(kept)} "
            f"| {_excess(row)} | {share} | {row['short']:+.4f} |"
        )
    return "\n".join(lines)


def starts_table(found: dict[str, Any]) -> str:
    """The same steps from several starts, as Markdown."""
    lines = [
        "| | steps | nats 0 to 256 | nats 768 to 1024 | nats 0 to 1024 | less YaRN after the same steps |",
        "|---|---|---|---|---|---|",
    ]
    reference = found["runs"]["yarn, seed 0"]["by_window"]
    for name, row in found["base"].items():
        lines.append(_start_row(name, "0", row))
    for name, row in found["runs"].items():
        less = _by_document(_less(row["by_window"], reference))
        lines.append(
            _start_row(name, f"{row['steps']}", row, "" if name == "yarn, seed 0" else _signed(less))
        )
    return "\n".join(lines)


def _start_row(name: str, steps: str, row: dict[str, Any], less: str = "") -> str:
    nats = [f"{row['nats'][span]:.4f}" for span in ("0 to 256", "768 to 1024", "0 to 1024")]
    return f"| {name} | {steps} | {' | '.join(nats)} | {less} |"


def _rounded(value: Any) -> Any:
    return f"{value:.3g}" if isinstance(value, float) else value


def curves(rows: Sequence[dict[str, Any]], folders: Sequence[str]) -> list[LearnedDivisors]:
    """The vectors that descents found, for the figure."""
    ropes = {Path(name).name: survey_checkpoint(find_source(name, weights=False)).rope for name in folders}
    return [
        LearnedDivisors(
            row["model"],
            ropes[row["model"]],
            row["factor"],
            row["seed"],
            tuple(row["divisors"]),
            row["attention_factor"],
        )
        for row in rows
        if row["label"] == "descent" and row["model"] in ropes and row["text"] in ("tinystories", "tales")
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _less(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(one, other, strict=True)]


def _by_document(
    values: Sequence[float], documents: Sequence[int] | None = None, weights: Sequence[float] | None = None
) -> Mean:
    """The mean of values of windows, each 1 or a weight, clustered by document; windows are their own."""
    sums: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for index, value in enumerate(values):
        cluster = sums[documents[index] if documents else index]
        cluster[0] += value
        cluster[1] += weights[index] if weights else 1
    return Mean.of(list(sums.values()))


def _excess(row: dict[str, Any]) -> str:
    return _signed(Mean.of(row["clusters"])) if row["clusters"] else f"{row['excess']:+.4f}"


def _signed(mean: Mean) -> str:
    low, high = mean.interval()
    return f"{mean.value:+.4f} [{low:+.4f}, {high:+.4f}]"


def main() -> None:
    """Print the tables, and draw the divisors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--figures", type=Path, help="a folder")
    parser.add_argument("--checkpoints", nargs="*", default=["tiny"], help="for the figure")
    arguments = parser.parse_args()
    rows = json.loads(arguments.results.read_text(encoding="utf-8"))["rows"]
    found = list(summaries(rows))
    print(table(found))
    if arguments.figures:
        save_figure(plot_divisors(curves(rows, arguments.checkpoints)), arguments.figures / "fit-divisors")


if __name__ == "__main__":
    main()
