"""One frame of all studies: cases, a function from a case to its row, a file that resumes, and tables.

A case is what names a row, and a row that the file holds is not measured again. The file is written after
every row, under a lock, a row a line; each row says which of its `recorded` starts measured it: date, commit,
command, versions, machine, and digests of what was read.
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
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.intervals import Mean, difference
from ropepatch.files import whole_file
from ropepatch.model.source import TINY
from ropepatch.report.printers import markdown_rows
from ropepatch.training.recipe import Recipe

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from reporting import environment, lines

RESULTS = Path(__file__).parents[1] / "results"
SHARED = Path(__file__).resolve().parents[3] / "shared"
STORIES = SHARED / "texts" / "tinystories" / "true_case.txt"
OWN, FLOOR = "own window", "floor"
KEYS = 40  # haystacks, of a key each
Row = dict[str, Any]
Item = TypeVar("Item")


# What is read


@dataclass(frozen=True)
class Checkpoint:
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
        config = json.loads((self.place / "config.json").read_text(encoding="utf-8"))
        return int(config["max_position_embeddings"])

    @property
    def target(self) -> int:
        """N, in tokens."""
        return self.factor * self.trained

    @property
    def named(self) -> Row:
        """What names the checkpoint in a row."""
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
        return self._spans(ropepatch.perplexity(model, None, pieces, **how), documents)

    def through_own_window(self) -> Row:
        """The losses of the model as it is, half a window at a time."""
        return self.losses(self.loaded[0], window=self.trained, stride=self.trained // 2)

    def floor(self) -> Row:
        """The losses of tiny's tales that no model beats."""
        return self._spans(LossCurve(tuple(-tale.log_probs()[1:] for tale in self.tales)))

    def _spans(self, curve: LossCurve, documents: Sequence[int] | None = None) -> Row:
        curve = curve if documents is None else curve.of_documents(documents)
        return {
            "all": curve.at(self.target).clusters,
            "short": curve.at(self.trained).clusters,
            "last": curve.between(self.target * 3 // 4, self.target).clusters,
            "digest": digest(ids for _, ids in self.pieces),
        }

    def keys(self, model: Any, count: int = KEYS) -> Row:
        """Ask for passkeys at the target: the log-probabilities and the shares found, by haystack."""
        asked = ropepatch.passkey(model, self.loaded[1], lengths=[self.target], haystacks=count, seed=1)
        answers = asked.log_prob(self.target), asked.found(self.target)
        return {"log_prob": answers[0].clusters, "found": answers[1].clusters}


@cache
def checkpoint(name: str, factor: int) -> Checkpoint:
    """The checkpoint of a case, which is loaded once."""
    return Checkpoint(name, factor)


def trained_on(documents: Sequence[Any]) -> int:
    """How many of the stories, the first ones, may be trained on."""
    return len(documents) * 17 // 20


@contextmanager
def adapted(plan: Any, recipe: Recipe, out: Path) -> Iterator[tuple[Any, Row]]:
    """The model that a training makes, in float32, and the training's record; the folder goes after it."""
    folder = ropepatch.adapt(plan, recipe, out, say=said).folder
    record = json.loads((folder / "ropepatch.json").read_text(encoding="utf-8"))["adaptation"]
    yield ropepatch.load(folder, device="cpu")[0].float(), record
    shutil.rmtree(out)


# A study


def read_by(case: Row) -> list[Path]:
    """The weights that a case reads, and the stories."""
    if "model" not in case:
        return []
    place = TINY if case["model"] == "tiny" else SHARED / "checkpoints" / case["model"]
    return [place / "model.safetensors", *([] if case["model"] == "tiny" else [STORIES])]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A list of cases and a function from a case to its row.

    Args:
        name: That of its file in eval/results.
        about: The docstring of its module.
        cases: What names each row, by the words of the command.
        measure: What a case gives; several rows where one measurement gives them.
        options: Adds words of its own to the command.
        inputs: The files that a case reads.
        work: Whether the command takes a folder to train in.
    """

    name: str
    about: str | None
    cases: Callable[[Namespace], Iterable[Row]]
    measure: Callable[[Row, Namespace], Row | list[Row]]
    options: Callable[[ArgumentParser], object] = lambda parser: None
    inputs: Callable[[Row], Iterable[Path]] = read_by
    work: bool = False

    def main(self, words: Sequence[str] | None = None) -> None:
        """Measure what the file does not hold yet."""
        self.run(self.command().parse_args(words))

    def run(self, given: Namespace) -> None:
        """Measure what the file of these words does not hold yet; the others continue where a case fails."""
        torch.set_num_threads(given.threads)
        if self.work:
            given.work.mkdir(parents=True, exist_ok=True)
        rows, longest, failed = Rows(given.json, self.name), 0.0, 0
        end = time.perf_counter() + 60 * given.minutes
        for case in self.missing(given, rows):
            began = time.perf_counter()
            if began + longest > end:
                said(f"another row does not fit into {given.minutes:.3g} minutes")
                break
            try:
                found = self.measure(case, given)
            except Exception:  # of whatever kind: the other rows are measured
                failed += 1
                traceback.print_exc()
                said(f"{', '.join(map(str, case.values()))}: failed")
                continue
            longest = max(longest, time.perf_counter() - began)
            taken = {"seconds": round(time.perf_counter() - began, 1), "threads": torch.get_num_threads()}
            several = found if isinstance(found, list) else [found]
            rows.add(*(case | taken | one for one in several), inputs=self.inputs(case))
            said(f"{', '.join(map(str, case.values()))}: {taken['seconds']} s")
        if failed:
            sys.exit(f"error: {failed} cases failed")

    def missing(self, given: Namespace, rows: Rows) -> Iterator[Row]:
        """The cases of these words that the rows lack."""
        for case in self.cases(given):
            asked = any(one.items() <= case.items() for one in given.only or [{}])
            if asked and not rows.of(**case):
                yield case

    def command(self) -> ArgumentParser:
        """The command line."""
        parser = ArgumentParser(description=self.about, formatter_class=RawDescriptionHelpFormatter)
        default = RESULTS / f"{self.name}.json"
        parser.add_argument("--json", type=Path, default=default, help="the file of rows, which is added to")
        parser.add_argument("--only", type=named, nargs="+", metavar="NAME=VALUE,...", help="these cases")
        parser.add_argument("--minutes", type=float, default=math.inf, help="begin no row that takes longer")
        parser.add_argument("--threads", type=int, default=torch.get_num_threads())
        if self.work:
            parser.add_argument("--work", type=Path, required=True, help="the folder of the trainings")
        self.options(parser)
        return parser


def named(text: str) -> Row:
    """The values that a case is to have: "model=tiny,factor=4"."""
    pairs = (pair.split("=", 1) for pair in text.split(","))
    return {name: int(value) if value.isdecimal() else value for name, value in pairs}


def said(line: str) -> None:
    """On stderr, with the time."""
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


class Rows:
    """The rows of a study in its file; several processes may add to it.

    Args:
        file: JSON.
        task: The name of the study.
    """

    def __init__(self, file: Path, task: str) -> None:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        self._file, self._task, self._start = file, task, environment() | {"gpu": gpu}
        self._read()

    def _read(self) -> None:
        held = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else {}
        self.rows: list[Row] = held.get("rows", [])
        self._recorded: list[Row] = held.get("recorded", [])

    def of(self, **named: Any) -> list[Row]:
        """Those with these values, a name that a row lacks being None."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in named.items())]

    def start_of(self, row: Row) -> Row:
        """The start of a program that measured a row."""
        return self._recorded[row["recorded"]]

    def add(self, *rows: Row, inputs: Iterable[Path] = ()) -> None:
        """Append rows, their sums of nats to 6 digits, with this start of the program."""
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
    """The SHA-256 of each file, by its name and its folder's."""
    from hashlib import file_digest

    found = {}
    for place in inputs:
        with place.open("rb") as file:
            found["/".join(place.parts[-2:])] = file_digest(file, "sha256").hexdigest()
    return found


def _rounded(value: Any) -> Any:
    """The clusters of a mean; any other value as it is."""
    if not (isinstance(value, tuple) and all(isinstance(cluster, tuple) for cluster in value)):
        return value
    return [[round(total, 6), weight] for total, weight in value]


# Tables


def table(items: Iterable[Item], columns: Mapping[str, Callable[[Item], str]]) -> str:
    """Markdown, a line for each item, its cells below the heads."""
    return markdown_rows([*columns], [[cell(item) for cell in columns.values()] for item in items])


def by(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """The rows by their values of these names."""
    places: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        places.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return places


def by_case(rows: list[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """The rows by model, factor and target."""
    return by(rows, "model", "factor", "target")


def first(rows: Iterable[Row], **values: Any) -> Row | None:
    """The first row with these values, if there is one."""
    return next((row for row in rows if values.items() <= row.items()), None)


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


def share(correct: int, n: int) -> Mean:
    """A share of answers, each on a haystack of its own."""
    return Mean.of([(1, 1)] * correct + [(0, 1)] * (n - correct), share=True)


def counted(mean: Mean) -> str:
    """How many of how many, with the interval of the share."""
    low, high = mean.interval()
    return f"{mean.value * mean.weight:.0f}/{mean.weight:.0f} ({low:.0%} to {high:.0%})"


def signed(mean: Mean) -> str:
    """A difference with its interval."""
    low, high = mean.interval()
    return f"{mean.value:+.4f} [{low:+.4f}, {high:+.4f}]"
