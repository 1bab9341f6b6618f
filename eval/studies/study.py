"""The frame of all studies: cases, a function from a case to its row, a file that resumes, and tables.

A case identifies a row, and rows in the file are not measured again. The file is written after every row,
under a lock, with a row per line. Each row refers to one of the `recorded` starts: date, commit, command,
versions, machine, and digests of the input files.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock

import ropepatch
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import cut_windows, digest
from ropepatch.data.tiny.tales import Tale, held_out_tales
from ropepatch.evaluation.intervals import Mean, difference
from ropepatch.evaluation.perplexity import LossCurve
from ropepatch.files import whole_file
from ropepatch.model.checkpoint import TINY
from ropepatch.report.printers import markdown_rows
from ropepatch.training.recipe import Recipe

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from reporting import environment, lines

RESULTS = Path(__file__).parents[1] / "results"
SHARED = Path(__file__).resolve().parents[3] / "shared"
STORIES = SHARED / "texts" / "tinystories" / "true_case.txt"
OWN, FLOOR = "own window", "floor"
KEYS = 40  # prompts with one key each
Row = dict[str, Any]
Item = TypeVar("Item")


# Models and texts


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint and a target length, with held-out text: synthetic stories for tiny, else TinyStories.

    Args:
        name: tiny, or the name of a folder of shared/checkpoints.
        factor: The target length over L.
        windows: The number of windows of text.
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
        """The model and its tokenizer."""
        return ropepatch.load(self.place, device="cpu")

    @cached_property
    def trained(self) -> int:
        """The original context length L in tokens."""
        config = json.loads((self.place / "config.json").read_text(encoding="utf-8"))
        return int(config["max_position_embeddings"])

    @property
    def target(self) -> int:
        """The target length N in tokens."""
        return self.factor * self.trained

    @property
    def named(self) -> Row:
        """The values that identify it in a row."""
        return {"model": self.name, "factor": self.factor, "target": self.target}

    @property
    def tales(self) -> list[Tale]:
        """The held-out synthetic stories of tiny."""
        return held_out_tales(self.loaded[1], length=self.target, count=self.windows)

    @cached_property
    def pieces(self) -> list[tuple[int, Any]]:
        """The windows, each with the index of the document in which it begins."""
        if self.name == "tiny":
            return list(enumerate(tale.ids.tolist() for tale in self.tales))
        documents = list(stream_documents(STORIES))
        held_out = documents[trained_on(documents) :]
        return cut_windows(
            self.loaded[1], held_out, length=self.target, count=self.windows
        )

    def losses(self, model: Any, **how: Any) -> Row:
        """The nats and tokens of each document: of all tokens, of the first L, and of the last quarter."""
        documents, pieces = zip(*self.pieces, strict=True)
        return self._spans(ropepatch.perplexity(model, None, pieces, **how), documents)

    def through_own_window(self) -> Row:
        """The losses of the unscaled model in sliding windows of L tokens, with a stride of L/2."""
        return self.losses(
            self.loaded[0], window=self.trained, stride=self.trained // 2
        )

    def floor(self) -> Row:
        """The least possible losses on the synthetic stories of tiny."""
        return self._spans(
            LossCurve(tuple(-tale.log_probs()[1:] for tale in self.tales))
        )

    def _spans(self, curve: LossCurve, documents: Sequence[int] | None = None) -> Row:
        curve = curve if documents is None else curve.of_documents(documents)
        return {
            "all": curve.at(self.target).clusters,
            "short": curve.at(self.trained).clusters,
            "last": curve.between(self.target * 3 // 4, self.target).clusters,
            "digest": digest(ids for _, ids in self.pieces),
        }

    def keys(self, model: Any, count: int = KEYS, seed: int = 1) -> Row:
        """The log-prob and the accuracy of passkeys at the target length, by prompt."""
        answers = ropepatch.passkey(
            model, self.loaded[1], lengths=[self.target], haystacks=count, seed=seed
        )
        log_prob, found = answers.log_prob(self.target), answers.found(self.target)
        return {"log_prob": log_prob.clusters, "found": found.clusters}


@cache
def checkpoint(name: str, factor: int) -> Checkpoint:
    """The checkpoint of a case, loaded once."""
    return Checkpoint(name, factor)


def trained_on(documents: Sequence[Any]) -> int:
    """The number of stories, from the first, that may be used for training."""
    return len(documents) * 17 // 20


@contextmanager
def trained_model(plan: Any, recipe: Recipe, out: Path) -> Iterator[tuple[Any, Row]]:
    """Train, yield the model in float32 with the record of the training, and remove the folder."""
    folder = ropepatch.train(
        plan, out, recipe=recipe, reading=False, say=log_line
    ).folder
    record = json.loads((folder / "ropepatch.json").read_text(encoding="utf-8"))[
        "training"
    ]
    yield ropepatch.load(folder, device="cpu")[0].float(), record
    shutil.rmtree(out)


# A study


def inputs_of(case: Row) -> list[Path]:
    """The input files of a case: its weights, and the stories."""
    if "model" not in case:
        return []
    place = TINY if case["model"] == "tiny" else SHARED / "checkpoints" / case["model"]
    return [
        place / "model.safetensors",
        *([] if case["model"] == "tiny" else [STORIES]),
    ]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A list of cases and a function from a case to its row.

    Args:
        name: The name of its file in eval/results.
        about: The docstring of its module.
        cases: A function from the arguments of the command to the cases.
        measure: A function from a case to its row, or to several rows of one measurement.
        options: Adds options to the command.
        inputs: The input files of a case.
        work: Whether the command needs a folder for trainings.
    """

    name: str
    about: str | None
    cases: Callable[[Namespace], Iterable[Row]]
    measure: Callable[[Row, Namespace], Row | list[Row]]
    options: Callable[[ArgumentParser], object] = lambda parser: None
    inputs: Callable[[Row], Iterable[Path]] = inputs_of
    work: bool = False

    def main(self, words: Sequence[str] | None = None) -> None:
        """Measure the rows that the file lacks."""
        self.run(self.command().parse_args(words))

    def run(self, given: Namespace) -> None:
        """Measure the rows that the file lacks; if a case fails, the others continue."""
        torch.set_num_threads(given.threads)
        if self.work:
            given.work.mkdir(parents=True, exist_ok=True)
        rows, longest, failed = Rows(given.json, self.name), 0.0, 0
        end = time.perf_counter() + 60 * given.minutes
        for case in self.missing(given, rows):
            began = time.perf_counter()
            if began + longest > end:
                log_line(f"another row does not fit into {given.minutes:.3g} minutes")
                break
            try:
                found = self.measure(case, given)
            except Exception:  # the other rows are measured
                failed += 1
                traceback.print_exc()
                log_line(f"{', '.join(map(str, case.values()))}: failed")
                continue
            longest = max(longest, time.perf_counter() - began)
            taken = {
                "seconds": round(time.perf_counter() - began, 1),
                "threads": torch.get_num_threads(),
            }
            several = found if isinstance(found, list) else [found]
            rows.add(*(case | taken | one for one in several), inputs=self.inputs(case))
            log_line(f"{', '.join(map(str, case.values()))}: {taken['seconds']} s")
        if failed:
            sys.exit(f"error: {failed} cases failed")

    def missing(self, given: Namespace, rows: Rows) -> Iterator[Row]:
        """The cases of these arguments without a row."""
        for case in self.cases(given):
            selected = any(one.items() <= case.items() for one in given.only or [{}])
            if selected and not rows.of(**case):
                yield case

    def command(self) -> ArgumentParser:
        """The command line."""
        parser = ArgumentParser(
            description=self.about, formatter_class=RawDescriptionHelpFormatter
        )
        default = RESULTS / f"{self.name}.json"
        parser.add_argument(
            "--json",
            type=Path,
            default=default,
            help="the file to which rows are added",
        )
        parser.add_argument(
            "--only",
            type=named,
            nargs="+",
            metavar="NAME=VALUE,...",
            help="these cases",
        )
        parser.add_argument(
            "--minutes",
            type=float,
            default=math.inf,
            help="begin no row that takes longer",
        )
        parser.add_argument("--threads", type=int, default=torch.get_num_threads())
        if self.work:
            parser.add_argument(
                "--work", type=Path, required=True, help="the folder of the trainings"
            )
        self.options(parser)
        return parser


