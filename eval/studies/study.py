"""What studies share: a checkpoint at a factor, a file of rows that resumes, and differences between rows."""

from __future__ import annotations

import json
import shutil
import sys
import time
from argparse import ArgumentParser, RawTextHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from filelock import FileLock

import ropepatch
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import cut_windows, digest
from ropepatch.data.tiny.tales import Tale, held_out_tales
from ropepatch.evaluation.intervals import Mean, difference
from ropepatch.evaluation.results import environment
from ropepatch.files import json_text, whole_file
from ropepatch.model.source import TINY
from ropepatch.model.survey import survey
from ropepatch.training.recipe import Recipe

SHARED = Path(__file__).resolve().parents[3] / "shared"
STORIES = SHARED / "texts" / "tinystories" / "true_case.txt"
OWN, FLOOR = "own window", "floor"
KEYS = 40  # haystacks, of a key each
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A checkpoint at a factor, read on what it was not trained on: tales for tiny, else stories.

    Args:
        name: tiny, or the name of a folder of shared/checkpoints.
        factor: The target over L.
        windows: How many are read.
    """

    name: str
    factor: int
    windows: int = 24

    @property
    def place(self) -> Path:
        """The folder of the checkpoint."""
        return TINY if self.name == "tiny" else SHARED / "checkpoints" / self.name

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        """Model and tokenizer."""
        return ropepatch.load(self.place, device="cpu")

    @cached_property
    def trained(self) -> int:
        """L, in tokens."""
        model = self.loaded[0]
        return survey(model.config.to_dict(), model).rope.original_max_position_embeddings

    @property
    def target(self) -> int:
        """N, in tokens."""
        return self.factor * self.trained

    @property
    def named(self) -> Row:
        """What names the case in a row."""
        return {"model": self.name, "factor": self.factor, "target": self.target}

    @property
    def tales(self) -> list[Tale]:
        """The held-out tales of tiny."""
        return held_out_tales(self.loaded[1], length=self.target, count=self.windows)

    @cached_property
    def pieces(self) -> list[tuple[int, Any]]:
        """The windows, each with the index of the document in which it begins."""
        if self.name == "tiny":
            return list(enumerate(tale.ids.tolist() for tale in self.tales))
        documents = list(stream_documents(STORIES))
        held_out = documents[trained_on(documents) :]
        return cut_windows(self.loaded[1], held_out, length=self.target, count=self.windows)

    def losses(self, model: Any, **how: Any) -> Row:
        """Nats and tokens of each document: in all, within the first L tokens, and in the last quarter."""
        documents, pieces = zip(*self.pieces, strict=True)
        curve = ropepatch.perplexity(model, None, pieces, **how).of_documents(documents)
        return {
            "all": curve.at(self.target).loss.clusters,
            "short": curve.at(self.trained).loss.clusters,
            "last": curve.between(self.target * 3 // 4, self.target).loss.clusters,
            "digest": digest(pieces),
        }

    def keys(self, model: Any) -> Row:
        """Ask for passkeys at the target: the log-probabilities and the shares found, by haystack."""
        asked = ropepatch.passkey(model, self.loaded[1], lengths=[self.target], haystacks=KEYS, seed=1)
        answers = asked.log_prob(self.target), asked.found(self.target)
        return {"log_prob": answers[0].clusters, "found": answers[1].clusters}

    def through_own_window(self) -> Row:
        """The losses of the model as it is, half a window at a time."""
        return self.losses(self.loaded[0], window=self.trained, stride=self.trained // 2)


def said(line: str) -> None:
    """On stderr, with the time."""
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


@contextmanager
def adapted(plan: Any, recipe: Recipe, out: Path) -> Iterator[tuple[Any, Row]]:
    """The model that a training makes, in float32, and the training's record; the folder goes after it."""
    folder = ropepatch.adapt(plan, recipe, out, say=said).folder
    record = json.loads((folder / "ropepatch.json").read_text(encoding="utf-8"))["adaptation"]
    yield ropepatch.load(folder, device="cpu")[0].float(), record
    shutil.rmtree(out)


