"""Students for the study of long prompts, trained on a model by self-distillation.

    python eval/studies/pages/students.py MODEL --to 16k --out student-short-0

The name of the output is one of `TRAININGS` and a seed; `student-0` is trained by the recipe `distil`. All read
novels that no page contains, and resume.
"""

from __future__ import annotations

import shutil
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ropepatch
from ropepatch.training.forecast import sized
from ropepatch.training.recipe import Recipe, read_recipe

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from pages_study import NOVELS, PAGES
from study import log_line

QUERIES_AND_KEYS = ("q_proj", "k_proj")


@dataclass(frozen=True)
class Training:
    """What differs from the recipe `distil`.

    Args:
        rate: The learning rate; None for that of the recipe.
        steps: The number of steps; None for that of the recipe.
        length: The tokens of a sequence, at skipped positions; None for what suits the device.
        questions: The weight of the sequences with questions; the others have 1.
        modules: The linear layers with an adapter; None for those of the recipe.
    """

    rate: float | None = None
    steps: int | None = None
    length: int | None = 2048
    questions: float = 0.5
    modules: tuple[str, ...] | None = None


TRAININGS = {
    "student": Training(),
    "student-short": Training(rate=8.9e-4, steps=64),
    "student-fast": Training(rate=8.9e-4),
    "student-plain": Training(rate=8.9e-4, questions=0),
    "student-target": Training(length=None),
    # Trials
    "student-half": Training(rate=5.6e-5),
    "student-double": Training(rate=2.2e-4),
    "student-double-plain": Training(rate=2.2e-4, questions=0),
    "student-asked": Training(questions=1.5),
    "student-qk": Training(rate=8.9e-4, modules=QUERIES_AND_KEYS),
    "student-qk-double": Training(rate=2.2e-4, modules=QUERIES_AND_KEYS),
    "student-original": Training(rate=8.9e-4, steps=112, length=8192),
    "student-target-short": Training(rate=8.9e-4, steps=64, length=None),
    "student-target-double": Training(rate=2.2e-4, steps=64, length=None),
}


@contextmanager
def other_novels(out: Path) -> Iterator[Path]:
    """A folder of these novels of those that no page contains, next to the output."""
    texts = out.with_name(f"{out.name}-texts")
    texts.mkdir(parents=True, exist_ok=True)
    for file in sorted(NOVELS.glob("*.txt"))[2 * PAGES :]:  # a page has one or two
        shutil.copyfile(file, texts / file.name)
    yield texts
    shutil.rmtree(texts)


def of(name: str, plan: Any) -> Recipe:
    """The recipe of a student, by its name."""
    kind, _, seed = name.rpartition("-")
    training = TRAININGS[kind]
    given = read_recipe("distil")
    recipe, _ = sized(given, plan)
    data, trainer = recipe.data, recipe.trainer
    if training.length:
        sizes = {"windows": (training.length,), "tokens_per_batch": training.length}
        data = given.data.model_copy(update=sizes)
        short = {"positions": given.positions, "gradient_checkpointing": False}
        short["distil"] = given.distil.model_copy(update={"auto_size": False})
        recipe = recipe.model_copy(update=short)
    text, asking = data.sources
    sources = [text]
    if training.questions:
        sources.append(asking.model_copy(update={"weight": training.questions}))
    steps = training.steps or recipe.max_steps
    rate = training.rate or trainer["learning_rate"]
    own = {"learning_rate": rate, "max_steps": steps, "save_steps": steps // 8}
    modules = training.modules or recipe.lora.target_modules
    changed = {
        "trainer": trainer | own,
        "watch": recipe.watch.model_copy(update={"target": False, "windows": 1}),
        "data": data.model_copy(update={"sources": sources}),
        "lora": recipe.lora.model_copy(update={"target_modules": modules}),
        "seed": int(seed),
    }
    return recipe.model_copy(update=changed)


def main() -> None:
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--to", required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    plan = ropepatch.plan(given.model, to=given.to, method="none")
    recipe = of(given.out.name, plan)
    with other_novels(given.out) as texts:
        how: Any = {"recipe": recipe, "text": texts, "reading": False, "say": log_line}
        ropepatch.train(plan.source.name, given.out, to=plan.target, **how)


if __name__ == "__main__":
    main()
