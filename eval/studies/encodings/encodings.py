"""Train short, test long: one small LLaMA with every position encoding, read up to 16 times its window.

    python eval/studies/encodings/encodings.py --out RUNS --json eval/results/encodings.json \
        [--only "alibi;rope"] [--seeds 1]
    python eval/studies/encodings/encodings.py --recalibrate --out RUNS --json eval/results/encodings.json

Every run trains by recipes/tiny/encodings.yaml, on the same rows in the same order. It is then measured on
tales that no run has seen, beside the floor that no model can beat, by the tokens that repeat what the tale
told before, and by passkeys. `--recalibrate` takes the run with rope, puts other encodings into it, trains
1000 steps more within the window, and measures them beside YaRN after as many tokens, in rows as short and in
rows of its target.
Restartable: a row in the file is not measured again, and a run that was interrupted resumes.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ropepatch
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.results import environment

PRETRAINING = Path(__file__).resolve().parents[3] / "recipes" / "tiny"
sys.path.insert(0, str(PRETRAINING))  # the program that trains the bundled checkpoint trains these models too
sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

import study  # noqa: E402
from pretraining import Rows, pretrain, train  # noqa: E402
from pretraining_recipe import Recipe, Stage, read_recipe  # noqa: E402
from pretraining_rows import Stock  # noqa: E402

RECIPE = PRETRAINING / "encodings.yaml"
FACTOR, TALES, HAYSTACKS = 16, 32, 20
MAIN = ("rope", "p-rope", "alibi", "t5", "nope", "sinusoidal")  # with every seed; the others with the first
# Rows beyond the window are there, and are not trained; the text's length is that of training throughout.
PARAMETERS: dict[str, dict[str, Any]] = {
    "normalised": {"length": 128},
    "learned": {"rows": 2048},
    "nope-layers": {"every": 3},  # the last of three
}
UNTRAINED_ALIKE = ("drope",)  # which is nope until there is a rope to drop
# With the windows, times that of training, at which they are trained on; rope alone says what the steps do.
RECALIBRATED = [("rope", 1), ("alibi", 1), ("drope", 1), ("t5", 1), ("p-rope", 1), ("yarn", 1), ("yarn", 16)]
RECALIBRATION: dict[str, Any] = {
    "tokens_per_step": 4096,
    "steps": 1000,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
}

Row = dict[str, Any]


def asked(recipe: Recipe, name: str, seed: int) -> Recipe:
    """The recipe with another encoding and seed."""
    return recipe.model_copy(update={"seed": seed, "encoding": {"name": name, **PARAMETERS.get(name, {})}})


def lengths_of(trained: int) -> list[int]:
    """What is read: the window, and its doubles."""
    return [trained * 2**k for k in range(FACTOR.bit_length())]


class Measure:
    """What is read by every model alike."""

    def __init__(self, tokenizer: Any, trained: int) -> None:
        self.tokenizer, self.trained = tokenizer, trained
        self.lengths = lengths_of(trained)
        tales = held_out_tales(tokenizer, length=self.lengths[-1], count=TALES)
        self.pieces = [tale.ids for tale in tales]
        self.distances = [tale.distance[1:] for tale in tales]  # of what a token repeats; 0 where nothing
        self.least = LossCurve(tuple(-tale.log_probs()[1:] for tale in tales))

    def losses(self, curve: LossCurve) -> Row:
        """Nats per token before each length: of all, and of those told near or far."""
        spans = {"near": (1, self.trained), "far": (self.trained, math.inf)}
        told: dict[str, dict[str, Row]] = {span: {} for span in spans}
        for length in self.lengths:
            nll, distance = (
                torch.cat([x[: length - 1] for x in each]) for each in (curve.nll, self.distances)
            )
            for span, (least, below) in spans.items():
                found = nll[(distance >= least) & (distance < below)]
                mean = found.mean().item() if len(found) else None
                told[span][str(length)] = {"nats": mean, "tokens": len(found)}
        nats = {str(length): curve.at(length).mean for length in self.lengths}
        return {"nats": nats, "told": told}

    def of(self, model: Any) -> Row:
        """The losses of a model, and the passkeys that it finds, of so many."""
        curve = ropepatch.perplexity(model, None, self.pieces)
        answers = ropepatch.passkey(model, self.tokenizer, lengths=self.lengths, haystacks=HAYSTACKS)
        keys = {}
        for length in self.lengths:
            found = answers.found(length).clusters
            keys[str(length)] = [sum(int(one) for one, _ in found), len(found)]
        return {**self.losses(curve), "keys": keys, "floor": self.losses(self.least)}


def scratch(
    recipe: Recipe, out: Path, seeds: int, only: list[str]
) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """What names each run from scratch, and how it is made."""
    names = [name for name in ropepatch.ENCODINGS if name not in UNTRAINED_ALIKE]
    for seed in range(seeds):
        for name in names if not seed else MAIN:
            if not only or name in only:
                run = {"study": "scratch", "encoding": name, "seed": seed}
                yield run, partial(trained_from_scratch, asked(recipe, name, seed), out / f"{name}-{seed}")


def trained_from_scratch(recipe: Recipe, folder: Path) -> Row:
    """Train, and measure."""
    anew, began = not folder.exists(), time.perf_counter()
    checkpoint = pretrain(recipe, folder)
    seconds = time.perf_counter() - began if anew else None  # of a run that was interrupted, unknown
    model, tokenizer = ropepatch.load(checkpoint, device="cpu")
    trained = recipe.model["max_position_embeddings"]
    return {"seconds": seconds, **Measure(tokenizer, trained).of(model), "env": environment(model)}


def recalibrations(recipe: Recipe, out: Path, only: list[str]) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """What names each recalibration, and how it is made."""
    trained = recipe.model["max_position_embeddings"]
    for name, times in RECALIBRATED:
        if not only or name in only:
            run = {"study": "recalibrated", "encoding": name, "window": times * trained, "seed": recipe.seed}
            yield run, partial(recalibrated, recipe, out, name, times * trained)


def recalibrated(recipe: Recipe, out: Path, name: str, window: int) -> Row:
    """Put an encoding, or YaRN, into the run with rope; measure, train on in rows of a window, measure."""
    base = pretrain(asked(recipe, "rope", recipe.seed), out / f"rope-{recipe.seed}")
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
    measure = Measure(tokenizer, trained)
    torch.manual_seed(recipe.seed)
    with put_into(loaded, name):
        before = measure.of(loaded)
        began = time.perf_counter()
        rows = Rows(stage, Stock.of(tokenizer, []), recipe.seed)
        train(loaded, stage, rows, recipe.seed, out / stage.name)
        seconds = time.perf_counter() - began
        loaded.eval()
        return {
            "seconds": seconds,
            "tokens": stage.steps * stage.tokens_per_step,
            "before": before,
            **measure.of(loaded),
            "env": environment(loaded),
        }


def put_into(model: Any, name: str) -> AbstractContextManager[Any]:
    """The encoding, or YaRN at the target."""
    if name == "yarn":
        return ropepatch.patch(model, ropepatch.make_scaling("yarn", factor=float(FACTOR)))
    return ropepatch.swap(model, name)


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for the runs")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", help='encodings, separated by ";"')
    parser.add_argument("--seeds", type=int, default=3, help="of the main ones")
    parser.add_argument("--recalibrate", action="store_true")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe = read_recipe(arguments.recipe)
    only = arguments.only.split(";") if arguments.only else []
    if arguments.recalibrate:
        wanted = recalibrations(recipe, arguments.out, only)
    else:
        wanted = scratch(recipe, arguments.out, arguments.seeds, only)
    rows = study.Rows(arguments.json, "encodings")
    for run, make in wanted:
        if not rows.of(**run):
            rows.add(run | make())
            study.said(f"{run}: {rows.rows[-1]['nats']}")


if __name__ == "__main__":
    main()
