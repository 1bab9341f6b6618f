"""Fits by the model's own distributions: what they leave of YaRN's excess on text that they have not seen.

    python eval/studies/fit/taught_study.py --json eval/results/fit-taught.json [--only CASE]

`ropepatch.fit` learns on rows that the model writes itself, of tiny on its tales, too; frequencies alone and
with factors of the queries. What it learned reads windows of TinyStories and of fairy tales, and of tiny the
held-out tales, beside the baseline through its own window, the teacher and YaRN; tiny is asked for passkeys,
too. What `--json` holds already is not measured again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import ropepatch
from ropepatch.attention import teaching_window
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import cut_windows

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "distil")]

from distil_study import floor
from study import FLOOR, OWN, SHARED, Case, Row, Rows, cases_parser, chosen, said

CASES = (
    Case("babyllama-361", 4),
    Case("stories-260k", 4),
    Case("tiny", 4),
    Case("tiny", 8),
    Case("babyllama-361", 8),
)
SEEDS = (0, 1, 2)
TEACHER, YARN, FIT = "teacher", "yarn", "fit"
TALES = "tales"  # in place of rows that the model writes itself


class OnFairyTales(Case):
    """The same checkpoint, read on fairy tales."""

    @cached_property
    def pieces(self) -> list[tuple[int, Any]]:
        """Windows, each with the index of the tale in which it begins."""
        documents = list(stream_documents(SHARED / "texts" / "fairytales"))
        return cut_windows(self.loaded[1], documents, length=self.target, count=self.windows)


def texts_of(case: Case) -> dict[str, Case]:
    """Name the texts that a checkpoint reads."""
    if case.name == "tiny":
        return {"tales": case}
    return {"TinyStories": case, "fairy tales": OnFairyTales(case.name, case.factor)}


def labels(case: Case, seeds: int) -> Iterator[Row]:
    """List the readers; of fits so many seeds."""
    yield from ({"of": of} for of in (FLOOR if case.name == "tiny" else OWN, TEACHER, YARN))
    for seed, queries in product(SEEDS[:seeds], (True, False)):
        yield {"of": FIT, "queries": queries, "seed": seed, "rows": None}
    if case.name == "tiny":
        yield from ({"of": FIT, "queries": queries, "seed": 0, "rows": TALES} for queries in (True, False))


def reading(case: Case, texts: dict[str, Case], label: Row) -> Iterator[Row]:
    """The row of each text, with the model that the label says."""
    model, row = case.loaded[0], case.named | label
    if label["of"] == FLOOR:
        yield row | {"text": "tales"} | floor(case)
        return
    if label["of"] == OWN:
        for text, place in texts.items():
            yield row | {"text": text} | place.through_own_window()
        return
    method: Any = label["of"]
    given: Row = {"to": case.target}
    if method == TEACHER:
        method, given = "rerope", given | {"window": teaching_window(case.trained)}
    elif method == FIT:
        options = {"seed": label["seed"], "queries": label["queries"], "device": "cpu"}
        fitted = ropepatch.fit(case.place if label["rows"] is None else "tiny", to=case.target, **options)
        method, given = fitted.plan, {}
        row |= {"divisors": fitted.scaling.divisors, "attention_factor": fitted.scaling.attention_factor}
        row |= {key: fitted.record[key] for key in ("start", "decided_by", "held_out", "seconds")}
    with ropepatch.patch(model, method, **given):
        keys = case.keys(model) if case.name == "tiny" else {}
        for text, place in texts.items():
            yield row | {"text": text} | place.losses(model) | keys


def main() -> None:
    """Measure what is missing."""
    parser = cases_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="of fits at most so many")
    arguments = parser.parse_args()
    rows = Rows(arguments.json, "fit, taught")
    for case in chosen(CASES, arguments.only):
        texts = texts_of(case)
        for label in labels(case, arguments.seeds):
            if not rows.of(**case.named, **label):
                for row in reading(case, texts, label):
                    rows.add(row, case.loaded[0])
                said(f"{case.name} {case.factor} x: {label}")


if __name__ == "__main__":
    main()
