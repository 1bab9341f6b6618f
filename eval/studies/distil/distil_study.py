"""Distillation next to cross-entropy: the excess loss that remains, by the kind of training text.

    python eval/studies/distil/distil_study.py --work DIR [--only "model=tiny"]

A checkpoint is extended and trained on sequences of one kind, with the same recipe except for the loss.
It is measured on text of its own kind that no training sequence is from: over the target length, within
the first L tokens, and in the last quarter. That is stories for the models made from TinyStories, and
tiny's stories, whose floor is known. The references are the base model within its original length (or the
floor), the base model with the teacher's remapping, and the scaling without training. An interrupted
training resumes from its folder in `--work`.
"""

from __future__ import annotations

import json
import random
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ropepatch
from ropepatch.data.sources import stream_documents
from ropepatch.evaluation.intervals import Mean
from ropepatch.scaling.file import FIT
from ropepatch.training.recipe import Recipe

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from study import (
    FLOOR,
    OWN,
    SHARED,
    STORIES,
    Checkpoint,
    Row,
    Study,
    adapted,
    by_case,
    checkpoint,
    excess,
    log_line,
    signed,
    table,
    trained_on,
)

TEXTS = {
    "fairy tales": SHARED / "texts" / "fairytales",
    "wikitext": SHARED / "texts" / "wikitext2" / "test.raw.txt",
    "own kind": Path("own.txt"),  # in the work folder, like the next
    "random tokens": Path("random.jsonl"),
}
SELF = "self-written"
TEACHER, UNTRAINED, TRIAL = "teacher", "untrained", "trial"
DISTILLED, CROSS_ENTROPY = "distillation", "cross-entropy"
STEPS, FIT_MINUTES = 300, 3


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training.

    Args:
        rows: The training text: one of `TEXTS`, or self-written.
        loss: Distillation or cross-entropy.
        skipped: Sequences of the original length at skipped positions, instead of ones of the target length.
        method: The scaling.
        seed: The seed of adapter and training sequences.
        learning_rate: The greatest learning rate.
        temperature: The temperature of a distillation.
    """

    rows: str = "fairy tales"
    loss: str = DISTILLED
    skipped: bool = False
    method: str = "yarn"
    seed: int = 0
    learning_rate: float = 4e-3
    temperature: float = 2.0


BY_TEXT: Row = {"loss": CROSS_ENTROPY, "learning_rate": 1e-3, "temperature": 1.0}
SMALL_STEPS: Row = {"learning_rate": 1e-3, "temperature": 1.0}
TRIALS = (
    Trial(),
    Trial(rows=SELF),
    Trial(temperature=3.0),
    Trial(**BY_TEXT),
    Trial(skipped=True),
    Trial(rows=SELF, skipped=True),
    Trial(rows=SELF, temperature=1.0),
    Trial(rows=SELF, temperature=3.0),
    Trial(rows="wikitext"),
    Trial(rows="own kind"),
    Trial(rows="own kind", **BY_TEXT),
    Trial(rows="random tokens"),
    Trial(method=FIT),
    Trial(method="llama3"),
    *(Trial(rows=rows, seed=seed) for seed in (1, 2) for rows in ("fairy tales", SELF)),
    *(
        Trial(rows=rows, skipped=skip, **SMALL_STEPS)
        for rows in ("fairy tales", SELF)
        for skip in (False, True)
    ),
)
CASES = {  # with the number of trials
    ("babyllama-361", 4): len(TRIALS),
    ("babyllama-361", 8): 3,
    ("stories-260k", 4): 2,
    ("stories-260k", 8): 1,
    ("tiny", 8): 2,
}


def texts(place: Checkpoint, work: Path) -> dict[str, Path]:
    """The texts of the trials; writes those of the work folder."""
    documents = [str(one) for one in stream_documents(STORIES)]
    kept, vocabulary = trained_on(documents), len(place.loaded[1])
    for name, part in {"own.txt": documents[:kept], "held-out.txt": documents[kept:]}.items():
        (work / name).write_text("\n<|endoftext|>\n".join(part), encoding="utf-8")
    draw = random.Random(0)
    rows = [[draw.randrange(3, vocabulary) for _ in range(place.target)] for _ in range(2 * STEPS)]
    lines = (json.dumps({"input_ids": row}) + "\n" for row in rows)
    (work / "random.jsonl").write_text("".join(lines), encoding="utf-8")
    return {name: path if path.is_absolute() else work / path for name, path in TEXTS.items()}


def scaling(place: Checkpoint, name: str, work: Path) -> str:
    """A scaling by name; that of a fit is a file, fitted to fairy tales if it does not exist."""
    file = work / f"{place.name}-{place.factor}-fit.json"
    if name == FIT and not file.exists():
        text = str(TEXTS["fairy tales"])
        ropepatch.fit(place.place, to=place.target, text=text, minutes=FIT_MINUTES, say=log_line).save(file)
    return str(file) if name == FIT else name


def teachers_remapping(place: Checkpoint) -> Row:
    """The remapping of the teacher on sequences of the target length."""
    return {"name": "rerope", "window": place.trained * 3 // 4}


def recipe_of(place: Checkpoint, trial: Trial, work: Path) -> Recipe:
    """The recipe of a trial, always with 2 x N tokens per step."""
    source = {"generated": "self"} if trial.rows == SELF else {"text": str(texts(place, work)[trial.rows])}
    distil = {"remapping": teachers_remapping(place), "temperature": trial.temperature}
    return Recipe.model_validate(
        {
            "model": str(place.place),
            "to": place.target,
            "method": scaling(place, trial.method, work),
            "seed": trial.seed,
            "data": {
                "sources": [source | ({"field": "input_ids"} if trial.rows == "random tokens" else {})],
                "windows": [place.trained if trial.skipped else place.target],
                "tokens_per_batch": 2 * place.target,
                "boundaries": False,
            },
            "positions": {"name": "pose", "chunks": 2} if trial.skipped else "true-length",
            "lora": {"r": 16, "lora_alpha": 32, "train_norms": False},
            "distil": distil if trial.loss == DISTILLED else None,
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


def cases(given: Namespace) -> Iterator[Row]:
    """The references of each checkpoint, its scalings without training, and its trials."""
    for (name, factor), count in CASES.items():
        case, trials = checkpoint(name, factor).named, TRIALS[:count]
        yield from (case | {"of": of} for of in (FLOOR if name == "tiny" else OWN, TEACHER))
        for method in dict.fromkeys(trial.method for trial in trials):
            yield case | {"of": UNTRAINED, "method": method}
        yield from (case | {"of": TRIAL, **vars(trial)} for trial in trials)


def measure(case: Row, given: Namespace) -> Row:
    """The losses of a case; a trial is trained first, and its weights are removed."""
    place, work = checkpoint(case["model"], case["factor"]), given.work
    model, of = place.loaded[0], case["of"]
    if of in (OWN, FLOOR):
        return place.floor() if of == FLOOR else place.through_own_window()
    if of == TRIAL:
        trial = Trial(**{name: case[name] for name in vars(Trial())})
        plan = ropepatch.plan(place.place, to=place.target, method=scaling(place, trial.method, work))
        name = "-".join(str(value).replace(" ", "-") for value in vars(trial).values())
        out = work / f"{place.name}-{place.factor}-{name}"
        with adapted(plan, recipe_of(place, trial, work), out) as (trained, record):
            kept = {key: record[key] for key in ("steps", "tokens", "seconds", "device")}
            return place.losses(trained) | kept
    method, options = scaling(place, case.get("method", ""), work), {}
    if of == TEACHER:
        method, options = "rerope", {"window": teachers_remapping(place)["window"]}
    with ropepatch.patch(model, method, to=place.target, **options):
        return place.losses(model)


STUDY = Study(name="distil", about=__doc__, cases=cases, measure=measure, work=True)


# The table, for docs/tables.py


def title(row: Row) -> str:
    """The training text and its form."""
    if row["of"] != TRIAL:
        return "teacher: base with ReRoPE" if row["of"] == TEACHER else f"not trained, {row['method']}"
    place = "skipped positions" if row["skipped"] else "sequences of the target length"
    text = "its own kind of text" if row["rows"] == "own kind" else row["rows"]
    return f"{text}, {place}, {row['method']}" + (f", seed {row['seed']}" if row["seed"] else "")


def loss(row: Row) -> str:
    """The loss and the learning rate."""
    if row["of"] != TRIAL:
        return "–"
    temperature = f" at T = {row['temperature']:g}" if row["loss"] == DISTILLED else ""
    return f"{row['loss']}{temperature}, {row['learning_rate']:g}"


def distil_table(rows: list[Row]) -> str:
    """A table for each checkpoint and factor: the trainings by remaining excess loss."""
    return "\n\n".join(block(*case, here) for case, here in by_case(rows).items())


def block(model: str, factor: int, target: int, rows: list[Row]) -> str:
    """The table of a checkpoint and factor, below its reference."""
    (own,) = (row for row in rows if row["of"] in (OWN, FLOOR))
    untrained = {row["method"]: row for row in rows if row["of"] == UNTRAINED}
    others = sorted((row for row in rows if row is not own), key=lambda row: excess(row, own).value)
    floor, base = own["of"] == FLOOR, Mean.of(own["all"]).value

    def above(row: Row) -> str:
        found = excess(row, own)
        return signed(found) + (f", {found.value / base:.1%}" if floor else "")

    def left(row: Row) -> str:
        before = untrained.get(row.get("method", "yarn"))
        return f"{excess(row, own).value / excess(before, own).value:.0%}" if before else "–"

    columns = {
        "trained on": title,
        "loss, learning rate": loss,
        "excess loss over the floor" if floor else "excess loss": above,
        "excess loss remaining": left,
        "first L tokens": lambda row: signed(excess(row, own, "short")),
        "last quarter": lambda row: signed(excess(row, own, "last")),
        "steps, seconds": lambda row: f"{row['steps']}, {row['seconds']:.0f}" if row["of"] == TRIAL else "–",
    }
    head = (
        f"**{model}, {target // factor:,} to {target:,} tokens**: "
        f"{'the floor' if floor else 'the base model within its original length'} has a loss of "
        f"{base:.4f} nats/token; n = {len(own['all'])} documents."
    )
    return f"{head}\n\n{table(others, columns)}"


if __name__ == "__main__":
    STUDY.main()
