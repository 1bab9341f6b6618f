"""Train short, test long: one small LLaMA with every position encoding, at up to 16 times the length.

    python eval/studies/encodings/encodings.py --work RUNS [--only "study=scratch,encoding=alibi"]

Every run trains with recipes/tiny/encodings.yaml, on the same sequences in the same order. It is then
measured on held-out stories, next to their floor: on the tokens that repeat an earlier fact, and on
passkeys. The study `recalibrated` takes the run with RoPE, replaces RoPE, trains 1000 steps more within
the original length, and measures the result next to YaRN at equal tokens, on sequences as short and on
sequences of its target length. An interrupted run resumes.
"""

from __future__ import annotations

import math
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

import ropepatch
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.evaluation.curves import LossCurve

PRETRAINING = Path(__file__).resolve().parents[3] / "recipes" / "tiny"
sys.path.insert(0, str(PRETRAINING))  # the program that trains the bundled checkpoint
sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from pretraining import Rows, pretrain, train  # noqa: E402
from pretraining_recipe import Recipe, Stage, read_recipe  # noqa: E402
from pretraining_rows import Stock  # noqa: E402
from study import Row, Study  # noqa: E402

RECIPE = PRETRAINING / "encodings.yaml"
FACTOR, TALES, HAYSTACKS, SEEDS = 16, 32, 20, 3
MAIN = ("rope", "p-rope", "alibi", "t5", "nope", "sinusoidal")  # with every seed; the others with the first
# `learned` has untrained rows beyond the original length; `normalised` always divides by the training length.
PARAMETERS: dict[str, Row] = {
    "normalised": {"length": 128},
    "learned": {"rows": 2048},
    "nope-layers": {"every": 3},  # the last of three
}
SAME_FROM_SCRATCH = ("drope",)  # equals nope without RoPE to drop
# With the length of the further training as a multiple of the original; rope shows the effect of the steps.
RECALIBRATED = (("rope", 1), ("alibi", 1), ("drope", 1), ("t5", 1), ("p-rope", 1), ("yarn", 1), ("yarn", 16))
RECALIBRATION: Row = {
    "tokens_per_step": 4096,
    "steps": 1000,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
}
SCRATCH, AGAIN = "scratch", "recalibrated"


def cases(given: Namespace) -> Iterator[Row]:
    """The runs from scratch, then the recalibrated ones."""
    recipe = read_recipe(given.recipe)
    for seed in range(SEEDS):
        for name in MAIN if seed else ropepatch.ENCODINGS:
            if name not in SAME_FROM_SCRATCH:
                yield {"study": SCRATCH, "encoding": name, "seed": seed}
    for name, times in RECALIBRATED:
        window = times * recipe.model["max_position_embeddings"]
        yield {"study": AGAIN, "encoding": name, "window": window, "seed": recipe.seed}


def measure(case: Row, given: Namespace) -> Row:
    """The losses and passkeys of a run, and the time of its training."""
    recipe, name, seed = read_recipe(given.recipe), case["encoding"], case["seed"]
    if case["study"] == AGAIN:
        return recalibrated(recipe, given.work, name, case["window"])
    folder = given.work / f"{name}-{seed}"
    anew, began = not folder.exists(), time.perf_counter()
    model, tokenizer = ropepatch.load(pretrain(recipe_with(recipe, name, seed), folder), device="cpu")
    seconds = time.perf_counter() - began if anew else None  # unknown for an interrupted run
    return {"seconds": seconds} | results_of(model, tokenizer, recipe.model["max_position_embeddings"])


def recipe_with(recipe: Recipe, name: str, seed: int) -> Recipe:
    """The recipe with another encoding and seed."""
    return recipe.model_copy(update={"seed": seed, "encoding": {"name": name, **PARAMETERS.get(name, {})}})


def recalibrated(recipe: Recipe, out: Path, name: str, window: int) -> Row:
    """Apply an encoding or YaRN to the run with RoPE; measure, train further at one length, measure."""
    base = pretrain(recipe_with(recipe, "rope", recipe.seed), out / f"rope-{recipe.seed}")
    model, tokenizer = ropepatch.load(base, device="cpu")
    trained = recipe.model["max_position_embeddings"]
    stage = Stage(
        name=f"recalibrate-{name}-{window}-{RECALIBRATION['steps']}",
        mixture=recipe.stages[-1].mixture,
        windows=[window],
        **RECALIBRATION,
    )
    loaded: Any = model.float()
    swapped = ropepatch.encodings.swapped(loaded)
    assert swapped is not None
    swapped.remove()
    torch.manual_seed(recipe.seed)
    yarn = name == "yarn"
    change = ropepatch.patch(loaded, "yarn", to=FACTOR * trained) if yarn else ropepatch.swap(loaded, name)
    with change:
        before = results_of(loaded, tokenizer, trained)
        began = time.perf_counter()
        rows = Rows(stage, Stock.of(tokenizer, []), recipe.seed)
        train(loaded, stage, rows, recipe.seed, out / stage.name)
        seconds = time.perf_counter() - began
        loaded.eval()
        row = {"seconds": seconds, "tokens": stage.steps * stage.tokens_per_step, "before": before}
        return row | results_of(loaded, tokenizer, trained)


# The same measurements for every model


@cache
def tales_of(tokenizer: Any, length: int) -> Any:
    """The stories, the distance of the fact that each token but the first repeats, and the floor."""
    tales = held_out_tales(tokenizer, length=length, count=TALES)
    distances = [tale.distance[1:] for tale in tales]
    return [tale.ids for tale in tales], distances, LossCurve(tuple(-tale.log_probs()[1:] for tale in tales))


def results_of(model: Any, tokenizer: Any, trained: int) -> Row:
    """The losses and passkeys of a model at the original length and its doublings, and the floor."""
    lengths = [trained * 2**k for k in range(FACTOR.bit_length())]
    pieces, distances, floor = tales_of(tokenizer, lengths[-1])

    def losses(curve: LossCurve) -> Row:
        spans = {"near": (1, trained), "far": (trained, math.inf)}
        told: dict[str, Row] = {span: {} for span in spans}
        for length in lengths:
            nll, distance = (torch.cat([x[: length - 1] for x in each]) for each in (curve.nll, distances))
            for span, (least, below) in spans.items():
                found = nll[(distance >= least) & (distance < below)]
                mean = found.mean().item() if len(found) else None
                told[span][str(length)] = {"nats": mean, "tokens": len(found)}
        return {"nats": {str(length): curve.at(length).value for length in lengths}, "told": told}

    answers = ropepatch.passkey(model, tokenizer, lengths=lengths, haystacks=HAYSTACKS)
    found = {str(length): answers.found(length).clusters for length in lengths}
    keys = {length: [sum(int(one) for one, _ in each), len(each)] for length, each in found.items()}
    return losses(ropepatch.perplexity(model, None, pieces)) | {"keys": keys, "floor": losses(floor)}


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.set_defaults(threads=1)


STUDY = Study(
    name="encodings",
    about=__doc__,
    cases=cases,
    measure=measure,
    options=add_options,
    inputs=lambda case: [RECIPE],
    work=True,
)

if __name__ == "__main__":
    STUDY.main()
