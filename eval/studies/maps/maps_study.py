"""Attention maps beside the published formulas, training-free: loss far and near, and passkeys.

    python eval/studies/maps/maps_study.py --json eval/results/attention-maps.json [--only "tiny 4;tiny 8"]

Each model reads windows of factor x L tokens in one pass: as it is, scaled, and mapped; and once through its
own window L, half a window at a time, which the table subtracts. Passkeys are asked for at the target where
the model can find any. Of SmolLM2 one window and one key per depth at a time are read by all, until as many
are there as `CASES` says: the study can be stopped at any time, and goes on from its file.
"""

from __future__ import annotations

import argparse
import json
import os
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
from ropepatch.data.texts import digest, windows
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.protocols import Sliding
from ropepatch.evaluation.results import environment
from ropepatch.files import whole_file
from ropepatch.model.survey import survey

SHARED = Path(__file__).resolve().parents[4] / "shared"
SMOLLM2 = Path(os.environ.get("SMOLLM2", "smollm2-135m-instruct"))  # what shared/checkpoints/.../make.py made
STORIES, NOVELS = SHARED / "texts" / "tinystories" / "true_case.txt", SHARED / "texts" / "novels"
OWN, AS_IT_IS = "own window", "as it is"
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
        at_once: How many of them one job reads.
        depths: At which a job asks for passkeys; none where the model finds none.
        trials: Keys per depth and job.
        methods: What takes part.
    """

    name: str
    place: str | Path
    factor: int
    windows: int = 24
    at_once: int = 24
    depths: tuple[float, ...] = ()
    trials: int = 8
    methods: tuple[str, ...] = (OWN, AS_IT_IS, *FORMULAS, *MAPS)

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
    def pieces(self) -> list[Any]:
        """The windows: held-out tales, the last 15 % of the stories, or novels."""
        tokenizer = self.loaded[1]
        if self.name == "tiny":
            return [t.ids for t in held_out_tales(tokenizer, length=self.target, count=self.windows)]
        documents = list(stream_documents(NOVELS if self.name.startswith("smol") else STORIES))
        held_out = documents if self.name.startswith("smol") else documents[len(documents) * 17 // 20 :]
        return list(windows(tokenizer, held_out, length=self.target, count=self.windows))

    def within(self, method: str) -> AbstractContextManager[Any]:
        """The model under a method."""
        if method in (OWN, AS_IT_IS):
            return nullcontext()
        return ropepatch.patch(self.loaded[0], method, to=self.target)

    def jobs(self) -> Iterator[tuple[str, str, int]]:
        """What is measured, of which method, and which part of it."""
        for part in range(self.windows // self.at_once):
            yield from (("loss", method, part) for method in self.methods)
            if self.depths:
                yield from (("passkey", method, part) for method in self.methods if method != OWN)


DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
FAR = ("yarn", "self-extend", "rerope", "dca", "lambda", "lampe")
CASES = (
    Case("tiny", "tiny", 4, depths=DEPTHS),
    Case("tiny", "tiny", 8, depths=DEPTHS),
    Case("babyllama-361", SHARED / "checkpoints" / "babyllama-361", 4),
    Case("stories-260k", SHARED / "checkpoints" / "stories-260k", 4),
    Case("smollm2-135m-instruct", SMOLLM2, 2, 12, 1, (0.1, 0.5, 0.9), 1, (OWN, AS_IT_IS, *FAR)),
)


def losses(case: Case, method: str, part: int) -> Row:
    """Nats and tokens of each window, in all and within the first L tokens."""
    pieces = case.pieces[part * case.at_once : (part + 1) * case.at_once]
    trained, model = case.trained, case.loaded[0]
    protocol = {"protocol": Sliding(trained, trained // 2)} if method == OWN else {}
    curve = ropepatch.perplexity(model, None, pieces, **protocol)
    return {
        "all": curve.at(case.target).documents,
        "short": curve.at(trained).documents,
        "digest": digest(pieces),
    }


def passkeys(case: Case, part: int) -> Row:
    """Keys found at the target, of how many."""
    model, tokenizer = case.loaded
    asked: dict[str, Any] = {"depths": case.depths, "trials": case.trials, "seed": part}
    found = ropepatch.passkey(model, tokenizer, lengths=[case.target], **asked).at(case.target)
    return {"correct": found.correct, "n": found.n}


def measure(case: Case, rows: list[Row], write: Callable[[], None]) -> None:
    """Add the rows of a case that are not there."""
    place = {"model": case.name, "factor": case.factor}
    known = {tuple(row[key] for key in ("model", "factor", "kind", "method", "part")) for row in rows}
    for kind, method, part in case.jobs():
        job = {"kind": kind, "method": method, "part": part}
        if (*place.values(), *job.values()) in known:
            continue
        began, settings = time.perf_counter(), None
        try:
            with case.within(method) as handle:
                if method in MAPS:
                    settings = handle.distances.described()
                found = losses(case, method, part) if kind == "loss" else passkeys(case, part)
        except RopepatchError as error:
            found = {"refused": str(error)}
        seconds = round(time.perf_counter() - began, 1)
        rows.append(
            {**place, "target": case.target, **job, "settings": settings, **found, "seconds": seconds}
        )
        write()
        print(
            f"{case.name} {case.factor} x: {kind} {method} {part}, {seconds} s", file=sys.stderr, flush=True
        )


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
            partial_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    chosen = arguments.only.split(";") if arguments.only else None
    for case in CASES:
        if chosen and f"{case.name} {case.factor}" not in chosen:
            continue
        env[case.name] = environment(case.loaded[0])
        measure(case, rows, write)


if __name__ == "__main__":
    main()
