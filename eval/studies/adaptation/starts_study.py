"""The same training steps on the same sequences, from YaRN's frequencies and from fitted ones.

    python eval/studies/adaptation/starts_study.py --work DIR

babyllama-361 at 4 x trains with the recipe `tiny` on TinyStories. The frequencies are fitted to the
training text. Both are measured on 32 windows that neither the fit nor the training used.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import ropepatch
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import Texts, cut_windows
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.intervals import Mean
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.training.recipe import Data, Recipe, Watch, read_recipe
from ropepatch.training.supply import RecipeReader

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from study import STORIES, Row, Study, adapted, checkpoint, first, signed, table

YARN, FIT, OWN = "yarn", "fit", "through its own window"
WINDOWS = 32
SPANS = ((0, 256), (256, 512), (512, 1024), (768, 1024), (0, 1024))
SHOWN = ("0 to 256", "768 to 1024", "0 to 1024")
PLACE = checkpoint("babyllama-361", 4)


def cases(given: Namespace) -> Iterator[Row]:
    """The starts without training, and after the training."""
    yield from ({"model": PLACE.name, "start": start} for start in (OWN, YARN, FIT))
    for seed in range(given.seeds):
        for start in (YARN, FIT):
            yield {"model": PLACE.name, "start": start, "seed": seed, "steps": given.steps}


def measure(case: Row, given: Namespace) -> Row:
    """The losses of a start; see `spans_of`."""
    model, start = PLACE.loaded[0], case["start"]
    if start == OWN:
        return spans_of(ropepatch.perplexity(model, None, pieces(), window=256, stride=128))
    method = str(fitted(given.work)) if start == FIT else start
    plan = ropepatch.plan(PLACE.place, to=PLACE.target, method=method)
    if "seed" not in case:
        with ropepatch.patch(model, plan):
            return spans_of(ropepatch.perplexity(model, None, pieces()))
    recipe = recipe_of(case["steps"], case["seed"])
    with adapted(plan, recipe, given.work / f"{start}-{case['seed']}") as (trained, record):
        kept = {key: record[key] for key in ("tokens", "seconds", "gate")}
        return kept | spans_of(ropepatch.perplexity(trained, None, pieces()))


@cache
def pieces() -> list[Any]:
    """The windows of the first stories."""
    windows = cut_windows(PLACE.loaded[1], stream_documents(STORIES), length=PLACE.target, count=None)
    return [ids for _, ids in windows[:WINDOWS]]


def recipe_of(steps: int, seed: int) -> Recipe:
    """The recipe of a run."""
    recipe, stories = read_recipe("tiny"), (Texts(text=str(STORIES)),)
    return recipe.model_copy(
        update={
            "data": Data(sources=stories, windows=("1x", "4x"), tokens_per_batch="2k", boundaries=False),
            "trainer": {**recipe.trainer, "max_steps": steps},
            "watch": Watch(every=250, windows=WINDOWS, passkey_trials=0),
            "seed": seed,
        }
    )


def fitted(work: Path) -> Path:
    """The scaling file of a fit to the training text, which differs from the held-out text."""
    file, text = work / "fitted.json", work / "windows.jsonl"
    if not file.exists():
        tokenizer = Checkpoint(Path(PLACE.place)).tokenizer
        RecipeReader(
            recipe=recipe_of(1, 0),
            tokenizer=tokenizer,
            trained=PLACE.trained,
            target=PLACE.target,
            vocabulary=len(tokenizer),
            folder=PLACE.place,
        ).write_windows(text)
        options = {"text": text, "field": "input_ids", "work": work / "fit"}
        ropepatch.fit(PLACE.place, to=PLACE.target, **options).save(file)
    return file


def spans_of(curve: LossCurve) -> Row:
    """The nats per token by range of positions; and by window, for paired differences."""
    return {
        "nats": {f"{begin} to {end}": curve.between(begin, end).value for begin, end in SPANS},
        "by_window": [nats / tokens for nats, tokens in curve.between(0, PLACE.target).clusters],
    }


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=1000, help="of each start")
    parser.add_argument("--seeds", type=int, default=1, help="of each start")


STUDY = Study(name="fit-starts", about=__doc__, cases=cases, measure=measure, options=add_options, work=True)


STARTS = {OWN: "base model within its original length"}


def starts_table(rows: list[Row]) -> str:
    """The table of the same steps from several starts, for docs/tables.py."""
    reference = first(rows, start=YARN, seed=0)
    assert reference is not None

    def over_yarn(row: Row) -> str:
        if "steps" not in row or row is reference:
            return ""
        pairs = zip(row["by_window"], reference["by_window"], strict=True)
        return signed(Mean.of([(one - other, 1) for one, other in pairs]))

    columns = {
        "": lambda row: (
            STARTS.get(row["start"], row["start"]) + (f", seed {row['seed']}" if "seed" in row else "")
        ),
        "steps": lambda row: f"{row.get('steps', 0)}",
        **{f"loss, {span}": lambda row, span=span: f"{row['nats'][span]:.4f}" for span in SHOWN},
        "loss, 0 to 1024, less YaRN's after the same steps": over_yarn,
    }
    return table(rows, columns)


if __name__ == "__main__":
    STUDY.main()
