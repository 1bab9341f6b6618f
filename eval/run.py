"""Run the missing measurements, the most useful first, within a time limit.

    python eval/run.py --dry-run
    python eval/run.py --minutes 9 --device cuda

Each entry is one command in its own process: it adds the rows that a file of eval/results lacks, or makes a
model for such rows in the folder `--models`. The minutes of an entry are those of its first row; it starts if
they are left. The end of the time and Ctrl-C interrupt it; every finished row is kept, and the same command
resumes. The output of the commands is in `--models`/logs.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "eval" / "studies"))

from study import SHARED, Rows, log_line  # noqa: E402

from ropepatch.data.tokens import default_cache  # noqa: E402
from ropepatch.settings import relative_length  # noqa: E402

PAGES = "eval/studies/pages"
SMOLLM2, GEMMA = "smollm2", "gemma3-270m"
STRONGER_NTK = "ntk:factor=2.93"  # halves the first pair without a full turn in 8,192 tokens: 2 ** (62 / 40)
PUBLISHED_LINEAR = "linear:factor=8"  # of Gemma 3's larger sizes, from 32k to 128k, on the global layers
SAVES = 60  # seconds for an interrupted command to save
Minutes = tuple[float | None, float | None]  # on a CPU, and on a GPU; None: not there


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One command.

    Args:
        title: A description.
        words: The words after `python`, the first a script.
        minutes: The minutes of its first row, or of the model that it makes.
        makes: The file or folder that it makes; None if it measures rows.
        needs: The files and folders that must exist.
    """

    title: str
    words: Sequence[str]
    minutes: Minutes
    makes: Path | None = None
    needs: Sequence[Path] = ()

    def is_done(self) -> bool:
        """Whether the model is there, or every row."""
        if self.makes:
            return self.makes.exists()
        if self.needs:  # `pages` lists only methods with missing rows
            return False
        script = ROOT / self.words[0]
        sys.path.append(str(script.parent))
        study = import_module(script.stem).STUDY
        given = study.command().parse_args(self.words[1:])
        return (
            next(iter(study.missing(given, Rows(given.json, study.name))), None) is None
        )

    def waits_for(self) -> list[Path]:
        """The files and folders that are missing."""
        return [place for place in self.needs if not place.exists()]


# The entries, the most useful first


def entries(models: Path) -> Iterator[Entry]:
    """All entries."""
    yield making(
        models / SMOLLM2,
        str(SHARED / "checkpoints" / "smollm2-135m-instruct" / "make.py"),
    )
    free = (
        "baseline",
        "yarn",
        "llama3",
        "ntk",
        STRONGER_NTK,
        "rerope",
        "dca",
        "self-extend",
    )
    yield from pages(models, SMOLLM2, "16k", free, (12, 0.1))
    yield from pages(
        models,
        SMOLLM2,
        "16k",
        ("baseline", "yarn", "rerope"),
        (12, 0.1),
        kinds="fact,chain",
    )
    students = tuple(f"student-short-{seed}" for seed in range(3))
    asked = "quote,number,sentence"  # in a text; students are taught one of them, in other words
    reach = ("yarn", *students, "baseline", "dca", "student-plain-0")
    yield from pages(models, SMOLLM2, "16k", reach, (4, 0.1), kinds=asked)
    yield from pages(
        models, SMOLLM2, "32k", ("baseline", "yarn", "rerope", "dca"), (40, 0.3)
    )
    yield from pages(models, SMOLLM2, "16k", ("student",), (12, 0.1))
    yield making(models / GEMMA, f"{PAGES}/gemma3_270m.py")
    yield from pages(
        models, GEMMA, "64k", ("baseline", "yarn", PUBLISHED_LINEAR), (9, 0.5), first=4
    )
    yield from pages(models, SMOLLM2, "32k", ("student",), (40, 0.3))
    yield from pages(
        models, GEMMA, "64k", ("baseline", "yarn", PUBLISHED_LINEAR), (None, 0.5)
    )
    for device, minutes in (("cuda", (None, 0.5)), ("cpu", (1, None))):
        words = ["eval/benchmarks/attention_cost.py", "--device", device]
        yield Entry(
            title=f"cost of the remappings, {device}", words=words, minutes=minutes
        )
    for name, taken in STUDIES.items():
        words = [f"eval/studies/{name}.py"]
        yield Entry(title=Path(name).name, words=words, minutes=(taken, None))


