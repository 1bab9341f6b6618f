"""Distillation beside cross-entropy: what is left of the excess, by the rows that are read.

    python eval/studies/distil/distil_study.py --json eval/results/distil.json --work DIR [--only CASE]

Each checkpoint was trained on TinyStories. It is extended, trained on rows of one kind by the same recipe
but for the loss, and judged on stories that no row is from: over the whole target, within the first L tokens,
and in the last quarter. Beside it stand the base through its own window, the base under the teacher's map,
and the scaling without training. What `--json` holds already is not trained again; a training that was
stopped goes on from its folder in `--work`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import ropepatch
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import digest, windows
from ropepatch.evaluation.protocols import Sliding
from ropepatch.evaluation.results import environment
from ropepatch.files import whole_file
from ropepatch.model.survey import survey
from ropepatch.training.recipe import Recipe

SHARED = Path(__file__).resolve().parents[4] / "shared"
STORIES = SHARED / "texts" / "tinystories" / "true_case.txt"
TEXTS = {
    "fairy tales": SHARED / "texts" / "fairytales",
    "wikitext": SHARED / "texts" / "wikitext2" / "test.raw.txt",
    "own kind": Path("own.txt"),  # of the work folder, as the next
    "random tokens": Path("random.jsonl"),
}
SELF = "self-written"
OWN, TEACHER, UNTRAINED = "own window", "teacher", "untrained"
DISTILLED, CROSS_ENTROPY = "distillation", "cross-entropy"
WINDOWS, STEPS = 24, 300
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training.

    Args:
        rows: What is read: one of `TEXTS`, or what the model writes itself.
        loss: Distillation or cross-entropy.
        skipped: Rows of the old context at skipped positions, in place of rows of the target.
        method: The scaling.
        seed: Of adapter and rows.
        learning_rate: The greatest.
    """

    rows: str = "fairy tales"
    loss: str = DISTILLED
    skipped: bool = False
    method: str = "yarn"
    seed: int = 0
    learning_rate: float = 4e-3


TRIALS = (
    Trial(),
    Trial(rows=SELF),
    Trial(loss=CROSS_ENTROPY, learning_rate=1e-3),
    Trial(rows=SELF, skipped=True),
    Trial(skipped=True),
    Trial(rows="wikitext"),
    Trial(rows="own kind", loss=CROSS_ENTROPY, learning_rate=1e-3),
    Trial(rows="own kind"),
    Trial(rows=SELF, loss=CROSS_ENTROPY, learning_rate=1e-3),
    Trial(rows="random tokens"),
    Trial(method="llama3"),
    *(Trial(rows=rows, seed=seed) for seed in (1, 2) for rows in ("fairy tales", SELF)),
    *(Trial(rows=rows, learning_rate=1e-3) for rows in ("fairy tales", SELF)),
)


