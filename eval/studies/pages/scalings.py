"""Scaling files and a student for the study of long prompts, tuned or trained on a model.

    python eval/studies/pages/scalings.py MODEL --to 16k --out yarn-tuned.json

The name of the output selects its content. `yarn-tuned`: YaRN with the betas of a grid that have the highest
answer log-prob at the target length, on fairy tales, which no page contains. `student-novels`: the
checkpoint of `ropepatch extend --distil` on novels that no page contains. `student-short`: the same after 100
of its 450 steps, for a CPU, and without the comparison with YaRN that chooses the scale of its adapter; it
resumes.
"""

from __future__ import annotations

import shutil
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import ropepatch
from ropepatch.data.texts import Texts
from ropepatch.extension.planning import Plan
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.scaling import make_scaling
from ropepatch.scaling.file import write_scaling
from ropepatch.training.self_taught import self_taught

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from pages_study import NOVELS, PAGES
from study import SHARED, log_line

FAST, SLOW = (16.0, 32.0, 64.0, 128.0), (0.5, 1.0, 2.0, 4.0)
HAYSTACKS, KEYS, SEED = 3, 8, 1000
STEPS = 100  # of the short student


def tuned(plan: Plan, out: Path) -> None:
    """Write YaRN with the betas of the grid that have the highest answer log-prob."""
    texts = [file.read_text(encoding="utf-8") for file in sorted((SHARED / "texts" / "fairytales").iterdir())]
    model, tokenizer = ropepatch.load(plan.model)
    how = {"lengths": [plan.target], "haystacks": HAYSTACKS, "keys": KEYS, "seed": SEED, "texts": texts}
    how |= {"kinds": ("number", "sentence")}
    found = {}
    for fast, slow in product(FAST, SLOW):
        with ropepatch.patch(model, "yarn", to=plan.target, beta_fast=fast, beta_slow=slow):
            found[fast, slow] = ropepatch.retrieve(model, tokenizer, **how).log_prob(plan.target).value
        print(f"betas {fast:g}, {slow:g}: {found[fast, slow]:.4f}", file=sys.stderr, flush=True)
    fast, slow = max(found, key=found.__getitem__)
    factor = plan.target / plan.rope.original_max_position_embeddings
    scaling = make_scaling("yarn", factor=factor, beta_fast=fast, beta_slow=slow)
    write_scaling(out, scaling, plan.rope, plan.target)


@contextmanager
def other_novels(out: Path) -> Iterator[Path]:
    """A folder of these novels of those that no page contains, next to the output."""
    texts = out.with_name(f"{out.stem}-texts")
    texts.mkdir(parents=True, exist_ok=True)
    for file in sorted(NOVELS.glob("*.txt"))[2 * PAGES :]:  # a page has one or two
        shutil.copyfile(file, texts / file.name)
    yield texts
    shutil.rmtree(texts)


def student(plan: Plan, out: Path) -> None:
    """Write the checkpoint of a self-distillation on the other novels."""
    with other_novels(out) as texts:
        ropepatch.extend(
            plan.model, out, to=plan.target, distil=True, text=texts, reading=False, say=log_line
        )


def short_student(plan: Plan, out: Path) -> None:
    """Write the checkpoint of a short self-distillation on the other novels."""
    source = Checkpoint.find(plan.model, weights=True)
    with other_novels(out) as texts:
        recipe, _ = self_taught(source, plan.target, Texts(text=str(texts)))
        trainer = recipe.trainer | {"max_steps": STEPS, "save_steps": STEPS // 10}
        watch = recipe.watch.model_copy(update={"target": False, "windows": 1})
        recipe = recipe.model_copy(update={"trainer": trainer, "watch": watch})
        ropepatch.extend(plan.model, out, to=plan.target, recipe=recipe, reading=False, say=log_line)


MAKERS: dict[str, Callable[[Plan, Path], None]] = {
    "student-novels": student,
    "student-short": short_student,
    "yarn-tuned": tuned,
}


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--to", required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    plan = ropepatch.plan(given.model, to=given.to, method="none")
    MAKERS[given.out.stem](plan, given.out)


if __name__ == "__main__":
    main()
