"""Distillation beside cross-entropy: what is left of the excess, by the rows that are read.

    python eval/studies/distil/distil_study.py --json eval/results/distil.json --work DIR [--only CASE]

A checkpoint is extended, trained on rows of one kind by the same recipe but for the loss, and judged on what
it was made from and no row is from: over the whole target, within the first L tokens, and in the last
quarter. That is stories for those that were trained on TinyStories, and tales for tiny, whose floor is known.
Beside it stand the base through its own window (or the floor), the base under the teacher's map, and the
scaling without training. What `--json` holds already is not trained again; an interrupted training resumes
from its folder in `--work`.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ropepatch
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import digest
from ropepatch.scaling.file import FIT
from ropepatch.training.recipe import Recipe

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

import study
from study import FLOOR, OWN, SHARED, STORIES, Row, Rows, adapted, cases_parser, chosen, said, trained_on

TEXTS = {
    "fairy tales": SHARED / "texts" / "fairytales",
    "wikitext": SHARED / "texts" / "wikitext2" / "test.raw.txt",
    "own kind": Path("own.txt"),  # of the work folder, as the next
    "random tokens": Path("random.jsonl"),
}
SELF = "self-written"
SUITED = ("fairy tales", SELF)  # for tiny: what is like no generator of its rows
TEACHER, UNTRAINED = "teacher", "untrained"
DISTILLED, CROSS_ENTROPY = "distillation", "cross-entropy"
STEPS = 300
FIT_MINUTES = 3


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
        temperature: Of a distillation.
    """

    rows: str = "fairy tales"
    loss: str = DISTILLED
    skipped: bool = False
    method: str = "yarn"
    seed: int = 0
    learning_rate: float = 4e-3
    temperature: float = 2.0


BY_TEXT: Row = {"loss": CROSS_ENTROPY, "learning_rate": 1e-3, "temperature": 1.0}
TRIALS = (
    Trial(),
    Trial(rows=SELF),
    Trial(**BY_TEXT),
    Trial(skipped=True),
    Trial(rows=SELF, skipped=True),
    Trial(rows=SELF, temperature=1.0),
    Trial(temperature=1.0),
    Trial(rows=SELF, temperature=3.0),
    Trial(temperature=3.0),
    Trial(rows=SELF, skipped=True, temperature=3.0),
    Trial(rows="wikitext"),
    Trial(rows="own kind"),
    Trial(rows="own kind", **BY_TEXT),
    Trial(rows="random tokens"),
    Trial(method=FIT),
    Trial(method="llama3"),
    *(Trial(rows=rows, seed=seed) for seed in (1, 2) for rows in ("fairy tales", SELF)),
)


class Case(study.Case):
    """A checkpoint at a factor, and its recipes."""

    @property
    def map(self) -> dict[str, Any]:
        """Under which the teacher reads rows of the target."""
        return {"name": "rerope", "window": self.trained * 3 // 4}

    def texts(self, work: Path) -> dict[str, Path]:
        """The texts of the trials; those of the work folder are written."""
        documents = [str(one) for one in stream_documents(STORIES)]
        kept, vocabulary = trained_on(documents), len(self.loaded[1])
        for name, part in {"own.txt": documents[:kept], "held-out.txt": documents[kept:]}.items():
            (work / name).write_text("\n<|endoftext|>\n".join(part), encoding="utf-8")
        draw = random.Random(0)
        rows = [[draw.randrange(3, vocabulary) for _ in range(self.target)] for _ in range(2 * STEPS)]
        lines = (json.dumps({"input_ids": row}) + "\n" for row in rows)
        (work / "random.jsonl").write_text("".join(lines), encoding="utf-8")
        return {name: path if path.is_absolute() else work / path for name, path in TEXTS.items()}

    def method(self, name: str, work: Path) -> str:
        """A scaling; that of a fit is a file, made from fairy tales if the work folder has none."""
        if name != FIT:
            return name
        file = work / f"{self.name}-{self.factor}-fit.json"
        if not file.exists():
            text = str(TEXTS["fairy tales"])
            ropepatch.fit(self.place, to=self.target, text=text, minutes=FIT_MINUTES, say=said).save(file)
        return str(file)

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
                "method": self.method(trial.method, work),
                "seed": trial.seed,
                "data": {
                    "sources": [source],
                    "windows": [self.trained if trial.skipped else self.target],
                    "tokens_per_batch": 2 * self.target,
                    "boundaries": False,
                },
                "positions": {"name": "pose", "chunks": 2} if trial.skipped else "true-length",
                "lora": {"r": 16, "lora_alpha": 32, "train_norms": False},
                "distil": {"map": self.map, "temperature": trial.temperature}
                if trial.loss == DISTILLED
                else None,
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
    Case("tiny", 8),
)


