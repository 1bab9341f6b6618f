"""A temperature that grows with the position, on top of a scaling, as stock `ministral3` computes it.

    python eval/studies/temperature/temperature_study.py --json eval/results/temperature.json [--only CASE]

The weights of a LLaMA checkpoint are written as `ministral3`, whose query at position m is multiplied by
1 + beta ln(1 + floor(m / L)). Beside it stands the constant temperature c, multiplied into q_proj; beta = 0
is the scaling with a constant temperature alone. Each is read by stock transformers. tiny is also asked for
keys, under what the first half of the documents chooses. What `--json` holds already is not measured again.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import ropepatch
from ropepatch.evaluation.intervals import Mean

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

import study
from study import Row, Rows, cases_parser, chosen

METHODS: dict[str, dict[str, Any]] = {"yarn": {"attention_factor": 1.0}, "llama3": {}}
CONSTANTS = (1.0, 1.15, 1.3, 1.45)  # yarn's own is 1.296 at 4 times, 1.459 at 8 times
BETAS = (0.0, 0.05, 0.1, 0.2)
HAYSTACKS = 40


@dataclass(frozen=True)
class Case(study.Case):
    """A checkpoint at a factor.

    Args:
        constants: The constant temperatures.
    """

    constants: tuple[float, ...] = CONSTANTS

    def model(self, method: str, constant: float, beta: float) -> Any:
        """The weights under a scaling and both temperatures, as stock transformers loads them."""
        plan = ropepatch.plan(self.place, to=self.target, method=method, **METHODS[method])
        raw = plan.apply(json.loads((self.place / "config.json").read_text(encoding="utf-8")))
        with tempfile.TemporaryDirectory() as folder:
            for file in self.place.iterdir():
                (Path(folder) / file.name).symlink_to(file.resolve())
            (Path(folder) / "config.json").unlink()
            text = json.dumps(as_ministral3(raw, beta, self.trained))
            (Path(folder) / "config.json").write_text(text, encoding="utf-8")
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.mul_(constant)
        return model


CASES = (
    Case("babyllama-361", 4, 48),
    Case("stories-260k", 4, 16),
    Case("tiny", 4, 48, (*CONSTANTS, 1.6, 1.8)),
    Case("tiny", 8, 16, (*CONSTANTS, 1.6, 1.8)),
)


def as_ministral3(raw: dict[str, Any], beta: float, window: int) -> dict[str, Any]:
    """The config.json of a LLaMA checkpoint as that of the `ministral3` with its weights.

    Args:
        raw: Of the extended checkpoint.
        beta: By how much the temperature grows.
        window: L, in tokens, up to which it is 1.
    """
    stated = LlamaConfig.from_dict(raw).to_dict()  # the defaults of ministral3 are others
    ours = {"llama_4_scaling_beta": beta, "original_max_position_embeddings": window}
    return stated | {
        "model_type": "ministral3",
        "architectures": ["Ministral3ForCausalLM"],
        "rope_parameters": stated["rope_parameters"] | ours,
    }


def half(row: Row, span: str, *, first: bool) -> Mean:
    """The loss over one half of the documents."""
    clusters = row[span]
    middle = len(clusters) // 2
    return Mean.of(clusters[:middle] if first else clusters[middle:])


def picked(losses: list[Row]) -> tuple[Row, Row]:
    """The best constant temperature alone, and the best pair, by the first half of the documents."""

    def loss(row: Row) -> float:
        return half(row, "all", first=True).value

    return min((row for row in losses if row["beta"] == 0), key=loss), min(losses, key=loss)


def keys(case: Case, model: Any) -> Row:
    """Keys found at the target, of how many."""
    answers = ropepatch.passkey(model, case.loaded[1], lengths=[case.target], haystacks=HAYSTACKS)
    return {"keys": answers.found(case.target).clusters}


def jobs(case: Case, rows: Rows) -> Iterator[tuple[str, str, float, float]]:
    """The kind of each measurement, its method, constant and beta."""
    for method in METHODS:
        for constant in case.constants:
            yield from (("loss", method, constant, beta) for beta in BETAS)
        if case.name == "tiny":
            for row in picked(rows.of(**case.named, kind="loss", method=method)):
                yield "keys", method, row["constant"], row["beta"]


def measure(case: Case, rows: Rows) -> None:
    """Add the rows of a case that are not there."""
    for kind, method, constant, beta in jobs(case, rows):
        job = {"kind": kind, "method": method, "constant": constant, "beta": beta}
        if rows.of(**case.named, **job):
            continue
        began = time.perf_counter()
        model = case.model(method, constant, beta)
        found = case.losses(model) if kind == "loss" else keys(case, model)
        rows.add(case.named | job | found, model)
        seconds = time.perf_counter() - began
        print(f"{case.name} {case.factor} x: {job}, {seconds:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    """Measure what the file does not hold yet, and write it after every job."""
    arguments = cases_parser(__doc__).parse_args()
    rows = Rows(arguments.json, "temperature")
    for case in chosen(CASES, arguments.only):
        measure(case, rows)


if __name__ == "__main__":
    main()