def named(text: str) -> Row:
    """The values of a case from text such as "model=tiny,factor=4"."""
    pairs = (pair.split("=", 1) for pair in text.split(","))
    return {name: int(value) if value.isdecimal() else value for name, value in pairs}


def log_line(line: str) -> None:
    """Print a line with the time on stderr."""
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


class Rows:
    """The rows of a study in its file; several processes may add rows.

    Args:
        file: The JSON file.
        task: The name of the study.
    """

    def __init__(self, file: Path, task: str) -> None:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        self._file, self._task, self._start = file, task, environment() | {"gpu": gpu}
        self._read()

    def _read(self) -> None:
        held = (
            json.loads(self._file.read_text(encoding="utf-8"))
            if self._file.exists()
            else {}
        )
        self.rows: list[Row] = held.get("rows", [])
        self._recorded: list[Row] = held.get("recorded", [])

    def of(self, **named: Any) -> list[Row]:
        """The rows with these values; a missing value counts as None."""
        return [
            row
            for row in self.rows
            if all(row.get(name) == value for name, value in named.items())
        ]

    def add(self, *rows: Row, inputs: Iterable[Path] = ()) -> None:
        """Append rows with this start; sums of nats are rounded to 6 digits."""
        read = digests(tuple(inputs))
        with FileLock(f"{self._file}.lock"):
            self._read()
            starts = [{**start, "inputs": {}} for start in self._recorded]
            if (new := {**self._start, "inputs": {}}) not in starts:
                self._recorded.append({**new})
                starts.append(new)
            place = starts.index(new)
            self._recorded[place]["inputs"] |= read
            for row in rows:
                rounded = {name: _rounded(value) for name, value in row.items()}
                self.rows.append(rounded | {"recorded": place})
            record = {"task": self._task, "recorded": self._recorded, "rows": self.rows}
            with whole_file(self._file) as partial:
                partial.write_text(lines(record), encoding="utf-8")


