"""Students for the study of long prompts, trained on a model by self-distillation.

    python eval/studies/pages/students.py MODEL --to 16k --out student-short-0

The name of the output selects its training, and ends with its seed:

    student-short-1   64 steps of the recipe `distil`, on sequences of 2,048 tokens at skipped positions
    student-1         all 450 steps, on such sequences
    student-plain-1   the same without questions
    student-long-1    all 450 steps, as the recipe suits a large GPU: on sequences of the target length

All read novels that no page contains, and resume.
"""

from __future__ import annotations

import shutil
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ropepatch
from ropepatch.training.forecast import sized
from ropepatch.training.recipe import Recipe, read_recipe

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from pages_study import NOVELS, PAGES
from study import log_line

SHORT = 64  # steps
SEQUENCE = 2048  # tokens


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
    *_, training, seed = f"whole-{name.removeprefix('student-')}".split("-")
    given = read_recipe("distil")
    recipe, _ = sized(given, plan)
    if training != "long":
        data = given.data.model_copy(update={"windows": (SEQUENCE,)})
        short = {"data": data, "positions": given.positions}
        short["distil"] = given.distil.model_copy(update={"auto_size": False})
        recipe = recipe.model_copy(update=short | {"gradient_checkpointing": False})
    sources = list(recipe.data.sources)
    if training == "plain":
        sources = [one for one in sources if one.generated == "self"]
    steps = SHORT if training == "short" else recipe.max_steps
    changed = {
        "trainer": recipe.trainer | {"max_steps": steps, "save_steps": steps // 8},
        "watch": recipe.watch.model_copy(update={"target": False, "windows": 1}),
        "data": recipe.data.model_copy(update={"sources": sources}),
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
