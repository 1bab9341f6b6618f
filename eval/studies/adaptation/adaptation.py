"""Adaptations side by side: methods at equal tokens, short and true length at equal tokens and at equal time.

    python eval/studies/adaptation/adaptation.py --out RUNS --json eval/results/adaptation.json
    python eval/studies/adaptation/adaptation.py --out RUNS --json FILE --only "yarn;linear" --threads 1
    python eval/studies/adaptation/adaptation.py --starts --out RUNS --json FILE \
        [--fitted FILE] [--steps 1000] [--seeds 3]

Each run trains by the recipe `tiny` with what RUNS changes, and is then measured on tales it has not seen,
beside the floor that no model can beat, and by passkeys. `babyllama` trains on real stories (../shared).
`--starts` adapts it at 4 x, by the same steps on the same rows, from YaRN and from fitted frequencies;
without `--fitted` it is fitted first, on what is trained on.
Restartable: a run that is in the file is not made again, and one that was interrupted resumes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ropepatch
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import Texts, cut_windows
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.results import environment, results_json
from ropepatch.files import whole_file
from ropepatch.model.loading import load_tokenizer
from ropepatch.training.recipe import Data, Recipe, Watch, read_recipe
from ropepatch.training.supply import RecipeReader

TARGET, TRAINED = 2048, 256
SPANS = [(0, 256), (256, 512), (512, 1024), (1024, 2048), (0, 2048)]
LENGTHS, HAYSTACKS = [128, 256, 512, 1024, 2048], 100
SHARED = Path(__file__).resolve().parents[4] / "shared"
STORIES = SHARED / "texts" / "tinystories" / "true_case.txt"
BABYLLAMA = SHARED / "checkpoints" / "babyllama-361"
# A step of 8 rows of 256 tokens takes this share of the time of one row of 2048: `--time` measures it.
TIME_OF_SHORT_ROWS = 0.63


@dataclass(frozen=True)
class Run:
    """What differs from the recipe `tiny`."""

    method: str = "yarn"
    windows: tuple[str, ...] | None = None
    share_of_steps: float = 1.0

    def recipe(self) -> Recipe:
        """The recipe of this run."""
        recipe = read_recipe("tiny")
        steps = round(recipe.max_steps * self.share_of_steps)
        data = recipe.data.model_copy(update={"windows": self.windows or recipe.data.windows})
        return recipe.model_copy(update={"data": data, "trainer": {**recipe.trainer, "max_steps": steps}})


RUNS = {
    "yarn": Run(),
    "linear": Run(method="linear"),
    "ntk": Run(method="ntk"),
    "short": Run(windows=("1x",)),
    "true": Run(windows=("8x",)),
    "true, time of short": Run(windows=("8x",), share_of_steps=TIME_OF_SHORT_ROWS),
}


@dataclass(frozen=True)
class Start:
    """Where an adaptation of babyllama-361 at 4 x starts.

    Args:
        fitted: From fitted frequencies, not from YaRN's.
    """

    fitted: bool = False

    def recipe(self, steps: int, seed: int) -> Recipe:
        """The recipe of this run."""
        recipe = read_recipe("tiny")
        data = Data(
            sources=(Texts(text=str(STORIES)),), windows=("1x", "4x"), tokens_per_batch="2k", boundaries=False
        )
        changes = {
            "data": data,
            "trainer": {**recipe.trainer, "max_steps": steps},
            "watch": Watch(every=250, windows=STORY_WINDOWS, passkey_trials=0),
            "seed": seed,
        }
        return recipe.model_copy(update=changes)


STORY_TARGET, STORY_WINDOWS = 1024, 32
STORY_SPANS = [(0, 256), (256, 512), (512, 1024), (768, 1024), (0, 1024)]
STARTS = {
    "yarn": Start(),
    "fit": Start(fitted=True),
}


def stories() -> Recipe:
    """babyllama-361 on the stories it was trained on, all joined."""
    data = Data(
        sources=(Texts(text=str(STORIES)),), windows=("1x", "8x"), tokens_per_batch="2k", boundaries=False
    )
    watch = Watch(every=100, windows=16, passkey_trials=0)
    return read_recipe("tiny").model_copy(update={"data": data, "watch": watch})


def curve_of(model: Any, pieces: list[torch.Tensor]) -> dict[str, float]:
    """Nats per token by stretch of positions."""
    curve = ropepatch.perplexity(model, None, pieces)
    return {f"{begin} to {end}": curve.between(begin, end).mean for begin, end in SPANS}


def judge_scaled(method: str) -> dict[str, Any]:
    """The bundled checkpoint scaled, and not trained."""
    model, tokenizer = ropepatch.load("tiny", device="cpu")
    with ropepatch.patch(model, ropepatch.plan("tiny", to=TARGET, method=method)):
        return judge(model, tokenizer)


def judge(model: Any, tokenizer: Any) -> dict[str, Any]:
    """The losses and the passkeys of a model."""
    tales = held_out_tales(tokenizer, length=TARGET, count=24)
    answers = ropepatch.passkey(model, tokenizer, lengths=LENGTHS, haystacks=HAYSTACKS)
    found = {length: answers.found(length).clusters for length in LENGTHS}
    return {
        "nats": curve_of(model, [tale.ids for tale in tales]),
        "keys": {str(n): [sum(int(one) for one, _ in each), len(each)] for n, each in found.items()},
    }


def make(name: str, recipe: Recipe, model: str | Path, method: str, out: Path) -> dict[str, Any]:
    """One run, trained and with its history."""
    folder = out / name.replace(", ", "-").replace(" ", "-")
    plan = ropepatch.plan(model, to=TARGET, method=method)
    ropepatch.adapt(plan, recipe, folder, say=lambda line: print(name, line, file=sys.stderr, flush=True))
    record = json.loads((folder / "ropepatch.json").read_text(encoding="utf-8"))["adaptation"]
    history = json.loads((folder / "adaptation" / "history.json").read_text(encoding="utf-8"))
    kept = {key: record[key] for key in ("steps", "tokens", "gate")}
    measured = [row for row in history if "short_loss" in row]
    keys = ("step", "short_loss", "target_loss", "target_passkey")
    return kept | {
        "folder": str(folder),
        "method": method,
        "windows": list(recipe.data.windows),
        "history": [{key: row[key] for key in keys if key in row} for row in measured],
    }


def judge_stories(folder: Path) -> dict[str, Any]:
    """babyllama before, training-free and after, on the same held-out stories."""
    base, tokenizer = ropepatch.load(BABYLLAMA, device="cpu")
    pieces = cut_windows(tokenizer, stream_documents(STORIES), length=TARGET, count=None)[:16]
    held_out = [torch.tensor(piece) for _, piece in pieces]
    first = [ids[:TRAINED] for ids in held_out]
    # The text of the long stretch, read by the base model within its context: 256 tokens at a time.
    same = [ids[begin : begin + TRAINED] for ids in held_out for begin in range(1024, TARGET, TRAINED)]
    within = {
        "0 to 256": ropepatch.perplexity(base, None, first).at(TRAINED).mean,
        "1024 to 2048, 256 tokens at a time": ropepatch.perplexity(base, None, same).at(TRAINED).mean,
    }
    with ropepatch.patch(base, ropepatch.plan(BABYLLAMA, to=TARGET, method="yarn")):
        free = curve_of(base, held_out)
    after = curve_of(ropepatch.load(folder, device="cpu")[0], held_out)
    return {"windows": len(held_out), "base": within, "training-free": free, "adapted": after}


def compare_starts(arguments: argparse.Namespace) -> None:
    """The same steps from every start, on stories that are neither fitted to nor trained on."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    fitted = arguments.fitted or fitted_on_stories(arguments.out)
    base, tokenizer = ropepatch.load(BABYLLAMA, device="cpu")
    windows = cut_windows(tokenizer, stream_documents(STORIES), length=STORY_TARGET, count=None)
    pieces = [torch.tensor(ids) for _, ids in windows[:STORY_WINDOWS]]
    found = results_in(arguments.json)
    if "base" not in found:
        own = ropepatch.perplexity(base, None, pieces, window=TRAINED, stride=TRAINED // 2)
        found["base"] = {"through its own window": spans_of(own)}
        for name, method in (("yarn", "yarn"), ("fit", str(fitted))):
            with ropepatch.patch(base, ropepatch.plan(BABYLLAMA, to=STORY_TARGET, method=method)):
                found["base"][name] = spans_of(ropepatch.perplexity(base, None, pieces))
        held = json.loads(fitted.read_text(encoding="utf-8"))
        held["fit"] |= {"model": BABYLLAMA.name, "text": Path(held["fit"]["text"]).name}  # not where they are
        found |= {
            "fitted": held,
            "windows": len(pieces),
            "threads": arguments.threads,
            "env": environment(base),
        }
    for seed in range(arguments.seeds):
        for name in arguments.only.split(";") if arguments.only else STARTS:
            key = f"{name}, seed {seed}"
            if key in found["runs"]:
                continue
            start = STARTS[name]
            plan = ropepatch.plan(BABYLLAMA, to=STORY_TARGET, method=str(fitted) if start.fitted else "yarn")
            folder = arguments.out / key.replace(", ", "-").replace(" ", "-")
            say = partial(print, key, file=sys.stderr, flush=True)
            ropepatch.adapt(plan, start.recipe(arguments.steps, seed), folder, say=say)
            record = json.loads((folder / "ropepatch.json").read_text(encoding="utf-8"))["adaptation"]
            kept = ("steps", "tokens", "seconds", "gate")
            curve = ropepatch.perplexity(ropepatch.load(folder, device="cpu")[0], None, pieces)
            row = {key: record[key] for key in kept if key in record} | {"seed": seed, "start": name}
            found["runs"][key] = row | spans_of(curve)
            with whole_file(arguments.json) as partial_file:
                partial_file.write_text(results_json(found) + "\n", encoding="utf-8")


def fitted_on_stories(out: Path) -> Path:
    """The scaling file of a fit to what the adaptations train on, which is not what they are judged by."""
    file = out / "fitted.json"
    if not file.exists():
        recipe, text = Start().recipe(1, 0), out / "windows.jsonl"
        tokenizer = load_tokenizer(BABYLLAMA)
        reader = RecipeReader(
            recipe=recipe,
            tokenizer=tokenizer,
            trained=TRAINED,
            target=STORY_TARGET,
            vocabulary=len(tokenizer),
            folder=BABYLLAMA,
        )
        reader.write_windows(text)
        found = ropepatch.fit(BABYLLAMA, to=STORY_TARGET, text=text, field="input_ids", work=out / "fit")
        found.save(file)
    return file


def spans_of(curve: LossCurve) -> dict[str, Any]:
    """Nats per token by stretch of positions; and by window, for paired differences."""
    return {
        "nats": {f"{begin} to {end}": curve.between(begin, end).mean for begin, end in STORY_SPANS},
        "by_window": [nats / tokens for nats, tokens in curve.between(0, STORY_TARGET).loss.clusters],
    }


def step_times(rounds: int = 12) -> float:
    """The time of a step of 8 x 256 tokens over one of 1 x 2048, forward and backward, medians."""
    model, _ = ropepatch.load("tiny", device="cpu")
    model.train()
    ids = torch.randint(1024, (1, TARGET))
    seconds: dict[int, list[float]] = {TRAINED: [], TARGET: []}
    for _ in range(rounds):
        for window in seconds:
            began = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(ids.view(-1, window), labels=ids.view(-1, window)).loss
            loss.backward()
            seconds[window].append(time.perf_counter() - began)
    short, true = (sorted(seconds[window])[rounds // 2] for window in (TRAINED, TARGET))
    return short / true


def results_in(file: Path) -> dict[str, Any]:
    """What is known already."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"runs": {}}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the runs")
    parser.add_argument("--json", type=Path, required=True, help="the file of results")
    parser.add_argument("--only", help="names of runs, separated by ;")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--time", action="store_true", help="measure the time of short rows over true ones")
    parser.add_argument("--starts", action="store_true", help="adapt babyllama at 4 x from several starts")
    parser.add_argument("--fitted", type=Path, help="a scaling file of that model and target")
    parser.add_argument("--steps", type=int, default=1000, help="of each start")
    parser.add_argument("--seeds", type=int, default=1, help="of each start")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.starts:
        compare_starts(arguments)
        return
    if arguments.time:
        print(step_times())
        return
    names = arguments.only.split(";") if arguments.only else [*RUNS, "babyllama"]
    for name in names:
        if name in results_in(arguments.json)["runs"]:
            continue
        if name == "babyllama":
            row = make(name, stories(), BABYLLAMA, "yarn", arguments.out)
            row |= judge_stories(Path(row.pop("folder")))
        else:
            run = RUNS[name]
            row = make(name, run.recipe(), "tiny", run.method, arguments.out)
            row |= judge(*ropepatch.load(row.pop("folder"), device="cpu"))
        base, tokenizer = ropepatch.load("tiny", device="cpu")
        tales = held_out_tales(tokenizer, length=TARGET, count=24)
        floor = LossCurve(tuple(-tale.log_probs()[1:] for tale in tales))
        known = results_in(arguments.json)
        free = known.get("training_free") or {method: judge_scaled(method) for method in ("none", "yarn")}
        same = {
            "floor": {f"{begin} to {end}": floor.between(begin, end).mean for begin, end in SPANS},
            "training_free": free,
            "threads": arguments.threads,
            "env": environment(base),
        }
        runs = results_in(arguments.json)["runs"] | {name: row}  # to which another process may have added one
        found = {**same, "runs": runs}
        with whole_file(arguments.json) as partial:
            partial.write_text(results_json(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