def floor(case: Case) -> Row:
    """The loss of tales that no model beats, as `Case.losses` has it."""
    nats = [-tale.log_probs()[1:] for tale in case.tales]
    spans = {"all": (0, case.target), "short": (0, case.trained), "last": (case.target * 3 // 4, case.target)}
    row: Row = {"of": FLOOR, "digest": digest(ids for _, ids in case.pieces)}
    for name, (begin, end) in spans.items():
        row[name] = [[one[max(begin - 1, 0) : end - 1].sum().item(), end - max(begin, 1)] for one in nats]
    return row


def references(case: Case) -> Iterator[Row]:
    """What the trials are held against: the least loss, and the teacher's."""
    model = case.loaded[0]
    if case.name == "tiny":
        yield floor(case)
    else:
        yield {"of": OWN} | case.through_own_window()
    name, parameters = case.map["name"], {"window": case.map["window"]}
    with ropepatch.patch(model, name, to=case.target, **parameters):
        yield {"of": TEACHER} | case.losses(model)


def untrained(case: Case, method: str, work: Path) -> Row:
    """A scaling without training."""
    model = case.loaded[0]
    with ropepatch.patch(model, case.method(method, work), to=case.target):
        return {"of": UNTRAINED, "method": method} | case.losses(model)


def trained(case: Case, trial: Trial, work: Path) -> Row:
    """Train, measure, and keep no weights."""
    recipe = case.recipe(trial, work)
    plan = ropepatch.plan(case.place, to=case.target, method=case.method(trial.method, work))
    name = "-".join(str(value).replace(" ", "-") for value in vars(trial).values())
    out = work / f"{case.name}-{case.factor}-{name}"
    with adapted(plan, recipe, out) as (model, record):
        row = {"of": "trial", **vars(trial), **case.losses(model)}
        return row | {key: record[key] for key in ("steps", "tokens", "seconds", "device")}


def main() -> None:
    """Measure what the file does not hold yet, and write it after every row."""
    parser = cases_parser(__doc__, work=True)
    parser.add_argument("--trials", type=int, default=len(TRIALS), help="of each case at most so many")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    rows = Rows(arguments.json, "distillation")

    def add(case: Case, row: Row, began: float) -> None:
        wall = round(time.perf_counter() - began, 1)
        row = case.named | {"wall": wall, "threads": torch.get_num_threads()} | row
        rows.add(row, case.loaded[0])
        said(f"{case.name} {case.factor} x: {row['of']}, {wall} s")

    for case in chosen(CASES, arguments.only):
        trials = [
            trial for trial in TRIALS[: arguments.trials] if case.name != "tiny" or trial.rows in SUITED
        ]
        began = time.perf_counter()
        if not rows.of(**case.named):
            for row in references(case):
                add(case, row, began)
        for method in dict.fromkeys(trial.method for trial in trials):
            if not rows.of(**case.named, of=UNTRAINED, method=method):
                add(case, untrained(case, method, arguments.work), began)
        for trial in trials:
            if not rows.of(**case.named, of="trial", **vars(trial)):
                began = time.perf_counter()
                add(case, trained(case, trial, arguments.work), began)


if __name__ == "__main__":
    main()