STUDIES = {  # of small models, with the minutes of a row
    "training_free/training_free": 0.5,
    "remappings/remappings_study": 0.5,
    "distil/distil_study": 10,
}
MAKERS: dict[str, tuple[list[str], Minutes]] = {  # of students
    **{
        name: ([f"{PAGES}/students.py"], (20, 2))
        for name in (*(f"student-short-{seed}" for seed in range(3)), "student-plain-0")
    },
    "student": (["-m", "ropepatch", "train", "--recipe", "distil"], (550, 28)),
}


def making(out: Path, script: str) -> Entry:
    """A model that a script writes."""
    return Entry(
        title=f"{out.name}, made", words=[script, str(out)], minutes=(2, 2), makes=out
    )


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
    """The first pages of a model with those of these methods that lack some, after the students they need."""
    model, place = models / name, models / f"{name}-{to}"
    file = f"eval/results/{'-'.join([name, *filter(None, kinds.split(','))])}.json"
    rows, target = Rows(ROOT / file, name), relative_length(to, 1)
    left = [
        one
        for one in methods
        if len(rows.of(model=name, target=target, method=one)) < first
    ]
    if not left:
        return
    made = {method: place / method for method in left if method in MAKERS}
    for method, out in made.items():
        command, taken = MAKERS[method]
        words = [*command, str(model), "--to", to, "--out", str(out)]
        title = f"{name} to {to}, {method}, made"
        yield Entry(title=title, words=words, minutes=taken, makes=out, needs=[model])
    listed = ",".join(str(made.get(method, method)) for method in left)
    words = [f"{PAGES}/pages_study.py", str(model), "--to", to, "--methods", listed]
    words += ["--dtype", "bfloat16", "--json", file]
    if kinds:
        words += ["--kinds", kinds]
    if first < 8:
        words += ["--only", *(f"page={number}" for number in range(first))]
    asked = f" of {kinds}" if kinds else ""
    title = f"{name} to {to}, {first} pages{asked}: {', '.join(left)}"
    yield Entry(
        title=title, words=words, minutes=minutes, needs=[model, *made.values()]
    )


# Running


def run(entry: Entry, minutes: float, log: Path) -> int | None:
    """The exit code of an entry; None if it was interrupted at the end of the time."""
    words, partial = [sys.executable, *entry.words], None
    if entry.makes:
        partial = entry.makes.parent / "partial" / entry.makes.name
        partial.parent.mkdir(parents=True, exist_ok=True)
        words = [str(partial) if word == str(entry.makes) else word for word in words]
    elif minutes < math.inf:
        words += ["--minutes", f"{minutes:.2f}"]
    with log.open("w", encoding="utf-8") as out:
        child = subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=out)
        try:
            code = child.wait(None if minutes == math.inf else 60 * minutes)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if child.poll() is None:
                interrupt(child)
    if entry.makes and partial and code == 0:
        partial.rename(entry.makes)
    return code


def interrupt(child: subprocess.Popen[bytes]) -> None:
    """Interrupt a command, and kill it if it does not end in time."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(SAVES)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def main() -> None:
    """Run the command."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="default: no limit"
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="default: a GPU, if there is one"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what is left")
    parser.add_argument(
        "--models", type=Path, default=default_cache().parent / "eval", metavar="FOLDER"
    )
    given = parser.parse_args()
    gpu = given.device == "cuda" if given.device else torch.cuda.is_available()
    logs = given.models.absolute() / "logs"
    end, failed = time.monotonic() + 60 * given.minutes, 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for entry in entries(given.models.absolute()):
        stated = entry.minutes[gpu]
        if stated is None or entry.is_done():
            continue
        remaining = (end - time.monotonic()) / 60
        if missing := entry.waits_for():
            log_line(f"{entry.title}: needs {missing[0]}")
        elif given.dry_run or stated > remaining:
            log_line(f"{entry.title}: left, {stated:g} minutes for the first")
        else:
            log_line(f"{entry.title}: begins")
            logs.mkdir(parents=True, exist_ok=True)
            log = logs / f"{entry.title.replace('/', '-')[:80]}.log"
            code = run(entry, remaining, log)
            failed += bool(code)
            log_line(
                f"{entry.title}: {'interrupted' if code is None else f'exit code {code}, {log}'}"
            )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
