"""The entries of `run.py`, the most useful first: rows of studies and benchmarks, and models for them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from ropepatch.settings import relative_length

EVAL = Path(__file__).resolve().parent
sys.path.insert(0, str(EVAL / "studies"))

from study import SHARED, Row, Rows  # noqa: E402

CPU, CUDA = "cpu", "cuda"
PAGES = "eval/studies/pages"
SMOLLM2, GEMMA = "smollm2", "gemma3-270m"
STRONGER_NTK = (
    "ntk:factor=2.93"  # halves the first pair without a full rotation in 8,192 tokens: 2 ** (62 / 40)
)
PUBLISHED_LINEAR = "linear:factor=8"  # of Gemma 3's larger sizes, from 32k to 128k, on the global layers
Minutes = tuple[float | None, float | None]  # on a CPU, and on a GPU; None: not there


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One command.

    Args:
        title: A description.
        command: The words after `python`, the first a script.
        minutes: The minutes of a row or a model if no row has them, on a CPU and on a GPU; None: not there.
        makes: The file or folder that it makes; None if it measures rows.
        needs: The files and folders that must exist.
        rows: The number of rows, as long as something in `needs` is missing.
    """

    title: str
    command: Sequence[str | Path]
    minutes: Minutes
    makes: Path | None = None
    needs: Sequence[Path] = ()
    rows: int = 1

    @cached_property
    def words(self) -> list[str]:
        """The command as text."""
        return [str(word) for word in self.command]

    def open(self, gpu: bool) -> list[float]:
        """The minutes of every missing row, or of the missing model.

        Raises:
            Exception: Any error of the study for these words.
        """
        stated = self.minutes[gpu]
        if stated is None or (self.makes and self.makes.exists()):
            return []
        if self.makes or any(not place.exists() for place in self.needs):
            return [stated] * self.rows
        study = module_of(self.words[0]).STUDY
        given = study.command().parse_args(self.words[1:])
        rows = Rows(given.json, study.name)
        return [minutes_of(case, rows, gpu, stated) for case in study.missing(given, rows)]


@cache
def module_of(script: str) -> Any:
    """The module of a script, under another name: one has the name of a module of the standard library."""
    place = EVAL.parent / script
    sys.path.append(str(place.parent))
    spec = spec_from_file_location(f"{place.stem}_to_run", place)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def minutes_of(case: Row, rows: Rows, gpu: bool, stated: float) -> float:
    """The mean minutes of the rows that share most values with a case, on a similar device."""
    alike: dict[int, list[float]] = {}
    for row in rows.rows:
        if row.get("seconds") and on_gpu(rows.start_of(row)) == gpu:
            shared = sum(row.get(name) == value for name, value in case.items())
            alike.setdefault(shared, []).append(row["seconds"] / 60)
    return sum(best := alike[max(alike)]) / len(best) if alike else stated


def on_gpu(start: Row) -> bool:
    """Whether a start used a GPU; older ones have the device among the versions."""
    return start["gpu"] is not None if "gpu" in start else "NVIDIA" in json.dumps(start)


# The entries, the most useful first


def entries(models: Path) -> Iterator[Entry]:
    """All entries."""
    yield making(models / SMOLLM2, SHARED / "checkpoints" / "smollm2-135m-instruct" / "make.py")
    free = ("baseline", "yarn", "llama3", "ntk", STRONGER_NTK, "rerope", "dca", "self-extend")
    yield from pages(models, SMOLLM2, "16k", free, (12, 0.1))
    yield from pages(models, SMOLLM2, "16k", ("yarn-tuned.json",), (12, 0.1))
    yield from pages(models, SMOLLM2, "16k", ("baseline", "yarn", "rerope"), (12, 0.1), kinds="fact,chain")
    yield from pages(models, SMOLLM2, "16k", ("student-novels",), (None, 0.1))
    yield from pages(models, SMOLLM2, "16k", ("student-short",), (6, 0.1))
    yield from pages(models, SMOLLM2, "32k", ("baseline", "yarn", "rerope", "dca"), (40, 0.3))
    on_a_gpu = ["tests/attention", "-qkon_a_gpu"]
    yield Entry(
        title="tests that need a GPU",
        command=["-m", "pytest", *on_a_gpu, "--junitxml", models / "gpu-tests.xml"],
        minutes=(None, 2),
        makes=models / "gpu-tests.xml",
    )
    yield Entry(
        title="training steps of 1B, 3B and 8B",
        command=["eval/benchmarks/step_cost.py"],
        minutes=(None, 0.7),
    )
    yield Entry(
        title="kernel of the remappings",
        command=["eval/benchmarks/attention_cost.py", "--device", CUDA],
        minutes=(None, 0.5),
    )
    yield from pages(models, SMOLLM2, "16k", ("student",), (12, 0.1))
    yield making(models / GEMMA, f"{PAGES}/gemma3_270m.py")
    yield from pages(models, GEMMA, "64k", ("baseline", "yarn", PUBLISHED_LINEAR), (9, 0.5), first=4)
    yield from pages(models, SMOLLM2, "32k", ("student",), (40, 0.3))
    yield from pages(models, GEMMA, "64k", ("baseline", "yarn", PUBLISHED_LINEAR), (None, 0.5))
    yield from on_cpu(models / "work")


