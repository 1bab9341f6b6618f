"""Fine-tuning compared: methods at equal tokens; short and full length at equal tokens and at equal time.

    python eval/studies/adaptation/adaptation.py --work DIR [--only "run=yarn"]

Each run trains with the recipe `tiny` and the changes in RUNS. It is then measured on held-out stories,
next to their floor, and on passkeys. `babyllama` trains on real stories (../shared). An interrupted
training resumes from its folder in `--work`.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ropepatch
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import Texts, cut_windows
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.evaluation.perplexity import LossCurve
from ropepatch.training.recipe import Data, Recipe, Watch, read_recipe

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from study import FLOOR, STORIES, Row, Study, checkpoint, inputs_of, log_line

TARGET, TRAINED, TALES = 2048, 256, 24
SPANS = ((0, 256), (256, 512), (512, 1024), (1024, 2048), (0, 2048))
LENGTHS, HAYSTACKS = [128, 256, 512, 1024, 2048], 100
BABYLLAMA = "babyllama"
# The time of a step of 8 sequences of 256 tokens, as a share of that of one sequence of 2048.
TIME_OF_SHORT_ROWS = 0.63


class Run(NamedTuple):
    """The differences of a run from the recipe `tiny`."""

    method: str = "yarn"
    windows: tuple[str, ...] | None = None
    share_of_steps: float = 1.0


RUNS = {
    "yarn": Run(),
    "linear": Run(method="linear"),
    "ntk": Run(method="ntk"),
    "short": Run(windows=("1x",)),
    "true": Run(windows=("8x",)),
    "true, time of short": Run(windows=("8x",), share_of_steps=TIME_OF_SHORT_ROWS),
}
UNTRAINED = {f"{method}, not trained": method for method in ("none", "yarn")}


def cases(given: Namespace) -> Iterator[Row]:
    """The floor, the scalings without training, and the runs."""
    yield from ({"run": run} for run in (FLOOR, *UNTRAINED, *RUNS, BABYLLAMA))


def inputs(case: Row) -> list[Path]:
    """The input files of a run."""
    return inputs_of({"model": "babyllama-361" if case["run"] == BABYLLAMA else "tiny"})


def measure(case: Row, given: Namespace) -> Row:
    """The losses, the passkey accuracy and the training record of a run."""
    run = case["run"]
    model, tokenizer = checkpoint("tiny", 8).loaded
    if run == FLOOR:
        tales = held_out_tales(tokenizer, length=TARGET, count=TALES)
        return {
            "nats": by_span(LossCurve(tuple(-tale.log_probs()[1:] for tale in tales)))
        }
    if run in UNTRAINED:
        with ropepatch.patch(model, UNTRAINED[run], to=TARGET):
            return results_of(model, tokenizer)
    if run == BABYLLAMA:
        folder, row = train(
            run, stories(), checkpoint("babyllama-361", 8).place, "yarn", given.work
        )
        return row | results_on_stories(folder)
    folder, row = train(run, recipe_of(RUNS[run]), "tiny", RUNS[run].method, given.work)
    return row | results_of(*ropepatch.load(folder, device="cpu"))


def recipe_of(run: Run) -> Recipe:
    """The recipe of a run."""
    recipe = read_recipe("tiny")
    steps = round(recipe.max_steps * run.share_of_steps)
    data = recipe.data.model_copy(
        update={"windows": run.windows or recipe.data.windows}
    )
    return recipe.model_copy(
        update={"data": data, "trainer": {**recipe.trainer, "max_steps": steps}}
    )


def stories() -> Recipe:
    """The recipe of babyllama-361, on the joined stories of its own training."""
    sources = (Texts(text=str(STORIES)),)
    data = Data(
        sources=sources, windows=("1x", "8x"), tokens_per_batch="2k", boundaries=False
    )
    watch = Watch(every=100, windows=16, passkey_trials=0)
    return read_recipe("tiny").model_copy(update={"data": data, "watch": watch})


def train(
    name: str, recipe: Recipe, model: Any, method: str, work: Path
) -> tuple[Path, Row]:
    """Train a run, and return its folder and its history."""
    out = work / name.replace(", ", "-").replace(" ", "-")
    plan = ropepatch.plan(model, to=TARGET, method=method)
    folder = ropepatch.train(
        plan, out, recipe=recipe, reading=False, say=log_line
    ).folder
    record = json.loads((folder / "ropepatch.json").read_text(encoding="utf-8"))[
        "training"
    ]
    run = json.loads((folder / "training" / "run.json").read_text(encoding="utf-8"))
    keys = ("step", "short_loss", "target_loss", "target_passkey")
    return folder, {
        key: record[key] for key in ("steps", "tokens", "short_context")
    } | {
        "method": method,
        "windows": list(recipe.data.windows),
        "history": [
            {key: row[key] for key in keys if key in row}
            for row in run["history"]
            if "short_loss" in row
        ],
    }


def results_of(model: Any, tokenizer: Any) -> Row:
    """The losses and the passkey accuracy of a model."""
    tales = held_out_tales(tokenizer, length=TARGET, count=TALES)
    answers = ropepatch.passkey(model, tokenizer, lengths=LENGTHS, haystacks=HAYSTACKS)
    found = {length: answers.found(length).clusters for length in LENGTHS}
    return {
        "nats": by_span(
            ropepatch.perplexity(model, None, [tale.ids for tale in tales])
        ),
        "keys": {
            str(n): [sum(int(one) for one, _ in each), len(each)]
            for n, each in found.items()
        },
    }


def results_on_stories(folder: Path) -> Row:
    """The losses of babyllama-361 unscaled, training-free and fine-tuned, on the same held-out stories."""
    base, tokenizer = checkpoint("babyllama-361", 8).loaded
    pieces = cut_windows(
        tokenizer, stream_documents(STORIES), length=TARGET, count=None
    )[:16]
    held_out = [torch.tensor(piece) for _, piece in pieces]
    # The text of the far positions, in sequences of the original length of the base model.
    same = [
        ids[begin : begin + TRAINED]
        for ids in held_out
        for begin in range(1024, TARGET, TRAINED)
    ]
    losses = partial(ropepatch.perplexity, base, None)
    within = {
        "0 to 256": losses([ids[:TRAINED] for ids in held_out]).at(TRAINED).value,
        "1024 to 2048, 256 tokens at a time": losses(same).at(TRAINED).value,
    }
    with ropepatch.patch(base, "yarn", to=TARGET):
        free = by_span(losses(held_out))
    after = ropepatch.perplexity(
        ropepatch.load(folder, device="cpu")[0], None, held_out
    )
    return {
        "pieces": len(held_out),
        "base": within,
        "training-free": free,
        "adapted": by_span(after),
    }


def by_span(curve: LossCurve) -> dict[str, float]:
    """The nats per token by range of positions."""
    return {
        f"{begin} to {end}": curve.between(begin, end).value for begin, end in SPANS
    }


STUDY = Study(
    name="adaptation",
    about=__doc__,
    cases=cases,
    measure=measure,
    inputs=inputs,
    work=True,
)

if __name__ == "__main__":
    STUDY.main()
