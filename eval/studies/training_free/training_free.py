"""Every method on the bundled checkpoint, training-free, at 2, 4 and 8 times its window.

    python eval/studies/training_free/training_free.py --json eval/results/tiny-training-free.json

The loss on held-out tales by stretches of positions, beside the floor that no model can beat and the floor
for a reader of the last 256 tokens alone; and the retrieval of passkeys by length. Restartable: rows already
in the file are kept if they were measured with the same settings, wherever that was: every row says in which
of the environments. So a new method costs its own measurement alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

import ropepatch
from ropepatch.data.tiny.tales import Tale, held_out_tales
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.results import environment, results_json

FACTORS = (2, 4, 8)
SETTINGS: dict[str, Any] = {"tales": 32, "haystacks": 40, "seed": 0}

# A method whose parameters must be given; the others are measured with their defaults. Lists of factors are
# what a search finds, and none was made for this checkpoint.
GIVEN: dict[str, dict[str, Any]] = {"abf": {"rope_theta": 500_000.0}}


def measured() -> list[str]:
    """The methods that need no more than the target, and those that are given something here."""
    return [name for name, method in ropepatch.METHODS.items() if name in GIVEN or not method.required()]


def stretches(trained: int, target: int) -> list[tuple[int, int]]:
    """The trained window, then doublings of it up to the target."""
    spans = [(0, trained)]
    while spans[-1][1] < target:
        spans.append((spans[-1][1], 2 * spans[-1][1]))
    return spans


def losses(curve: LossCurve, trained: int, target: int) -> dict[str, list[float]]:
    """Nats per token by stretch, and how far the 95 % interval over tales reaches on either side."""
    read = {f"{a} to {b}": curve.between(a, b).loss for a, b in stretches(trained, target)}
    return {
        span: [round(loss.value, 4), round(loss.interval()[1] - loss.value, 4)] for span, loss in read.items()
    }


def measure(model: Any, tokenizer: Any, trained: int, target: int) -> dict[str, Any]:
    """The losses and the retrieval of a model, patched or not."""
    tales = held_out_tales(tokenizer, length=target, count=SETTINGS["tales"])
    curve = ropepatch.perplexity(model, None, [tale.ids for tale in tales])
    lengths = [end for _, end in stretches(trained, target)]
    keys = {name: SETTINGS[name] for name in ("haystacks", "seed")}
    answers = ropepatch.passkey(model, tokenizer, lengths=lengths, **keys)
    found = {str(length): answers.found(length).clusters for length in lengths}
    return {
        "nats": losses(curve, trained, target),
        "passkey": {
            length: {"correct": sum(int(one) for one, _ in clusters), "n": len(clusters)}
            for length, clusters in found.items()
        },
    }


def floors(tokenizer: Any, trained: int, target: int) -> dict[str, dict[str, list[float]]]:
    """What no model can beat: with all it has read, and with the trained window alone."""
    tales = held_out_tales(tokenizer, length=target, count=SETTINGS["tales"])
    floors = {
        "floor": [tale.log_probs() for tale in tales],
        f"{trained}-token floor": [nearby(tale, trained) for tale in tales],
    }
    return {
        name: losses(LossCurve(tuple(-nats[1:] for nats in of_tales)), trained, target)
        for name, of_tales in floors.items()
    }


def nearby(tale: Tale, window: int) -> Tensor:
    """The log-probability [T] of every token for a reader who sees the last `window` tokens alone."""
    return tale.prior.masked_fill((tale.distance > 0) & (tale.distance <= window), 0.0)


def rows_to_keep(earlier: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """The rows of an earlier file, by factor and method; none of one measured with other settings."""
    same = all(earlier.get(key) == record[key] for key in ("task", "model", "trained", "settings", "given"))
    rows: dict[str, Any] = earlier["results"] if same else {}
    return rows


def main() -> None:
    """Measure what the file does not hold yet, and write it after every method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    out = parser.parse_args().json
    model, tokenizer = ropepatch.load("tiny", device="cpu")
    trained = model.config.max_position_embeddings
    record: dict[str, Any] = {
        "task": "training-free",
        "model": "tiny",
        "trained": trained,
        "settings": SETTINGS,
        "given": GIVEN,
    }
    earlier = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    results, here = rows_to_keep(earlier, record), environment(model)
    environments = earlier["environments"] if results else []
    if here not in environments:
        environments.append(here)
    record["environments"] = environments
    record["floors"] = {str(s): floors(tokenizer, trained, s * trained) for s in FACTORS}
    record["results"] = results
    for factor in FACTORS:
        target = factor * trained
        by_method = results.setdefault(str(factor), {})
        for name in measured():
            if name in by_method:
                continue
            print(f"{name} {factor} x", file=sys.stderr, flush=True)
            plan = ropepatch.plan("tiny", to=target, method=name, **GIVEN.get(name, {}))
            with ropepatch.patch(model, plan):
                row = measure(model, tokenizer, trained, target)
            by_method[name] = {"env": environments.index(here), **row}
            out.write_text(results_json(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