def making(out: Path, script: str | Path) -> Entry:
    """A model that a script writes."""
    return Entry(title=f"{out.name}, made", command=[script, out], minutes=(2, 2), makes=out)


def pages(
    models: Path,
    name: str,
    to: str,
    methods: Sequence[str],
    minutes: Minutes,
    *,
    first: int = 8,
    kinds: str = "",
) -> Iterator[Entry]:
    """The first pages of a model with these methods, after the files and students that they need."""
    model, place = models / name, models / f"{name}-{to}"
    file = f"eval/results/{'-'.join([name, *filter(None, kinds.split(','))])}.json"
    held = Rows(EVAL.parent / file, name)
    named = {"model": name, "target": relative_length(to, 1)}
    methods = [method for method in methods if len(held.of(**named, method=method_of(method))) < first]
    if not methods:
        return
    made = {method: place / method for method in methods if method in MAKERS}
    for method, out in made.items():
        words, taken = MAKERS[method]
        command = [*words, model, "--to", to, "--out", out]
        title = f"{name} to {to}, {out.stem}, made"
        yield Entry(title=title, command=command, minutes=taken, makes=out, needs=[model])
    listed = ",".join(str(made.get(method, method)) for method in methods)
    words = [model, "--to", to, "--methods", listed, "--dtype", "bfloat16"]
    words += ["--json", file]
    if kinds:
        words += ["--kinds", kinds]
    if first < 8:
        words += ["--only", *(f"page={number}" for number in range(first))]
    yield Entry(
        title=f"{name} to {to}, {first} pages{kinds and f' of {kinds}'}: {', '.join(methods)}",
        command=[f"{PAGES}/pages_study.py", *words],
        minutes=minutes,
        needs=[model, *made.values()],
        rows=first * len(methods),
    )


def method_of(name: str) -> str:
    """The name of a method in the rows: that of a file has no suffix."""
    return Path(name).stem if name in MAKERS else name


MAKERS = {
    "yarn-tuned.json": ([f"{PAGES}/scalings.py"], (90, 1)),
    "student-novels": ([f"{PAGES}/scalings.py"], (None, 8)),
    "student-short": ([f"{PAGES}/scalings.py"], (40, 2)),
    # A bare loop took 74 ms on an H200 to generate a token of 200 documents; this is the time of all tokens.
    "student": (["-m", "ropepatch", "extend", "--distil"], (550, 28)),
}


TRAINING = ("adaptation/adaptation", "encodings/encodings")  # they need a folder for their trainings


def on_cpu(work: Path) -> Iterator[Entry]:
    """The studies of small models, for a CPU; the last of them train."""
    studies = {
        "training_free/tiny_checkpoint": 5,
        "training_free/training_free": 0.5,
        "remappings/remappings_study": 0.5,
        "engines/trainers_study": 0.3,
        "distil/distil_study": 10,
        "adaptation/adaptation": 10,
        "encodings/encodings": 10,
    }
    for name, minutes in studies.items():
        folder = ["--work", work / Path(name).name] if name in TRAINING else []
        command = [f"eval/studies/{name}.py", *folder]
        yield Entry(title=Path(name).name, command=command, minutes=(minutes, None))
    command = ["eval/benchmarks/attention_cost.py", "--device", CPU]
    yield Entry(title="loop of the remappings", command=command, minutes=(1, None))
