"""Frequencies learned from the model's own distributions: what they leave of YaRN's excess on other text.

    python eval/studies/fit/taught_study.py CHECKPOINT... --text tinystories=FILE --text fairytales=FOLDER \
        --json eval/results/fit-taught.json [--learn fairytales=FOLDER]

A fit without a text (`ropepatch.fit(model, to=...)`) learns on rows that the model writes itself; with
--learn, on that text. Then 24 windows of each text are read by the baseline through its own window, by the
teacher, by YaRN and by what was learned. Rows in the file are not measured again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

import ropepatch
from ropepatch.attention import teaching_window
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import cut_windows

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from study import Row, Rows

WINDOWS = 24
TEACHER = "rerope"


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="CHECKPOINT")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--text", action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--learn", default="itself", metavar="NAME=PATH")
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    rows = Rows(arguments.json, "fit, taught")
    for path in arguments.models:
        measure(path, arguments, rows)


def measure(path: str, arguments: argparse.Namespace, rows: Rows) -> None:
    """Add the rows of a checkpoint that are missing."""
    learned, _, text = arguments.learn.partition("=")
    fitted = f"taught on {learned}, seed {arguments.seed}"
    cell = {"model": Path(path).name, "factor": arguments.factor}
    texts = dict(one.split("=", 1) for one in arguments.text)
    wanted = [
        (place, label)
        for place in texts
        for label in ("own window", TEACHER, "yarn", fitted)
        if not rows.of(**cell, text=place, label=label)
    ]
    if not wanted:
        return
    model, tokenizer = ropepatch.load(path, device="cpu")
    window = model.config.max_position_embeddings
    to, found = arguments.factor * window, None
    for place, label in wanted:
        cut = cut_windows(tokenizer, list(stream_documents(texts[place])), length=to, count=WINDOWS)
        pieces = [torch.tensor(ids) for _, ids in cut]
        row: Row = cell | {"text": place, "label": label}
        if label == fitted:
            found = found or ropepatch.fit(
                path, to=to, text=text or None, steps=arguments.steps, seed=arguments.seed
            )
            row |= {"divisors": found.scaling.divisors, "attention_factor": found.scaling.attention_factor}
            row |= {key: found.record[key] for key in ("start", "found", "decided_by", "held_out", "steps")}
            row["seconds"] = found.record["seconds"]
        if label == "own window":
            curve = ropepatch.perplexity(model, None, pieces, window=window, stride=window // 2)
            row["documents"] = [document for document, _ in cut]
        else:
            how: dict[str, Any] = {} if label == fitted else {"to": to}
            if label == TEACHER:
                how |= {"window": teaching_window(window)}
            with ropepatch.patch(model, found.scaling if label == fitted and found else label, **how):
                curve = ropepatch.perplexity(model, None, pieces)
        row["nats"] = [round(nll.mean().item(), 6) for nll in curve.nll]
        row["short"] = [round(nll[: window - 1].mean().item(), 6) for nll in curve.nll]
        rows.add(row, model)
        mean = sum(row["nats"]) / len(row["nats"])
        print(f"{row['model']}, {place}, {label}: {mean:.4f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
