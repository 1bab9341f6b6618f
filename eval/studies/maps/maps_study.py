"""Attention maps beside the published formulas, training-free: loss far and near, and passkeys.

    python eval/studies/maps/maps_study.py --json eval/results/attention-maps.json [--only "tiny 4;tiny 8"]

Each model reads windows of factor x L tokens in one pass: the baseline, scaled, and mapped; and once through
its own window L, half a window at a time, which the table subtracts. Passkeys are asked for at the target
where the model can find any. The study resumes from its file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import ropepatch
from ropepatch.attention import MAPS
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import cut_windows, digest
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.comparisons import BASELINE
from ropepatch.evaluation.results import environment, results_json
from ropepatch.files import whole_file
from ropepatch.model.survey import survey

SHARED = Path(__file__).resolve().parents[4] / "shared"
STORIES = SHARED / "texts" / "tinystories" / "true_case.txt"
OWN = "own window"
FORMULAS = ("linear", "ntk", "yarn", "llama3", "giraffe-power")
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Case:
    """A checkpoint at a factor.

    Args:
        name: For the table.
        place: Its folder, or tiny.
        factor: The target over L.
        windows: How many are read.
        haystacks: How many passkeys are asked for; 0 where the model finds none.
        methods: What takes part.
    """

    name: str
    place: str | Path
    factor: int
    windows: int = 24
    haystacks: int = 0
    methods: tuple[str, ...] = (OWN, BASELINE, *FORMULAS, *MAPS)

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        """Model and tokenizer."""
        return ropepatch.load(self.place)

    @cached_property
    def trained(self) -> int:
        """L, in tokens."""
        model = self.loaded[0]
        return survey(model.config.to_dict(), model).rope.original_max_position_embeddings

    @property
    def target(self) -> int:
        """N, in tokens."""
        return self.factor * self.trained

    @cached_property
    def pieces(self) -> list[tuple[int, Any]]:
        """The windows, each with the index of the document in which it begins: tales, or unseen stories."""
        tokenizer = self.loaded[1]
        if self.name == "tiny":
            tales = held_out_tales(tokenizer, length=self.target, count=self.windows)
            return list(enumerate(tale.ids for tale in tales))
        documents = list(stream_documents(STORIES))
        held_out = documents[len(documents) * 17 // 20 :]
        return list(cut_windows(tokenizer, held_out, length=self.target, count=self.windows))

    def within(self, method: str) -> AbstractContextManager[Any]:
        """The model under a method."""
        if method in (OWN, BASELINE):
            return nullcontext()
        return ropepatch.patch(self.loaded[0], method, to=self.target)

    def jobs(self) -> Iterator[tuple[str, str]]:
        """The kind of each measurement, and its method."""
        yield from (("loss", method) for method in self.methods)
        if self.haystacks:
            yield from (("passkey", method) for method in self.methods if method != OWN)


CASES = (
    Case("tiny", "tiny", 4, haystacks=40),
    Case("tiny", "tiny", 8, haystacks=40),
    Case("babyllama-361", SHARED / "checkpoints" / "babyllama-361", 4),
    Case("stories-260k", SHARED / "checkpoints" / "stories-260k", 4),
)


def losses(case: Case, method: str) -> Row:
    """Nats and tokens of each document, in all and within the first L tokens."""
    documents, pieces = zip(*case.pieces, strict=True)
    trained, model = case.trained, case.loaded[0]
    sliding = {"window": trained, "stride": trained // 2} if method == OWN else {}
    curve = ropepatch.perplexity(model, None, pieces, **sliding).of_documents(documents)
    return {
        "all": curve.at(case.target).loss.clusters,
        "short": curve.at(trained).loss.clusters,
        "digest": digest(pieces),
    }


def passkeys(case: Case) -> Row:
    """Keys found at the target, of how many."""
    answers = ropepatch.passkey(*case.loaded, lengths=[case.target], haystacks=case.haystacks)
    found = answers.found(case.target).clusters
    return {"correct": sum(int(one) for one, _ in found), "n": len(found)}


def measure(case: Case, rows: list[Row], write: Callable[[], None]) -> None:
    """Add the rows of a case that are not there."""
    place = {"model": case.name, "factor": case.factor}
    known = {tuple(row[key] for key in ("model", "factor", "kind", "method")) for row in rows}
    for kind, method in case.jobs():
        job = {"kind": kind, "method": method}
        if (*place.values(), *job.values()) in known:
            continue
        began, settings = time.perf_counter(), None
        try:
            with case.within(method) as handle:
                if method in MAPS:
                    settings = handle.distances.described()
                found = losses(case, method) if kind == "loss" else passkeys(case)
        except RopepatchError as error:
            found = {"refused": str(error)}
        seconds = round(time.perf_counter() - began, 1)
        rows.append(
            {**place, "target": case.target, **job, "settings": settings, **found, "seconds": seconds}
        )
        write()
        print(f"{case.name} {case.factor} x: {kind} {method}, {seconds} s", file=sys.stderr, flush=True)


def main() -> None:
    """Measure what the file does not hold yet, and write it after every job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="the file of results")
    parser.add_argument("--only", help='cases, separated by ";": "tiny 4;tiny 8"')
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    known = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json.exists() else {}
    rows: list[Row] = known.get("rows", [])
    env: dict[str, Any] = known.get("env", {})

    def write() -> None:
        record = {"task": "attention maps", "rows": rows, "env": env}
        with whole_file(arguments.json) as partial_file:
            partial_file.write_text(results_json(record) + "\n", encoding="utf-8")

    chosen = arguments.only.split(";") if arguments.only else None
    for case in CASES:
        if chosen and f"{case.name} {case.factor}" not in chosen:
            continue
        env[case.name] = environment(case.loaded[0])
        measure(case, rows, write)


if __name__ == "__main__":
    main()
