"""Self-written rows with and without keys that are asked for: what a distilled student finds.

    python eval/studies/distil/keys_study.py --json eval/results/distil-keys.json --work DIR [--only CASE]

A checkpoint is extended by YaRN and distilled by the recipe of the study of distillation, on rows that it
wrote itself, with and without `data.keys`. It is judged by passkeys and by the loss of held-out text. What
`--json` holds already is not trained again; an interrupted training resumes from its folder in `--work`.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import ropepatch
from ropepatch.training.recipe import Recipe

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from distil_study import SELF, TEACHER, UNTRAINED, Case, Trial
from study import Rows, adapted, cases_parser, chosen, said

CASES = (Case("tiny", 4), Case("babyllama-361", 4))
KEYS = {"tiny": 4, "babyllama-361": 1}  # of a row, of each of two kinds: as many as find room
SEEDS = (0, 1, 2)
STEPS = 150


def recipe_of(case: Case, keys: int, seed: int, work: Path) -> Recipe:
    """Distillation on self-written rows of the target."""
    recipe: dict[str, Any] = case.recipe(Trial(rows=SELF, seed=seed), work).model_dump()
    recipe["data"] |= {"keys": keys}
    recipe["trainer"] |= {"max_steps": STEPS}
    recipe["watch"] |= {"every": STEPS}
    return Recipe.model_validate(recipe | {"method": "yarn"})


def main() -> None:
    """Train what the file does not hold yet, and write it after every training."""
    arguments = cases_parser(__doc__, work=True).parse_args()
    rows = Rows(arguments.json, "distil-keys")
    for case in chosen(CASES, arguments.only):
        work = arguments.work / f"{case.name}-{case.factor}"
        work.mkdir(parents=True, exist_ok=True)
        model = case.loaded[0]
        for of, method, given in (
            (UNTRAINED, "yarn", {}),
            (TEACHER, "rerope", {"window": case.map["window"]}),
        ):
            if not rows.of(**case.named, of=of):
                with ropepatch.patch(model, method, to=case.target, **given):
                    rows.add(case.named | {"of": of} | case.losses(model) | case.keys(model), model)
        for seed, keys in product(SEEDS, (0, KEYS[case.name])):
            if rows.of(**case.named, keys=keys, seed=seed):
                continue
            plan = ropepatch.plan(case.place, to=case.target, method="yarn")
            recipe = recipe_of(case, keys, seed, work)
            with adapted(plan, recipe, work / f"{keys}-{seed}") as (student, record):
                row = {"keys": keys, "seed": seed, "steps": STEPS, "seconds": record["seconds"]}
                rows.add(case.named | row | case.losses(student) | case.keys(student), student)
            said(f"{case.name} {case.factor}, keys {keys}, seed {seed}: {record['seconds']:.0f} s")


if __name__ == "__main__":
    main()
