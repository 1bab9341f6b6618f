"""Self-distillation of tiny with three seeds: the excess loss that remains, and passkeys.

    python eval/studies/distil/distil_study.py [--only "factor=4"]

`ropepatch train --recipe distil` trains on text that the model writes; a third of its sequences ask questions
about distant context. Results are measured on held-out stories, whose floor is known, and on 100 passkeys,
next to the unscaled model, the teacher and YaRN. No setting was chosen on these stories and passkeys.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import ropepatch
from ropepatch.attention import teaching_window
from ropepatch.data.tiny.tales import Tale, held_out_tales
from ropepatch.evaluation.intervals import Mean
from ropepatch.report.printers import markdown_rows
from ropepatch.training.forecast import sized
from ropepatch.training.recipe import read_recipe
from ropepatch.training.supply import SELF_READ

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from study import (
    FLOOR,
    Checkpoint,
    Row,
    Study,
    averaged,
    by,
    counted,
    excess,
    signed,
    trained_model,
)

BASE, TEACHER, YARN, DISTIL = "base", "teacher", "yarn", "distil"
KEYS = 100  # prompts with one passkey each
FIRST, TALES = (
    72,
    72,
)  # the first of the held-out stories after those of the trials, and their number
SEEDS = 3


class Untried(Checkpoint):
    """tiny with stories and passkeys on which no trial was measured."""

    @property
    def tales(self) -> list[Tale]:
        """Held-out stories after those of the trials."""
        return held_out_tales(
            self.loaded[1], length=self.target, count=FIRST + self.windows
        )[FIRST:]


def cases(given: Namespace) -> Iterator[Row]:
    """The references and the trainings at both factors."""
    for factor in (4, 8):
        case = Untried("tiny", factor).named | {
            "first": FIRST,
            "windows": TALES,
            "text": "tales",
        }
        yield case | {"of": FLOOR}
        for of in (BASE, TEACHER, YARN):
            yield case | {"of": of, "keys": KEYS}
        for seed in range(SEEDS):
            yield case | {
                "of": DISTIL,
                "questions": True,
                "reads": SELF_READ,
                "seed": seed,
                "keys": KEYS,
            }


def measure(case: Row, given: Namespace) -> Row:
    """The losses and passkeys of a case."""
    place, of = Untried("tiny", case["factor"], case["windows"]), case["of"]
    if of == FLOOR:
        return place.floor()
    if of == DISTIL:
        plan = ropepatch.plan(place.place, to=place.target)
        recipe, _ = sized(read_recipe("distil"), plan)
        recipe = recipe.model_copy(update={"seed": case["seed"]})
        with (
            tempfile.TemporaryDirectory() as work,
            trained_model(plan, recipe, Path(work, "out")) as trained,
        ):
            model, record = trained
            kept = {
                key: record.get(key) for key in ("short_context", "steps", "tokens")
            }
            return kept | place.losses(model) | place.keys(model, KEYS, seed=2)
    method, options = (YARN if of == YARN else "none"), {}
    if of == TEACHER:
        method, options = "rerope", {"window": teaching_window(place.trained)}
    model = place.loaded[0]
    with ropepatch.patch(model, method, to=place.target, **options):
        return place.losses(model) | place.keys(model, KEYS, seed=2)


STUDY = Study(name="distil", about=__doc__, cases=cases, measure=measure)


# The table, for docs/tables.py

TITLES = {YARN: "`yarn`, not trained", TEACHER: "teacher: unscaled model with ReRoPE"}
HEAD = (
    "to",
    "",
    "loss",
    "YaRN's excess loss remaining",
    "loss within the original length, less the unscaled model's",
    "passkey accuracy",
)


def distil_table(rows: list[Row]) -> str:
    """The mean of the seeds at each factor, next to YaRN and the teacher."""
    lines = []
    for (factor,), here in by(rows, "factor").items():
        of = {row["of"]: row for row in here}
        students = [row for row in here if row["of"] == DISTIL]
        groups = [
            (
                "`distil`, mean of three seeds",
                averaged(students, "all", "short"),
                students,
            )
        ]
        groups += [(title, of[key], [of[key]]) for key, title in TITLES.items()]
        for title, row, seeds in groups:
            lines.append(
                (
                    f"{row['target']:,} tokens ({factor} x)",
                    title,
                    f"{Mean.of(row['all']).value:.4f}",
                    remaining(row, of[FLOOR], of[YARN]),
                    signed(excess(row, of[BASE], "short")),
                    "; ".join(
                        counted(Mean.of(one["found"], share=True)) for one in seeds
                    ),
                )
            )
    return markdown_rows(HEAD, lines)


def remaining(row: Row, floor: Row, yarn: Row) -> str:
    """The share of YaRN's excess loss over the floor, with its interval over stories."""
    pairs = zip(excess(row, floor).clusters, excess(yarn, floor).clusters, strict=True)
    mean = Mean(tuple((part, whole) for (part, _), (whole, _) in pairs))
    low, high = mean.interval()
    return f"{mean.value:.0%} [{low:.0%}, {high:.0%}]"


if __name__ == "__main__":
    STUDY.main()
