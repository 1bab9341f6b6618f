"""What the options of a fit change: every objective and shape, on the same windows.

    python eval/studies/fit/fit_objectives.py --json eval/results/fit-objectives.json tiny --steps 60
    python eval/studies/fit/fit_objectives.py --json FILE CHECKPOINT --text tinystories=FILE

The checkpoint, the text to learn from and the 24 test windows are those of fit_study.py at 4 x. Every vector
is read at the trained window, at twice and at four times that; tiny is asked for passkeys, too.
Restartable: rows in the file are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from fit_study import Cell

import ropepatch
from ropepatch.evaluation.results import environment
from ropepatch.files import whole_file
from ropepatch.fitting import Objective
from ropepatch.fitting.fitting import fit

FACTOR, TRIALS = 4, 20
OPTIONS: dict[str, dict[str, Any]] = {
    "fit": {},
    "--short 4": {"objective": Objective(short=4.0)},
    "--lengths all": {"objective": Objective(lengths="all")},
    "--keys 4": {"objective": Objective(keys=4.0)},
    "--needles 1": {"objective": Objective(needles=1.0)},
    "--shape monotone": {"shape": "monotone"},
    "--shape smooth": {"shape": "smooth"},
    "--keep 4": {"keep": 4},
}


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="CHECKPOINT")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--text", metavar="NAME=PATH", help="none for tiny")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    text, path = arguments.text.split("=", 1) if arguments.text else ("tales", None)
    rows = json.loads(arguments.json.read_text(encoding="utf-8"))["rows"] if arguments.json.exists() else []
    cell = Cell(arguments.model, text, path, FACTOR, arguments.steps)
    done = {
        row["label"]
        for row in rows
        if (row["model"], row["text"]) == (cell.name, cell.text)
        and row.get("steps", arguments.steps) == arguments.steps
    }
    model, tokenizer = ropepatch.load(arguments.model)
    with tempfile.TemporaryDirectory() as place:
        learned, pieces, _ = cell.texts(tokenizer, Path(place))
        for label in ("none", "yarn", *OPTIONS):
            if label in done or (label == "--needles 1" and path is not None):
                continue
            row: dict[str, Any] = {"model": cell.name, "text": cell.text, "label": label}
            if label in OPTIONS:
                found = fit(
                    arguments.model, to=cell.to, text=learned, steps=arguments.steps, **OPTIONS[label]
                )
                scaling = found.scaling
                row |= {"steps": arguments.steps, "seconds": found.record["seconds"]}
                row |= {"divisors": scaling.divisors, "attention_factor": scaling.attention_factor}
            else:
                scaling = ropepatch.make_scaling(label, factor=float(FACTOR))
                row |= {"env": environment(model)}
            with ropepatch.patch(model, scaling):
                row |= read(model, tokenizer, pieces, cell.window, keys=path is None)
            rows.append(row)
            print(cell.name, label, row["nats"], row.get("keys", ""), file=sys.stderr, flush=True)
            with whole_file(arguments.json) as partial:
                partial.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


def read(
    model: Any, tokenizer: Any, pieces: list[torch.Tensor], window: int, *, keys: bool
) -> dict[str, Any]:
    """Nats per token of the test windows up to every length; and passkeys found at the target."""
    curve, target = ropepatch.perplexity(model, None, pieces), FACTOR * window
    found: dict[str, Any] = {
        "nats": {str(n): round(curve.at(n).mean, 6) for n in (window, 2 * window, target)}
    }
    if keys:
        cell = ropepatch.passkey(model, tokenizer, lengths=[target], trials=TRIALS).at(target)
        found["keys"] = f"{cell.correct}/{cell.n}"
    return found


if __name__ == "__main__":
    main()
