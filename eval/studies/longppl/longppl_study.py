"""LongPPL under scalings: whose key tokens it is of, and what the stride of the short window changes.

    python eval/studies/longppl/longppl_study.py --json eval/results/longppl.json [--only CASE]

Checkpoints at 4 times their context, unscaled and scaled. The key tokens are chosen by each model itself, by
the checkpoint under YaRN for all, and for tiny, whose tales have known probabilities, by a perfect reader.
What `--json` holds already is not measured again.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ropepatch
from ropepatch.data.texts import digest
from ropepatch.evaluation.curves import LossCurve

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from study import Case, Row, Rows, cases_parser, chosen

CASES = (Case("tiny", 4, 48), Case("babyllama-361", 4, 32))
METHODS = ("none", "linear", "ntk", "yarn", "llama3")
OWN, YARN, PERFECT = "itself", "yarn", "perfect reader"
PARTS = (2, 4)  # of L, by which the short window moves


def curves(case: Case, method: str) -> dict[int, LossCurve]:
    """The losses with all the context (0), and in windows of L that move by a part of it."""
    model = case.loaded[0]
    documents, pieces = zip(*case.pieces, strict=True)
    with nullcontext() if method == "none" else ropepatch.patch(model, method, to=case.target):
        slid = [{}, *({"window": case.trained, "stride": case.trained // part} for part in PARTS)]
        read = [ropepatch.perplexity(model, None, pieces, **how) for how in slid]
    return {part: curve.of_documents(documents) for part, curve in zip((0, *PARTS), read, strict=True)}


def perfect(case: Case) -> dict[int, LossCurve]:
    """The same by a perfect reader of tales, whose short window is always the last L tokens."""
    losses = {
        window: tuple(-tale.log_probs(window)[1:] for tale in case.tales) for window in (None, case.trained)
    }
    documents = [document for document, _ in case.pieces]
    full, short = (LossCurve(nll).of_documents(documents) for nll in losses.values())
    return {0: full} | dict.fromkeys(PARTS, short)


def rows_of(case: Case) -> list[Row]:
    """Every method's LongPPL by every scorer's key tokens."""
    read = {method: curves(case, method) for method in METHODS}
    scorers: dict[str, Any] = {OWN: None, YARN: read["yarn"]}
    if case.name == "tiny":
        scorers[PERFECT] = perfect(case)
    rows = []
    for scorer, scored in scorers.items():
        for part in PARTS:
            for method, curve in read.items():
                by = scored or curve
                keys = by[0].key_tokens(by[part])
                longppl = curve[0].long_perplexity(keys)
                rows.append(
                    {
                        "scorer": scorer,
                        "part": part,
                        "method": method,
                        "key": longppl.loss.clusters,
                        "all": curve[0].at(case.target).loss.clusters,
                    }
                )
    return [row | {"digest": digest(ids for _, ids in case.pieces)} for row in rows]


def main() -> None:
    """Measure what the file does not hold yet, and write it after every case."""
    arguments = cases_parser(__doc__).parse_args()
    rows = Rows(arguments.json, "longppl")
    for case in chosen(CASES, arguments.only):
        if len(rows.of(**case.named)) < len(METHODS) * len(PARTS) * (2 + (case.name == "tiny")):
            for row in rows_of(case):
                place = {name: row[name] for name in ("scorer", "part", "method")}
                if not rows.of(**case.named, **place):
                    rows.add(case.named | row, case.loaded[0])
        print(f"{case.name} {case.factor} x: done", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
