"""LongCE beside the plain loss, in cross-entropy and in distillation, at equal steps.

    python eval/studies/longppl/long_ce_study.py --json eval/results/long-ce.json --work DIR [--only CASE]

Checkpoints are extended 4 times by YaRN and trained by the recipe of the study of distillation, with and
without `long_ce`. They are judged by the loss of held-out text and by LongPPL, whose key tokens the
checkpoint under YaRN chooses before training. What `--json` holds already is not trained again; an
interrupted training resumes from its folder in `--work`.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import ropepatch
from ropepatch.data.texts import digest
from ropepatch.training.recipe import Recipe

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "distil")]

from distil_study import BY_TEXT, CROSS_ENTROPY, DISTILLED, Case, Trial
from longppl_study import curves
from study import Row, Rows, adapted, cases_parser, chosen, said

STEPS = 40
SEEDS = (0, 1, 2)
CASES = (Case("tiny", 4), Case("babyllama-361", 4))
LOSSES = (CROSS_ENTROPY, DISTILLED)


def recipe_of(case: Case, loss: str, weighed: bool, seed: int, work: Path) -> Recipe:
    """Cross-entropy on rows of the checkpoint's own kind, and distillation on fairy tales."""
    trial = Trial(rows="own kind", seed=seed, **BY_TEXT) if loss == CROSS_ENTROPY else Trial(seed=seed)
    recipe: dict[str, Any] = case.recipe(trial, work).model_dump()
    if case.name == "tiny" and loss == CROSS_ENTROPY:
        recipe["data"]["sources"] = [{"generated": "tales"}]
        recipe["watch"]["text"] = None
    recipe["trainer"] |= {"max_steps": STEPS, "save_steps": STEPS}
    recipe["watch"]["every"] = STEPS
    return Recipe.model_validate(recipe | {"method": "yarn", "long_ce": {} if weighed else None})


def main() -> None:
    """Train what the file does not hold yet, and write it after every training."""
    arguments = cases_parser(__doc__, work=True).parse_args()
    rows = Rows(arguments.json, "long-ce")
    for case in chosen(CASES, arguments.only):
        work = arguments.work / case.name
        work.mkdir(parents=True, exist_ok=True)
        documents, pieces = zip(*case.pieces, strict=True)
        before = curves(case, "yarn")
        keys = before[0].key_tokens(before[4])

        def judged(curve: Any, case: Case = case, keys: Any = keys, pieces: Any = pieces) -> Row:
            spans = {"all": curve.at(case.target), "short": curve.at(case.trained)}
            losses = {name: read.loss.clusters for name, read in spans.items()}
            return losses | {"key": curve.long_perplexity(keys).loss.clusters, "digest": digest(pieces)}

        if not rows.of(**case.named, loss="untrained"):
            rows.add(case.named | {"loss": "untrained"} | judged(before[0]), case.loaded[0])
        for seed, loss, weighed in product(SEEDS, LOSSES, (False, True)):
            named = {"loss": loss, "long_ce": weighed, "seed": seed}
            if rows.of(**case.named, **named):
                continue
            plan = ropepatch.plan(case.place, to=case.target, method="yarn")
            recipe = recipe_of(case, loss, weighed, seed, work)
            with adapted(plan, recipe, work / f"{loss}-{weighed}-{seed}") as (model, record):
                curve = ropepatch.perplexity(model, None, pieces).of_documents(documents)
                row = case.named | named | {"steps": STEPS, "seconds": record["seconds"]}
                rows.add(row | judged(curve), model)
            said(f"{case.name}, {loss}, LongCE {weighed}, seed {seed}: {record['seconds']:.0f} s")


if __name__ == "__main__":
    main()
