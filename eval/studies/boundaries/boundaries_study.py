"""Rows of several documents, masked from each other or not: what a training at the target makes of either.

    python eval/studies/boundaries/boundaries_study.py --json eval/results/boundaries.json --work DIR

A checkpoint is extended 4 times by YaRN and trained by the same recipe on the same rows of the target, most
of which hold several documents, with `data.boundaries` true (a token attends to its own document, whose
positions begin at 0) and false (the row is one document). Both are judged on windows of joined documents and
on documents that are as long as the target. What `--json` holds already is not trained again; an interrupted
training resumes from its folder in `--work`.
"""

from __future__ import annotations

import json
import random
import sys
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import ropepatch
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import digest
from ropepatch.data.tiny.tales import Narrator
from ropepatch.settings import seed_of
from ropepatch.training.recipe import Recipe

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from study import SHARED, STORIES, Case, Row, Rows, adapted, cases_parser, chosen, said, trained_on

FAIRY_TALES = SHARED / "texts" / "fairytales"
CASES = (Case("tiny", 4), Case("babyllama-361", 4))
SEEDS = (0, 1, 2)
STEPS = 150
ROWS = 2  # of a step
JOINED, LONG = "joined", "long"
UNTRAINED = "untrained"


def source(case: Case, work: Path) -> dict[str, str]:
    """Documents of the checkpoint's own kind, most of them shorter than the target, none that is judged."""
    if case.name != "tiny":
        documents = [str(one) for one in stream_documents(STORIES)]
        file = work / "stories.txt"
        kept = documents[: trained_on(documents)]
        file.write_text("\n<|endoftext|>\n".join(kept), encoding="utf-8")
        return {"text": str(file)}
    narrator, draw = Narrator(case.loaded[1]), random.Random(0)
    file, told, lines = work / "tales.jsonl", 0, []
    while told < STEPS * ROWS * case.target:
        length = draw.choice([case.target >> step for step in range(4)])
        ids = narrator.tale(length, seed_of("boundaries", len(lines))).ids.tolist()
        lines.append(json.dumps({"input_ids": ids}))
        told += length
    file.write_text("\n".join(lines), encoding="utf-8")
    return {"text": str(file), "field": "input_ids"}


def recipe_of(case: Case, texts: dict[str, str], *, boundaries: bool, seed: int) -> Recipe:
    """LoRA by cross-entropy on rows of the target."""
    return Recipe.model_validate(
        {
            "model": str(case.place),
            "to": case.target,
            "method": "yarn",
            "seed": seed,
            "data": {
                "sources": [texts],
                "windows": [case.target],
                "tokens_per_batch": ROWS * case.target,
                "boundaries": boundaries,
            },
            "positions": "true-length",
            "lora": {"r": 16, "lora_alpha": 32, "train_norms": False},
            "trainer": {
                "max_steps": STEPS,
                "learning_rate": 1e-3,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 10,
                "weight_decay": 0.0,
                "save_steps": 50,
                "bf16": False,
            },
            "watch": {
                "every": STEPS,
                "windows": 2,
                "passkey_trials": 0,
                "max_short_loss_increase": 0.99,
            },
        }
    )


def pieces(case: Case) -> dict[str, list[tuple[int, Any]]]:
    """Windows of joined documents, and of one document each; tiny's tales are as long as the target."""
    if case.name == "tiny":
        tales = case.pieces
        quarter = case.target // 4
        narrator = Narrator(case.loaded[1])
        short = [narrator.tale(quarter, seed_of("joined", n)).ids.tolist() for n in range(4 * case.windows)]
        joined = [
            list(chain.from_iterable(short[begin:end]))
            for begin, end in pairwise(range(0, len(short) + 1, 4))
        ]
        return {JOINED: list(enumerate(joined)), LONG: tales}
    tokenizer = case.loaded[1]
    texts = (str(one) for one in stream_documents(FAIRY_TALES))
    encoded = (tokenizer.encode(text)[: case.target] for text in texts)
    long = [ids for ids in encoded if len(ids) == case.target]
    return {JOINED: case.pieces, LONG: list(enumerate(long[: case.windows]))}


def judged(case: Case, model: Any) -> Row:
    """Nats and tokens by document, of either reading: in all, within L, and in the last quarter."""
    row: Row = {}
    for name, windows in pieces(case).items():
        documents, ids = zip(*windows, strict=True)
        curve = ropepatch.perplexity(model, None, ids).of_documents(documents)
        row[name] = {
            "all": curve.at(case.target).loss.clusters,
            "short": curve.at(case.trained).loss.clusters,
            "last": curve.between(case.target * 3 // 4, case.target).loss.clusters,
            "digest": digest(ids),
        }
    return row


def main() -> None:
    """Train what the file does not hold yet, and write it after every training."""
    arguments = cases_parser(__doc__, work=True).parse_args()
    rows = Rows(arguments.json, "boundaries")
    for case in chosen(CASES, arguments.only):
        work = arguments.work / case.name
        work.mkdir(parents=True, exist_ok=True)
        if not rows.of(**case.named, boundaries=UNTRAINED):
            model = case.loaded[0]
            with ropepatch.patch(model, "yarn", to=case.target):
                rows.add(case.named | {"boundaries": UNTRAINED} | judged(case, model), model)
        texts = source(case, work)
        for seed in SEEDS:
            for boundaries in (True, False):
                if rows.of(**case.named, boundaries=boundaries, seed=seed):
                    continue
                plan = ropepatch.plan(case.place, to=case.target, method="yarn")
                recipe = recipe_of(case, texts, boundaries=boundaries, seed=seed)
                named = {"boundaries": boundaries, "seed": seed, "steps": STEPS}
                with adapted(plan, recipe, work / f"{boundaries}-{seed}") as (model, record):
                    row = case.named | named | {"seconds": record["seconds"]} | judged(case, model)
                    rows.add(row, model)
                said(f"{case.name}, boundaries {boundaries}, seed {seed}: {record['seconds']:.0f} s")


if __name__ == "__main__":
    main()
