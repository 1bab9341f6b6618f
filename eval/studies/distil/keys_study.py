"""Self-written rows with and without keys that are asked for: what a distilled student finds.

    python eval/studies/distil/keys_study.py --json eval/results/distil-keys.json --work DIR [--only CASE]

A checkpoint is extended by YaRN and distilled by the recipe of the study of distillation, on rows that it
wrote itself, with `data.keys` 0 and 1. It is judged by passkeys and by the loss of held-out text. What
`--json` holds already is not trained again; an interrupted training resumes from its folder in `--work`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import ropepatch
from ropepatch.training.recipe import Recipe

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from distil_study import SELF, TEACHER, UNTRAINED, Case, Trial, said
from study import Row, Rows, chosen

CASES = (Case("tiny", 4), Case("tiny", 8))
KEYS = (0, 1)
SEEDS = (0, 1, 2)
STEPS = 150
HAYSTACKS = 40


def judged(case: Case, model: Any, tokenizer: Any) -> Row:
    """Losses by document; the answers to passkeys by length and haystack."""
    lengths = [case.trained << step for step in range((case.target // case.trained).bit_length())]
    answers = ropepatch.passkey(model, tokenizer, lengths=lengths, haystacks=HAYSTACKS, seed=1).answers
    row: Row = {"loss": case.losses(model)}
    for length in lengths:
        own = [answer for answer in answers if answer.length == length]
        row[f"passkey {length}"] = {
            "found": "".join(str(int(answer.found)) for answer in own),
            "log_prob": [round(answer.log_prob, 4) for answer in own],
        }
    return row


def recipe_of(case: Case, keys: int, seed: int, work: Path) -> Recipe:
    """Distillation on self-written rows of the target."""
    recipe: dict[str, Any] = case.recipe(Trial(rows=SELF, seed=seed), work).model_dump()
    recipe["data"] |= {"keys": keys}
    recipe["trainer"] |= {"max_steps": STEPS}
    recipe["watch"] |= {"every": STEPS}
    return Recipe.model_validate(recipe | {"method": "yarn"})


def main() -> None:
    """Train what the file does not hold yet, and write it after every training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="the file of results")
    parser.add_argument("--work", type=Path, required=True, help="the folder of the trainings")
    parser.add_argument("--only", help='cases, separated by ";": "tiny 4"')
    arguments = parser.parse_args()
    rows = Rows(arguments.json, "distil-keys")
    for case in chosen(CASES, arguments.only):
        work = arguments.work / f"{case.name}-{case.factor}"
        work.mkdir(parents=True, exist_ok=True)
        model, tokenizer = case.loaded
        if not rows.of(**case.named, of=UNTRAINED):
            with ropepatch.patch(model, "yarn", to=case.target):
                rows.add(case.named | {"of": UNTRAINED} | judged(case, model, tokenizer), model)
        if not rows.of(**case.named, of=TEACHER):
            with ropepatch.patch(model, "rerope", to=case.target, window=case.map["window"]):
                rows.add(case.named | {"of": TEACHER} | judged(case, model, tokenizer), model)
        for seed in SEEDS:
            for keys in KEYS:
                if rows.of(**case.named, keys=keys, seed=seed):
                    continue
                plan = ropepatch.plan(case.place, to=case.target, method="yarn")
                recipe = recipe_of(case, keys, seed, work)
                adapted = ropepatch.adapt(plan, recipe, work / f"{keys}-{seed}", say=said)
                record = json.loads((adapted.folder / "ropepatch.json").read_text())["adaptation"]
                student = ropepatch.load(adapted.folder)[0].float()
                row = {"keys": keys, "seed": seed, "steps": STEPS, "seconds": record["seconds"]}
                rows.add(case.named | row | judged(case, student, tokenizer), student)
                shutil.rmtree(adapted.folder)
                said(f"{case.name} {case.factor}, keys {keys}, seed {seed}: {record['seconds']:.0f} s")


if __name__ == "__main__":
    main()
