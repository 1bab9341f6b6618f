"""How much of the loss beyond the trained window other means than learned frequencies remove.

    python eval/studies/fit/other_means.py --json eval/results/other-means.json
    python eval/studies/fit/other_means.py --json FILE --only "tiny 4;tiny 8" --threads 1

Excess loss: in one pass over windows of factor x L tokens, less the base model's on the same tokens read
through its own window L, half a window at a time. Where far context helps it is below 0; for tiny, whose
tales have a least possible loss, shares are therefore of what is above that. Settings are chosen on other
texts than those of the rows: stories from the first 70 % of the documents against the last 15 %, tales of
other seeds for tiny.
Restartable: rows in the file are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from means import MEANS, Case, Reading, Row

import ropepatch
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import cut_windows, digest
from ropepatch.data.tiny.tales import Narrator, held_out_tales
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.results import environment, results_json
from ropepatch.files import whole_file
from ropepatch.model.survey import survey
from ropepatch.settings import seed_of

SHARED = Path(__file__).resolve().parents[4] / "shared"
STORIES = SHARED / "texts" / "tinystories" / "true_case.txt"
CASES = [("babyllama-361", 4), ("stories-260k", 4), ("tiny", 4), ("tiny", 8)]
TO_TEST, TO_CHOOSE = 24, 12 * 1024  # windows, tokens


def case_of(name: str, factor: int) -> Case:
    """The case of a checkpoint, by its name in CASES, at a factor."""
    model, tokenizer = ropepatch.load("tiny" if name == "tiny" else SHARED / "checkpoints" / name)
    rope = survey(model.config.to_dict(), model).rope
    trained = rope.original_max_position_embeddings
    length = factor * trained
    few = TO_CHOOSE // length
    floor = None
    if name == "tiny":
        narrator = Narrator(tokenizer)
        others = [narrator.tale(length, seed_of("fit", index)).ids for index in range(few)]
        tales = held_out_tales(tokenizer, length=length, count=TO_TEST)
        floor = LossCurve(tuple(-tale.log_probs()[1:] for tale in tales)).at(length).mean
        held_out = [tale.ids for tale in tales]
    else:
        documents = list(stream_documents(STORIES))
        first, last = documents[: len(documents) * 7 // 10], documents[len(documents) * 17 // 20 :]
        others, held_out = (
            [ids for _, ids in cut_windows(tokenizer, part, length=length, count=count)]
            for part, count in ((first, few), (last, TO_TEST))
        )
    choosing, testing = (Reading(model, trained, pieces) for pieces in (others, held_out))
    return Case(name, factor, model, rope, choosing, testing, floor)


def measure(name: str, factor: int, rows: list[Row], write: Callable[[], None]) -> None:
    """Add the rows of a case that are not there."""
    found = {row["mean"]: row for row in rows if (row["model"], row["factor"]) == (name, factor)}
    missing = [mean for mean in MEANS if mean not in found]
    if not missing:
        return
    case = case_of(name, factor)
    for mean in missing:
        began = time.perf_counter()
        row = MEANS[mean](case, found)
        if row is None:
            continue
        base = case.testing.base.at(case.testing.length).mean
        least = 0.0 if case.floor is None else case.floor - base
        share = (row["excess"] - least) / (found.get("published", row)["excess"] - least)
        found[mean] = {
            "model": name,
            "factor": factor,
            "mean": mean,
            **row,
            "share_of_published": share,
            "base": base,
            "floor": case.floor,
            "windows": len(case.testing.pieces),
            "windows_to_choose": len(case.choosing.pieces),
            "digest": digest(case.testing.pieces),
            "seconds": time.perf_counter() - began,
        }
        rows.append(found[mean])
        write()
        print(f"{name} {factor} x {mean}: {row['excess']:.4f}, {share:.0%}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="the file of results")
    parser.add_argument("--only", help='cases, separated by ";": "tiny 4;tiny 8"')
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    known = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json.exists() else {}
    rows: list[Row] = known.get("rows", [])

    def write() -> None:
        record = {"task": "other means", "rows": rows, "env": environment(ropepatch.load("tiny")[0])}
        with whole_file(arguments.json) as partial_file:
            partial_file.write_text(results_json(record) + "\n", encoding="utf-8")

    cases = [case.rsplit(" ", 1) for case in arguments.only.split(";")] if arguments.only else CASES
    for name, factor in cases:
        measure(name, int(factor), rows, write)


if __name__ == "__main__":
    main()
