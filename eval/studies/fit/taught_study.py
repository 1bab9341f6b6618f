"""Fits by the model's own distributions: what they leave of YaRN's excess on text that they have not seen.

    python eval/studies/fit/taught_study.py [--only "model=tiny,factor=4"]

`ropepatch.fit` learns on rows that the model writes itself, of tiny on its tales, too; frequencies alone and
with factors of the queries. What it learned reads windows of TinyStories and of fairy tales, and of tiny the
held-out tales, beside the baseline through its own window, the teacher and YaRN; tiny is asked for passkeys,
too.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import ropepatch
from ropepatch.attention import teaching_window
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import cut_windows
from ropepatch.evaluation.intervals import Mean

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from study import (
    FLOOR,
    OWN,
    SHARED,
    Checkpoint,
    Row,
    Study,
    averaged,
    by,
    checkpoint,
    counted,
    excess,
    signed,
    table,
)

TEACHER, YARN, FIT = "teacher", "yarn", "fit"
TALES = "tales"  # in place of rows that the model writes itself
BOTH = (True, False)  # with factors of the queries, and frequencies alone
CASES = {  # with the fits: seeds, queries, rows
    ("babyllama-361", 4): [*product(range(3), BOTH, (None,))],
    ("stories-260k", 4): [(0, True, None)],
    ("tiny", 4): [*product((0,), BOTH, (None, TALES))],
    ("tiny", 8): [*product((0,), BOTH, (None,))],
}


class OnFairyTales(Checkpoint):
    """The same checkpoint, read on fairy tales."""

    @cached_property
    def pieces(self) -> list[tuple[int, Any]]:
        """Windows, each with the index of the tale in which it begins."""
        documents = list(stream_documents(SHARED / "texts" / "fairytales"))
        return cut_windows(self.loaded[1], documents, length=self.target, count=self.windows)


def cases(given: Namespace) -> Iterator[Row]:
    """The readers of each checkpoint."""
    for (name, factor), fits in CASES.items():
        case = checkpoint(name, factor).named
        yield from (case | {"of": of} for of in (FLOOR if name == "tiny" else OWN, TEACHER, YARN))
        for seed, queries, rows in fits:
            yield case | {"of": FIT, "queries": queries, "seed": seed, "rows": rows}


def measure(case: Row, given: Namespace) -> list[Row]:
    """The row of each text."""
    place, of = checkpoint(case["model"], case["factor"]), case["of"]
    texts: dict[str, Checkpoint] = {"tales": place}
    if place.name != "tiny":
        texts = {"TinyStories": place, "fairy tales": OnFairyTales(place.name, place.factor)}
    if of == FLOOR:
        return [{"text": "tales"} | place.floor()]
    if of == OWN:
        return [{"text": text} | where.through_own_window() for text, where in texts.items()]
    model, learned = place.loaded[0], Row()
    method: Any = of
    options: Row = {"to": case["target"]}
    if of == TEACHER:
        method, options = "rerope", options | {"window": teaching_window(place.trained)}
    elif of == FIT:
        how = {"seed": case["seed"], "queries": case["queries"], "device": "cpu"}
        fitted = ropepatch.fit("tiny" if case["rows"] else place.place, to=case["target"], **how)
        method, options = fitted.plan, {}
        learned = {name: getattr(fitted.scaling, name) for name in ("divisors", "attention_factor")}
        learned |= {key: fitted.record[key] for key in ("start", "decided_by", "held_out", "seconds")}
    with ropepatch.patch(model, method, **options):
        keys = place.keys(model) if place.name == "tiny" else {}
        return [learned | {"text": text} | where.losses(model) | keys for text, where in texts.items()]


STUDY = Study(name="fit-taught", about=__doc__, cases=cases, measure=measure)


# The table, which docs/tables.py writes


def taught_table(rows: list[Row]) -> str:
    """What a fit from the model's own distributions leaves of YaRN's excess on other text."""
    groups = []
    for here in by(rows, "model", "factor", "text").values():
        of = {row["of"]: row for row in here}
        fits = by([row for row in here if row["of"] == FIT], "rows", "queries")
        for learned_on, queries in product((None, TALES), (False, True)):
            if seeds := fits.get((learned_on, queries)):
                mean = averaged(seeds, "all", "short")
                groups.append((mean, seeds, of.get(FLOOR) or of[OWN], of[TEACHER], of[YARN]))

    def mean_of(place: int) -> Any:
        return lambda group: f"{Mean.of(group[place]['all']).value:.4f}"

    columns = {
        "checkpoint, read on": lambda group: f"{group[0]['model']}, {group[0]['text']}",
        "factor": lambda group: f"{group[0]['factor']}",
        "learned": lambda group: (
            "frequencies"
            + " and queries" * group[0]["queries"]
            + (f", on {group[0]['rows']}" if group[0].get("rows") else "")
        ),
        "own window or floor": mean_of(2),
        "teacher": mean_of(3),
        "yarn": mean_of(4),
        "fit": mean_of(0),
        "left of YaRN's excess": lambda group: left(group[0], group),
        "by seed": lambda group: ", ".join(left(row, group).split(" ")[0] for row in group[1]),
        "fit less YaRN": lambda group: signed(excess(group[0], group[4])),
        "within the window": lambda group: signed(excess(group[0], group[4], "short")),
        "keys found": lambda group: found(group[1][0]),
    }
    return table(groups, columns)


def left(fit: Row, group: Any) -> str:
    """The share of YaRN's excess that is left, with its interval over documents."""
    _, _, base, _, yarn = group
    over, before = (excess(row, base).clusters for row in (fit, yarn))
    mean = Mean(tuple((part, whole) for (part, _), (whole, _) in zip(over, before, strict=True)))
    low, high = mean.interval()
    return f"{mean.value:.0%} [{low:.0%}, {high:.0%}]"


def found(row: Row) -> str:
    """The keys that were found, and the mean log-probability of their tokens."""
    if "log_prob" not in row:
        return "–"
    return f"{counted(Mean.of(row['found'], share=True))}, {Mean.of(row['log_prob']).value:.3f} nats"


if __name__ == "__main__":
    STUDY.main()
