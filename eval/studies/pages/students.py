"""Students for the study of long prompts, trained on a model by self-distillation.

    python eval/studies/pages/students.py MODEL --to 16k --out student-short-0

The name of the output selects its training. `student-short-1`: 64 of the 450 steps of the recipe `distil`, on
novels that no page contains, with seed 1; it resumes. `student-plain-1`: the same without questions.
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

STEPS = 64  # of the short student


@contextmanager
def other_novels(out: Path) -> Iterator[Path]:
    """A folder of these novels of those that no page contains, next to the output."""
    texts = out.with_name(f"{out.stem}-texts")
    texts.mkdir(parents=True, exist_ok=True)
    for file in sorted(NOVELS.glob("*.txt"))[2 * PAGES :]:  # a page has one or two
        shutil.copyfile(file, texts / file.name)
    yield texts
    shutil.rmtree(texts)


def shortened(recipe: Recipe, seed: int, *, asks: bool) -> Recipe:
    """The recipe with fewer steps, for a CPU, with a seed, with or without questions."""
    sources = [one for one in recipe.data.sources if asks or one.generated == "self"]
    changed = {
        "trainer": recipe.trainer | {"max_steps": STEPS, "save_steps": STEPS // 8},
        "watch": recipe.watch.model_copy(update={"target": False, "windows": 1}),
        "data": recipe.data.model_copy(update={"sources": sources}),
        "seed": seed,
        "gradient_checkpointing": False,
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
    _, training, seed = given.out.name.split("-")
    whole, _ = sized(read_recipe("distil"), plan)
    recipe = shortened(whole, int(seed), asks=training == "short")
    with other_novels(given.out) as texts:
        how: Any = {"recipe": recipe, "text": texts, "reading": False, "say": log_line}
        ropepatch.train(plan.source.name, given.out, to=plan.target, **how)


if __name__ == "__main__":
    main()
