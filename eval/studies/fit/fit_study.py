"""Learned frequencies beside the published ones: excess loss on text that neither fit nor choice has seen.

    python eval/studies/fit/fit_study.py --json eval/results/fit.json CHECKPOINT... --text tinystories=FILE

For every checkpoint, text, factor and seed a vector is fitted on the first 70 % of the documents and read,
like every published training-free method, on 24 windows of the last 15 %. The excess is the loss over the
whole target, less that of the baseline on the same tokens through its own window, half a window at a time.
`--bound` descends further, from the vector of every seed, on the test windows themselves: how much lower a
vector could be there. Rows in the file are kept.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import ropepatch
from ropepatch.data.sources import SEPARATOR, stream_documents
from ropepatch.data.texts import cut_windows
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.evaluation.curves import LossCurve
from ropepatch.fitting import fit, published
from ropepatch.fitting.descent import Descent, FitSettings, batch_of, step
from ropepatch.fitting.loss import FitLoss, learnable
from ropepatch.fitting.vectors import Vector
from ropepatch.model.source import find_source
from ropepatch.model.survey import survey, survey_checkpoint
from ropepatch.scaling import METHODS
from ropepatch.scaling.searched import CustomDivisors

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from study import Rows, said

WINDOWS = 24
BOUND = "on the test windows"
OF_A_FIT = ("start", "found", "decided_by", "held_out", "forward_tokens", "seconds")
BOUND_STEPS, JUDGED_EVERY = 100, 10
LEARNED_FROM, TESTED_FROM = 0.7, 0.85  # shares of the documents


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="CHECKPOINT")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--text", action="append", default=[], metavar="NAME=PATH", help="none for tiny")
    parser.add_argument("--factors", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bound", action="store_true", help="descend further on the test windows")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    texts = dict(one.split("=", 1) for one in arguments.text) or {"tales": None}
    rows = Rows(arguments.json, "fit")
    for model in arguments.models:
        for text, path in texts.items():
            for factor in arguments.factors:
                cell = Cell(model, text, path, factor, arguments.steps)
                labels = ["descent", *([BOUND] if arguments.bound else [])]
                for row, of in cell.rows(arguments.seeds, labels, rows.rows):
                    rows.add(row, of)
                    nats = sum(row["nats"]) / len(row["nats"])
                    said(f"{cell.name}, {text}, {factor} x, {row['label']}, seed {row['seed']}: {nats:.4f}")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return *(row[key] for key in ("model", "text", "factor", "label", "seed")), row.get("steps")


def _by_window(curve: LossCurve, tokens: int | None = None) -> list[float]:
    """The mean loss of each window, of its first tokens or of all."""
    return [round(nll[:tokens].mean().item(), 6) for nll in curve.nll]


class Cell:
    """One checkpoint, text and factor."""

    def __init__(self, model: str, text: str, path: str | None, factor: int, steps: int) -> None:
        self.model, self.text, self.path, self.factor, self.steps = model, text, path, factor, steps
        self.name = Path(model).name
        self.rope = survey_checkpoint(find_source(model, weights=False)).rope
        self.window = self.rope.original_max_position_embeddings
        self.to = factor * self.window

    def rows(
        self, seeds: int, labels: Sequence[str], known: Sequence[dict[str, Any]]
    ) -> Iterator[tuple[dict[str, Any], Any]]:
        """The rows that are missing, each with the model."""
        wanted = [(name, None) for name in ("none", *self._published())]
        wanted += [(name, seed) for name in labels for seed in range(seeds)]
        done = {_key(row) for row in known}
        missing = [one for one in wanted if self._key(*one) not in done]
        if not missing:
            return
        found = list(known)
        model, tokenizer = ropepatch.load(self.model, device="cpu")
        with tempfile.TemporaryDirectory() as place:
            learned, pieces, documents, floor = self.texts(tokenizer, Path(place))
            own = ropepatch.perplexity(model, None, pieces, window=self.window, stride=self.window // 2)
            for label, seed in missing:
                row = {
                    "model": self.name,
                    "text": self.text,
                    "factor": self.factor,
                    "label": label,
                    "seed": seed,
                }
                if seed is None:
                    scaling = ropepatch.make_scaling(label, factor=float(self.factor))
                    if label == "none":
                        row |= {"documents": documents, "own": _by_window(own)}
                        row |= {} if floor is None else {"floor": floor}
                elif label == BOUND:
                    learnt = [one for one in found if _key(one) == self._key(one["label"], seed)]
                    scaling = self._bound(model, pieces, min(learnt, key=lambda one: sum(one["nats"])))
                else:
                    options = {"seed": seed, "steps": self.steps, "teacher": "none"}
                    fitted = fit(self.model, to=self.to, text=learned, **options)
                    scaling = fitted.scaling
                    row |= {key: fitted.record[key] for key in OF_A_FIT}
                if seed is not None:
                    row |= {"steps": self.steps, "divisors": scaling.divisors}
                    row |= {"attention_factor": scaling.attention_factor}
                with ropepatch.patch(model, scaling):
                    curve = ropepatch.perplexity(model, None, pieces)
                row |= {"nats": _by_window(curve), "short": _by_window(curve, self.window - 1)}
                found.append(row)
                yield row, model

    def _key(self, label: str, seed: int | None) -> tuple[Any, ...]:
        steps = None if seed is None else self.steps
        return self.name, self.text, self.factor, label, seed, steps

    def _published(self) -> list[str]:
        following = [
            name for name, method in METHODS.items() if method.length_dependent and name != "longrope-switch"
        ]
        return [name for name in published(self.rope, float(self.factor)) if name != "none"] + following

    def _bound(self, model: Any, pieces: Sequence[torch.Tensor], learned: dict[str, Any]) -> CustomDivisors:
        """The best on the test windows of a descent on these very windows, from what was learned."""
        found = survey(model.config.to_dict(), model)
        scaling = CustomDivisors(
            factor=float(self.factor),
            divisors=tuple(learned["divisors"]),
            attention_factor=learned["attention_factor"],
        )
        start = Vector.of(scaling.frequencies(found.rope), found.rope)
        settings = FitSettings(steps=BOUND_STEPS)
        with learnable(model, found) as module:
            loss = FitLoss(model, module, found.rope, pieces)
            state, tried = Descent.at(start), [start]
            for taken in range(1, BOUND_STEPS + 1):
                state = step(loss, state, batch=batch_of(loss), settings=settings)
                if taken % JUDGED_EVERY == 0:
                    tried.append(Vector.from_flat(state.mean, found.rope.num_pairs))
            best = min(tried, key=lambda vector: loss.validate(vector)[0])
        return best.scaling(float(self.factor))

    def texts(
        self, tokenizer: Any, place: Path
    ) -> tuple[Path | None, list[torch.Tensor], list[int], list[float] | None]:
        """The text to learn from and the windows to test on.

        Returns:
            The file to learn from, None for the tales of tiny; the windows to test on; for each the index of
            the document in which it begins; their least loss, where that is known.
        """
        if self.path is None:
            tales = held_out_tales(tokenizer, length=self.to, count=WINDOWS)
            floor = [round(-tale.log_probs()[1:].mean().item(), 6) for tale in tales]
            return None, [tale.ids for tale in tales], list(range(WINDOWS)), floor
        documents = [str(document) for document in stream_documents(self.path)]
        learned = place / "learned.txt"
        first = documents[: int(LEARNED_FROM * len(documents))]
        learned.write_text(SEPARATOR.join(first), encoding="utf-8")
        last = documents[int(TESTED_FROM * len(documents)) :]
        cut = cut_windows(tokenizer, last, length=self.to, count=WINDOWS)
        return learned, [torch.tensor(ids) for _, ids in cut], [index for index, _ in cut], None


if __name__ == "__main__":
    main()
