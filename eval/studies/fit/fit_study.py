"""Learned frequencies next to the published ones: excess loss on held-out text.

    python eval/studies/fit/fit_study.py [--only "model=tiny,factor=4"]

For every checkpoint, text, factor and seed, a vector is fitted to the first 70 % of the documents. It is
measured on 24 windows of the last 15 %, like every published training-free method. The excess loss is the
loss over the target length, less that of the base model on the same tokens with a sliding window of its
original length (stride: half of it). "on the test windows" continues the descent of each seed on the test
windows themselves, as a bound for any vector.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ropepatch
from ropepatch.data.sources import SEPARATOR, stream_documents
from ropepatch.data.texts import cut_windows
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.intervals import Mean
from ropepatch.fitting import fit
from ropepatch.fitting.descent import Descent, FitSettings, batch_of, step
from ropepatch.fitting.loss import FitLoss, learnable
from ropepatch.fitting.vectors import Vector
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.scaling import METHODS

sys.path.insert(0, str(Path(__file__).parents[1]))  # study.py

from study import SHARED, STORIES, Row, Rows, Study, by, checkpoint, first, signed, table

BASE, DESCENT, BOUND = "none", "descent", "on the test windows"
PUBLISHED = [name for name, kind in METHODS.items() if not kind.required() and name != BASE]
TEXTS = {"tales": None, "tinystories": STORIES, "fairytales": SHARED / "texts" / "fairytales"}
STEPS = {"babyllama-361": 100, "stories-260k": 50, "tiny": 60}
CELLS = (  # with the vectors that are fitted
    *(("tiny", "tales", factor, [DESCENT]) for factor in (2, 4, 8)),
    ("babyllama-361", "fairytales", 4, [DESCENT]),
    *(("stories-260k", "fairytales", factor, [DESCENT]) for factor in (2, 4)),
    *((name, "tinystories", 8, [DESCENT]) for name in ("babyllama-361", "stories-260k")),
    *((m, "tinystories", n, [DESCENT, BOUND]) for m in ("babyllama-361", "stories-260k") for n in (2, 4)),
)
SEEDS, WINDOWS = 3, 24
OF_A_FIT = ("start", "found", "decided_by", "held_out", "forward_tokens", "seconds")
BOUND_STEPS, JUDGED_EVERY = 100, 10
LEARNED_FROM, TESTED_FROM = 0.7, 0.85  # shares of the documents


def cases(given: Namespace) -> Iterator[Row]:
    """The published methods of each cell, then its fits."""
    for model, text, factor, fitted in CELLS:
        cell = {"model": model, "text": text, "factor": factor}
        yield from (cell | {"label": name, "seed": None} for name in (BASE, *PUBLISHED))
        for label in fitted:
            yield from (cell | {"label": label, "seed": seed, "steps": STEPS[model]} for seed in range(SEEDS))


class Text(NamedTuple):
    """The text of a cell.

    Args:
        pieces: The test windows.
        documents: The document in which each begins.
        floor: Their least possible loss, if known.
        learned: The training documents; None for the synthetic stories of tiny.
    """

    pieces: list[torch.Tensor]
    documents: list[int]
    floor: list[float] | None
    learned: list[str] | None


@cache
def text_of(model: str, text: str, factor: int) -> Text:
    """The text of a cell."""
    place, source = checkpoint(model, factor), TEXTS[text]
    if source is None:
        floor = [round(-tale.log_probs()[1:].mean().item(), 6) for tale in place.tales]
        return Text([tale.ids for tale in place.tales], [*range(WINDOWS)], floor, None)
    documents = [str(document) for document in stream_documents(source)]
    last = documents[int(TESTED_FROM * len(documents)) :]
    cut = cut_windows(place.loaded[1], last, length=place.target, count=WINDOWS)
    pieces = [torch.tensor(ids) for _, ids in cut]
    return Text(pieces, [index for index, _ in cut], None, documents[: int(LEARNED_FROM * len(documents))])


def measure(case: Row, given: Namespace) -> Row:
    """The mean loss of each window, of all its tokens and of those within the original length."""
    place, label = checkpoint(case["model"], case["factor"]), case["label"]
    model, text = place.loaded[0], text_of(case["model"], case["text"], case["factor"])
    row: Row = {}
    if label == DESCENT:
        fitted = learned(case, text)
        scaling, row = fitted.scaling, {key: fitted.record[key] for key in OF_A_FIT}
    elif label == BOUND:
        scaling = bound(model, text.pieces, first(Rows(given.json, "fit").rows, **case | {"label": DESCENT}))
    else:
        scaling = ropepatch.make_scaling(label, factor=float(case["factor"]))
    if case["seed"] is not None:
        row |= {"divisors": scaling.divisors, "attention_factor": scaling.attention_factor}
    elif label == BASE:
        own = ropepatch.perplexity(model, None, text.pieces, window=place.trained, stride=place.trained // 2)
        row = {"documents": text.documents, "own": by_window(own)}
        row |= {} if text.floor is None else {"floor": text.floor}
    with ropepatch.patch(model, scaling):
        curve = ropepatch.perplexity(model, None, text.pieces)
    return row | {"nats": by_window(curve), "short": by_window(curve, place.trained - 1)}


def by_window(curve: LossCurve, tokens: int | None = None) -> list[float]:
    """The mean loss of each window, over all or the first tokens."""
    return [round(nll[:tokens].mean().item(), 6) for nll in curve.nll]


def learned(case: Row, text: Text) -> Any:
    """The fit of a cell and seed."""
    place = checkpoint(case["model"], case["factor"])
    with tempfile.TemporaryDirectory() as folder:
        file = None
        if text.learned is not None:
            file = Path(folder, "learned.txt")
            file.write_text(SEPARATOR.join(text.learned), encoding="utf-8")
        options = {"seed": case["seed"], "steps": case["steps"], "teacher": "none"}
        source = "tiny" if place.name == "tiny" else place.place
        return fit(source, to=place.target, text=file, **options)


def bound(model: Any, pieces: Sequence[torch.Tensor], start: Row | None) -> Any:
    """The best scaling of a descent on the test windows, from a learned one."""
    if start is None:
        raise SystemExit("the descent of this seed is not in the file")
    found, factor = Checkpoint.of(model), float(start["factor"])
    values = {key: start[key] for key in ("divisors", "attention_factor")}
    scaling = ropepatch.make_scaling("custom", factor=factor, **values)
    vector = Vector.of(scaling.frequencies(found.rope), found.rope)
    settings = FitSettings(steps=BOUND_STEPS)
    with learnable(model, found) as module:
        loss = FitLoss(model, module, found.rope, pieces)
        state, tried = Descent.at(vector), [vector]
        for taken in range(1, BOUND_STEPS + 1):
            state = step(loss, state, batch=batch_of(loss), settings=settings)
            if taken % JUDGED_EVERY == 0:
                tried.append(Vector.from_flat(state.mean, found.rope.num_pairs))
        return min(tried, key=lambda one: loss.validate(one)[0]).scaling(factor)


STUDY = Study(name="fit", about=__doc__, cases=cases, measure=measure)


# The table, for docs/tables.py: means over seeds, intervals of paired differences over documents


class Cell:
    """The results of a checkpoint, text and factor.

    Args:
        rows: Its rows.
    """

    def __init__(self, rows: list[Row]) -> None:
        labels = by(rows, "label")
        self.base, self.fits = labels[BASE,][0], labels[DESCENT,]
        self.published = min(
            (row for row in rows if row["label"] in METHODS and row is not self.base),
            key=lambda row: mean(row["nats"]),
        )
        self.bounds = labels.get((BOUND,), [])
        self.least = self.base.get("floor", self.base["own"])

    def of_fits(self, key: str) -> list[float]:
        """The mean of each window over the seeds."""
        return [mean(window) for window in zip(*(row[key] for row in self.fits), strict=True)]

    def over_published(self, key: str) -> Mean:
        """The loss of the learned vector less that of the published method."""
        return self._mean(less(self.of_fits(key), self.published[key]))

    @property
    def share(self) -> Mean | None:
        """The remaining share of the published method's excess loss, over the floor if it is known.

        None if either excess is not above 0.
        """
        above = less(self.published["nats"], self.least)
        remaining = less(self.of_fits("nats"), self.least)
        return self._mean(remaining, above) if mean(above) > 0 and mean(remaining) > 0 else None

    @property
    def bound(self) -> float | None:
        """The remaining share of the best vector that was fitted to the test windows themselves."""
        if self.share is None or not self.bounds:
            return None
        best, least = min(mean(row["nats"]) for row in self.bounds), mean(self.least)
        return (best - least) / (mean(self.published["nats"]) - least)

    def excess(self, nats: Sequence[float]) -> float:
        """The mean loss less that of the baseline within its original length."""
        return mean(less(nats, self.base["own"]))

    def _mean(self, values: Sequence[float], weights: Sequence[float] | None = None) -> Mean:
        documents = self.base.get("documents") or range(len(values))
        sums: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for document, value, weight in zip(documents, values, weights or [1.0] * len(values), strict=True):
            sums[document][0] += value
            sums[document][1] += weight
        return Mean.of(list(sums.values()))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def less(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(one, other, strict=True)]


def learned_table(rows: list[Row]) -> str:
    """The table of learned vectors next to published methods."""
    cells = by(rows, "model", "text", "factor")

    def remaining(cell: Cell) -> str:
        if cell.share is None:
            return ""
        low, high = cell.share.interval()
        return f"{cell.share.value:.0%} [{low:.0%}, {high:.0%}]"

    def by_seed(cell: Cell) -> str:
        seeds = ", ".join(f"{cell.excess(row['nats']):.4f}" for row in cell.fits)
        return f"{cell.excess(cell.of_fits('nats')):.4f} ({seeds})"

    columns = {
        "checkpoint, text": lambda cell: f"{cell.base['model']}, {cell.base['text']}",
        "factor": lambda cell: f"{cell.base['factor']}",
        "best published": lambda cell: cell.published["label"],
        "its excess loss": lambda cell: f"{cell.excess(cell.published['nats']):.4f}",
        "excess loss, learned (by seed)": by_seed,
        "remaining": remaining,
        "remaining, fitted on the test windows": lambda cell: (
            "" if cell.bound is None else f"{cell.bound:.0%}"
        ),
        "loss, learned less published": lambda cell: signed(cell.over_published("nats")),
        "the same, first L tokens": lambda cell: signed(cell.over_published("short")),
        "tokens processed": lambda cell: f"{mean([row['forward_tokens'] for row in cell.fits]) / 1e6:.1f} M",
    }
    return table([Cell(cells[key]) for key in sorted(cells)], columns)


if __name__ == "__main__":
    STUDY.main()
