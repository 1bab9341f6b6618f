"""What the studies of learned frequencies found: tables, which docs/tables.py writes.

The means are over seeds; the 95 % intervals are of the documents in which the test windows begin, by paired
differences.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product

from study import FLOOR, OWN, Row, averaged, by_case, counted, excess, signed

from ropepatch.evaluation.intervals import Mean
from ropepatch.report.printers import markdown_rows
from ropepatch.scaling import METHODS

BOUND = "on the test windows"  # the label of fit_study.py
SPANS = ("0 to 256", "768 to 1024", "0 to 1024")


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


def taught_table(rows: Sequence[Row]) -> str:
    """Tabulate what a fit from the model's own distributions leaves of YaRN's excess on other text."""
    lines = []
    for (model, factor, _), here in by_case(list(rows)).items():
        for text in dict.fromkeys(row["text"] for row in here):
            read = [row for row in here if row["text"] == text]
            of = {row["of"]: row for row in read}
            if "fit" not in of:  # which comes last
                continue
            base, yarn = of.get(FLOOR) or of[OWN], of["yarn"]
            for learned_on, queries in product((None, "tales"), (False, True)):
                named = learned_on, queries
                fits = [row for row in read if (row.get("rows"), row.get("queries")) == named]
                if not fits:
                    continue
                learned = "frequencies and queries" if queries else "frequencies"
                learned += f", on {learned_on}" if learned_on else ""
                fit = averaged(fits, "all", "short")
                left = [_left(row, yarn, base) for row in [fit, *fits]]
                low, high = left[0].interval()
                means = (Mean.of(row["all"]).value for row in (base, of["teacher"], yarn, fit))
                less = (signed(excess(fit, yarn, span)) for span in ("all", "short"))
                lines.append(
                    [
                        *(f"{model}, {text}", f"{factor}", learned),
                        *(f"{mean:.4f}" for mean in means),
                        f"{left[0].value:.0%} [{low:.0%}, {high:.0%}]",
                        ", ".join(f"{one.value:.0%}" for one in left[1:]),
                        *less,
                        _found(fits[0]),
                    ]
                )
    head = ["checkpoint, read on", "factor", "learned", "own window or floor", "teacher", "yarn", "fit"]
    head += ["left of YaRN's excess", "by seed", "fit less YaRN", "within the window", "keys found"]
    return markdown_rows(head, lines)


def _left(fit: Row, yarn: Row, base: Row) -> Mean:
    """The share of YaRN's excess that is left, with the documents as clusters."""
    over, before = (excess(row, base).clusters for row in (fit, yarn))
    return Mean(tuple((left, whole) for (left, _), (whole, _) in zip(over, before, strict=True)))


def _found(row: Row) -> str:
    if "log_prob" not in row:
        return "–"
    share, log_prob = Mean.of(row["found"], share=True), Mean.of(row["log_prob"])
    return f"{counted(share)}, {log_prob.value:.3f} nats"


def summaries(rows: Sequence[Row]) -> Iterator[Summary]:
    """A summary per checkpoint, text and factor."""
    order = sorted(rows, key=lambda row: (row["model"], row["text"], row["factor"]))
    for (model, text, factor), cell in groupby(
        order, key=lambda row: (row["model"], row["text"], row["factor"])
    ):
        of_cell = list(cell)
        known = [row for row in of_cell if row["label"] in METHODS and row["label"] != "none"]
        best = min(known, key=lambda row: _mean(row["nats"]))
        bound = min((_mean(row["nats"]) for row in of_cell if row["label"] == BOUND), default=None)
        base = next(row for row in of_cell if row["label"] == "none")
        fits = [row for row in of_cell if row["label"] == "descent"]
        yield _summary(model, text, factor, best, fits, bound, base)


def _summary(
    model: str,
    text: str,
    factor: int,
    best: Row,
    fits: list[Row],
    bound: float | None,
    base: Row,
) -> Summary:
    own, published, documents = base["own"], best["nats"], base.get("documents")
    learned, short = (
        [_mean(window) for window in zip(*(row[key] for row in fits), strict=True)]
        for key in ("nats", "short")
    )
    over, left = _less(published, own), _less(learned, own)
    behind, nearby = _less(learned, published), _less(short, best["short"])
    least = base.get("floor", own)
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
    lines = []
    for one in found:
        seeds = f"{one.excess:.4f} ({', '.join(f'{value:.4f}' for value in one.by_seed)})"
        share = ""
        if one.share is not None:
            low, high = one.share.interval()
            share = f"{one.share.value:.0%} [{low:.0%}, {high:.0%}]"
        bound = "" if one.bound is None else f"{one.bound:.0%}"
        published = (
            f"{one.model}, {one.text}",
            f"{one.factor}",
            one.published,
            f"{one.published_excess:.4f}",
        )
        learned = (seeds, share, bound, signed(one.behind), signed(one.short))
        lines.append((*published, *learned, f"{one.forward_tokens / 1e6:.1f} M"))
    heads = ("checkpoint, text", "factor", "best published", "its excess", "learned", "of it", "at best")
    return markdown_rows((*heads, "learned less published", "within the window", "forward tokens"), lines)


def starts_table(found: Row) -> str:
    """The same steps from several starts, as Markdown."""
    reference = found["runs"]["yarn, seed 0"]["by_window"]
    lines = []
    for name, row in (found["base"] | found["runs"]).items():
        nats = (f"{row['nats'][span]:.4f}" for span in SPANS)
        less = ""
        if "steps" in row and name != "yarn, seed 0":
            less = signed(_by_document(_less(row["by_window"], reference)))
        lines.append((name, f"{row.get('steps', 0)}", *nats, less))
    heads = ("", "steps", *(f"nats {span}" for span in SPANS), "less YaRN after the same steps")
    return markdown_rows(heads, lines)


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
