"""Attention maps beside the published formulas, training-free: loss far and near, and passkeys.

    python eval/studies/maps/maps_study.py --json eval/results/attention-maps.json [--only "tiny 4;tiny 8"]

Each model reads windows of factor x L tokens in one pass: the baseline, scaled, and mapped; and once through
its own window L, half a window at a time, which the table subtracts. Passkeys are asked for at the target
where the model can find any. The study resumes from its file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ropepatch
from ropepatch.attention import MAPS
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import BASELINE

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

import study
from study import OWN, Row, Rows, cases_parser, chosen

FORMULAS = ("linear", "ntk", "yarn", "llama3", "giraffe-power")
LOG_N = " with log_n"  # of a map's name: scores grow with the logarithm of the position


@dataclass(frozen=True)
class Case(study.Case):
    """A checkpoint at a factor.

    Args:
        haystacks: How many passkeys are asked for; 0 where the model finds none.
        methods: What takes part.
    """

    haystacks: int = 0
    methods: tuple[str, ...] = (OWN, BASELINE, *FORMULAS, *MAPS, f"rerope{LOG_N}", f"dca{LOG_N}")

    def within(self, method: str) -> AbstractContextManager[Any]:
        """The model under a method."""
        if method in (OWN, BASELINE):
            return nullcontext()
        given = {"log_n": True} if LOG_N in method else {}
        return ropepatch.patch(self.loaded[0], method.removesuffix(LOG_N), to=self.target, **given)

    def jobs(self) -> Iterator[tuple[str, str]]:
        """The kind of each measurement, and its method."""
        yield from (("loss", method) for method in self.methods)
        if self.haystacks:
            yield from (("passkey", method) for method in self.methods if method != OWN)


CASES = (
    Case("tiny", 4, haystacks=40),
    Case("tiny", 8, haystacks=40),
    Case("babyllama-361", 4),
    Case("stories-260k", 4),
)


def losses(case: Case, method: str) -> Row:
    """The losses of a method, which is in the model."""
    return case.through_own_window() if method == OWN else case.losses(case.loaded[0])


def passkeys(case: Case) -> Row:
    """Keys found at the target, of how many."""
    answers = ropepatch.passkey(*case.loaded, lengths=[case.target], haystacks=case.haystacks)
    found = answers.found(case.target).clusters
    return {"correct": sum(int(one) for one, _ in found), "n": len(found)}


def measure(case: Case, rows: Rows) -> None:
    """Add the rows of a case that are not there."""
    for kind, method in case.jobs():
        if rows.of(**case.named, kind=kind, method=method):
            continue
        began, settings = time.perf_counter(), None
        try:
            with case.within(method) as handle:
                if method.removesuffix(LOG_N) in MAPS:
                    settings = handle.distances.described()
                found = losses(case, method) if kind == "loss" else passkeys(case)
        except RopepatchError as error:
            found = {"refused": str(error)}
        seconds = round(time.perf_counter() - began, 1)
        job = {"kind": kind, "method": method, "settings": settings}
        rows.add(case.named | job | found | {"seconds": seconds}, case.loaded[0])
        print(f"{case.name} {case.factor} x: {kind} {method}, {seconds} s", file=sys.stderr, flush=True)


def main() -> None:
    """Measure what the file does not hold yet, and write it after every job."""
    parser = cases_parser(__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = Rows(arguments.json, "attention maps")
    for case in chosen(CASES, arguments.only):
        measure(case, rows)


if __name__ == "__main__":
    main()