def trained_on(documents: list[Any]) -> int:
    """How many of the stories, the first ones, may be trained on."""
    return len(documents) * 17 // 20


class Rows:
    """The rows of a study in its file, which is written after each, a row a line.

    Args:
        file: JSON; what it holds already is not measured again.
        task: The name of the study.
    """

    def __init__(self, file: Path, task: str) -> None:
        self._file, self._task = file, task
        self._read()

    def _read(self) -> None:
        held = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else {}
        self.rows: list[Row] = held.get("rows", [])
        self._env: Row = held.get("env", {})

    def of(self, **named: Any) -> list[Row]:
        """Those with these values, a name that a row lacks being None."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in named.items())]

    def add(self, row: Row, model: Any = None) -> None:
        """Append a row, its sums of nats to 6 digits; several processes may.

        Args:
            row: What was measured.
            model: Whose environment is on record; None where the row says it.
        """
        with FileLock(f"{self._file}.lock"):
            self._read()
            self.rows.append({name: _rounded(value) for name, value in row.items()})
            if model is not None:
                self._env[row.get("model", "tiny")] = environment(model)
            lines = ",\n".join(map(partial(json_text, indent=None), self.rows))
            record = (
                f'{{"task": {json_text(self._task)}, "env": {json_text(self._env)}, "rows": [\n{lines}\n]}}\n'
            )
            with whole_file(self._file) as place:
                place.write_text(record, encoding="utf-8")


def _rounded(value: Any) -> Any:
    """The clusters of a mean; any other value as it is."""
    if not (isinstance(value, tuple) and all(isinstance(cluster, tuple) for cluster in value)):
        return value
    return [[round(total, 6), weight] for total, weight in value]


def cases_parser(description: str | None, *, work: bool = False) -> ArgumentParser:
    """The command line of a study: its file, which cases, and of a training study the folder to train in."""
    parser = ArgumentParser(description=description, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="the file of results")
    if work:
        parser.add_argument("--work", type=Path, required=True, help="the folder of the trainings")
    parser.add_argument("--only", help='cases, separated by ";": "babyllama-361 4"')
    return parser


def chosen(cases: tuple[Any, ...], only: str | None) -> list[Any]:
    """The cases that are named, as "tiny 4;tiny 8", or all."""
    return [case for case in cases if only is None or f"{case.name} {case.factor}" in only.split(";")]


def by_case(rows: list[Row]) -> dict[tuple[str, int, int], list[Row]]:
    """The rows by model, factor and target."""
    places: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        places.setdefault((row["model"], row["factor"], row["target"]), []).append(row)
    return places


def excess(row: Row, base: Row, span: str = "all") -> Mean:
    """Nats per token above the base, document by document.

    Raises:
        ValueError: They have read different windows.
    """
    if row["digest"] != base["digest"]:
        raise ValueError(f"{row} and {base} have read different windows")
    return difference(Mean.of(row[span]), Mean.of(base[span]))


def averaged(rows: Sequence[Row], *spans: str) -> Row:
    """A row of each span's mean over rows of the same documents, as of seeds."""
    mean = dict(rows[0])
    for span in spans:
        totals = zip(*(row[span] for row in rows), strict=True)
        mean[span] = [[sum(total for total, _ in each) / len(rows), each[0][1]] for each in totals]
    return mean


def counted(share: Mean) -> str:
    """How many of how many, with the interval of the share."""
    low, high = share.interval()
    return f"{share.value * share.weight:.0f}/{share.weight:.0f} ({low:.0%} to {high:.0%})"


def signed(mean: Mean) -> str:
    """A difference with its interval."""
    low, high = mean.interval()
    return f"{mean.value:+.4f} [{low:+.4f}, {high:+.4f}]"