@cache
def digests(inputs: tuple[Path, ...]) -> dict[str, str]:
    """The SHA-256 of each file, by the names of its folder and the file."""
    from hashlib import file_digest

    found = {}
    for place in inputs:
        with place.open("rb") as file:
            found["/".join(place.parts[-2:])] = file_digest(file, "sha256").hexdigest()
    return found


def _rounded(value: Any) -> Any:
    """The clusters of a mean, rounded; any other value unchanged."""
    if not (
        isinstance(value, tuple)
        and all(isinstance(cluster, tuple) for cluster in value)
    ):
        return value
    return [[round(total, 6), weight] for total, weight in value]


# Tables


def table(items: Iterable[Item], columns: Mapping[str, Callable[[Item], str]]) -> str:
    """A Markdown table with a line for each item."""
    return markdown_rows(
        [*columns], [[cell(item) for cell in columns.values()] for item in items]
    )


def by(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """The rows by the values of these names."""
    places: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        places.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return places


def by_case(rows: list[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """The rows by model, factor and target."""
    return by(rows, "model", "factor", "target")


def first(rows: Iterable[Row], **values: Any) -> Row | None:
    """The first row with these values, or None."""
    return next((row for row in rows if values.items() <= row.items()), None)


def excess(row: Row, base: Row, span: str = "all") -> Mean:
    """The nats per token above the base, paired by document.

    Raises:
        ValueError: If they were measured on different windows.
    """
    if row["digest"] != base["digest"]:
        raise ValueError(f"{row} and {base} were measured on different windows")
    return difference(Mean.of(row[span]), Mean.of(base[span]))


def averaged(rows: Sequence[Row], *spans: str) -> Row:
    """A row with the mean of each span over several rows, such as seeds, of the same documents."""
    mean = dict(rows[0])
    for span in spans:
        totals = zip(*(row[span] for row in rows), strict=True)
        mean[span] = [
            [sum(total for total, _ in each) / len(rows), each[0][1]] for each in totals
        ]
    return mean


def share(correct: int, n: int) -> Mean:
    """An accuracy with one answer per prompt."""
    return Mean.of([(1, 1)] * correct + [(0, 1)] * (n - correct), share=True)


def counted(mean: Mean) -> str:
    """The number of correct answers of all, with the interval of the accuracy."""
    low, high = mean.interval()
    return f"{mean.value * mean.weight:.0f}/{mean.weight:.0f} ({low:.0%} to {high:.0%})"


def signed(mean: Mean) -> str:
    """A difference with its interval."""
    low, high = mean.interval()
    return f"{mean.value:+.4f} [{low:+.4f}, {high:+.4f}]"