@dataclass(frozen=True)
class Case:
    """A checkpoint at a factor."""

    name: str
    factor: int

    @property
    def place(self) -> Path:
        """Its folder."""
        return SHARED / "checkpoints" / self.name

    @cached_property
    def base(self) -> tuple[Any, Any]:
        """Model and tokenizer."""
        return ropepatch.load(self.place)

    @cached_property
    def trained(self) -> int:
        """L, in tokens."""
        model = self.base[0]
        return survey(model.config.to_dict(), model).rope.original_max_position_embeddings

    @property
    def target(self) -> int:
        """N, in tokens."""
        return self.factor * self.trained

    @property
    def map(self) -> dict[str, Any]:
        """Under which the teacher reads rows of the target."""
        return {"name": "rerope", "window": self.trained * 3 // 4}

    @cached_property
    def pieces(self) -> list[list[int]]:
        """Windows of stories that no row is from."""
        documents = list(stream_documents(STORIES))
        return windows(self.base[1], documents[_kept(documents) :], length=self.target, count=WINDOWS)

    def texts(self, work: Path) -> dict[str, Path]:
        """The texts of the trials; those of the work folder are written."""
        documents = [str(one) for one in stream_documents(STORIES)]
        kept, vocabulary = _kept(documents), len(self.base[1])
        for name, part in {"own.txt": documents[:kept], "held-out.txt": documents[kept:]}.items():
            (work / name).write_text("\n<|endoftext|>\n".join(part), encoding="utf-8")
        draw = random.Random(0)
        rows = [[draw.randrange(3, vocabulary) for _ in range(self.target)] for _ in range(2 * STEPS)]
        lines = (json.dumps({"input_ids": row}) + "\n" for row in rows)
        (work / "random.jsonl").write_text("".join(lines), encoding="utf-8")
        return {name: path if path.is_absolute() else work / path for name, path in TEXTS.items()}

    def recipe(self, trial: Trial, work: Path) -> Recipe:
        """The recipe of a trial: 2 x N tokens a step, whatever the rows."""
        texts = self.texts(work)
        source = {"generated": "self"} if trial.rows == SELF else {"text": str(texts[trial.rows])}
        if trial.rows == "random tokens":
            source["field"] = "input_ids"
        return Recipe.model_validate(
            {
                "model": str(self.place),
                "to": self.target,
                "method": trial.method,
                "seed": trial.seed,
                "data": {
                    "sources": [source],
                    "windows": [self.trained if trial.skipped else self.target],
                    "tokens_per_batch": 2 * self.target,
                    "boundaries": False,
                },
                "positions": {"name": "pose", "chunks": 2} if trial.skipped else "true-length",
                "lora": {"r": 16, "lora_alpha": 32, "train_norms": False},
                "distil": {"map": self.map} if trial.loss == DISTILLED else None,
                "trainer": {
                    "max_steps": STEPS,
                    "learning_rate": trial.learning_rate,
                    "lr_scheduler_type": "cosine",
                    "warmup_steps": 10,
                    "weight_decay": 0.0,
                    "save_steps": 50,
                    "bf16": False,
                },
                "watch": {
                    "every": STEPS,
                    "text": str(work / "held-out.txt"),
                    "windows": 2,
                    "passkey_trials": 0,
                    "max_short_loss_increase": 0.99,
                },
            }
        )


CASES = (
    Case("babyllama-361", 4),
    Case("babyllama-361", 8),
    Case("stories-260k", 4),
    Case("stories-260k", 8),
)


def _kept(documents: list[Any]) -> int:
    """How many of the stories may be trained on."""
    return len(documents) * 17 // 20


def measured(case: Case, model: Any, **how: Any) -> Row:
    """Nats and tokens of each window: over the target, within the first L tokens, in the last quarter."""
    curve = ropepatch.perplexity(model, None, case.pieces, **how)
    return {
        "all": curve.at(case.target).documents,
        "short": curve.at(case.trained).documents,
        "last": curve.between(case.target * 3 // 4, case.target).documents,
        "digest": digest(case.pieces),
    }


def bounds(case: Case, methods: list[str]) -> Iterator[Row]:
    """What the trials stand between."""
    model = case.base[0]
    yield {"of": OWN} | measured(case, model, protocol=Sliding(case.trained, case.trained // 2))
    name, parameters = case.map["name"], {"window": case.map["window"]}
    with ropepatch.patch(model, name, to=case.target, **parameters):
        yield {"of": TEACHER} | measured(case, model)
    for method in methods:
        with ropepatch.patch(model, method, to=case.target):
            yield {"of": UNTRAINED, "method": method} | measured(case, model)


def trained(case: Case, trial: Trial, work: Path) -> Row:
    """Train, measure, and keep no weights."""
    recipe = case.recipe(trial, work)
    plan = ropepatch.plan(case.place, to=case.target, method=trial.method)
    name = "-".join(str(value).replace(" ", "-") for value in vars(trial).values())
    out = work / f"{case.name}-{case.factor}-{name}"
    adapted = ropepatch.adapt(plan, recipe, out, say=lambda line: print(line, file=sys.stderr, flush=True))
    record = json.loads((adapted.folder / "ropepatch.json").read_text())["adaptation"]
    model, _ = ropepatch.load(adapted.folder)
    row = {"of": "trial", **vars(trial), **measured(case, model.float())}
    shutil.rmtree(out)
    return row | {key: record[key] for key in ("steps", "tokens", "seconds", "device")}


def main() -> None:
    """Measure what the file does not hold yet, and write it after every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="the file of results")
    parser.add_argument("--work", type=Path, required=True, help="the folder of the trainings")
    parser.add_argument("--only", help='cases, separated by ";": "babyllama-361 4"')
    parser.add_argument("--trials", type=int, default=len(TRIALS), help="of each case at most so many")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    known = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json.exists() else {}
    rows: list[Row] = known.get("rows", [])
    env: dict[str, Any] = known.get("env", {})

    def add(case: Case, row: Row, began: float) -> None:
        wall = round(time.perf_counter() - began, 1)
        rows.append({"model": case.name, "factor": case.factor, "target": case.target, "wall": wall} | row)
        record = {"task": "distillation", "rows": rows, "env": env}
        with whole_file(arguments.json) as partial_file:
            partial_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"{case.name} {case.factor} x: {row['of']}, {wall} s", file=sys.stderr, flush=True)

    chosen = arguments.only.split(";") if arguments.only else None
    for case in CASES:
        if chosen and f"{case.name} {case.factor}" not in chosen:
            continue
        here = [row for row in rows if (row["model"], row["factor"]) == (case.name, case.factor)]
        env[case.name] = environment(case.base[0]) | {"threads": torch.get_num_threads()}
        if not here:
            began = time.perf_counter()
            for row in bounds(case, list(dict.fromkeys(trial.method for trial in TRIALS))):
                add(case, row, began)
        done = [{key: row[key] for key in vars(Trial())} for row in here if row["of"] == "trial"]
        for trial in TRIALS[: arguments.trials]:
            if vars(trial) not in done:
                began = time.perf_counter()
                add(case, trained(case, trial, arguments.work), began)


if __name__ == "__main__":
    main()
