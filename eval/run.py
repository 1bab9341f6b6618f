"""Run the missing measurements, the most useful first, within a time limit.

    python eval/run.py --dry-run
    python eval/run.py --minutes 9 --device cuda --at-once 8

Each entry is one command in its own process: it adds the rows that a file of eval/results lacks, or makes a
model for such rows in the folder `--models`. The minutes of an entry are those of its first row; it starts if
they are left. With `--at-once` several run at a time, which a GPU with much memory allows. The end of the time
and Ctrl-C interrupt them; every finished row is kept, and the same command resumes. The output of the commands
is in `--models`/logs.
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
ASKED = "quote,number,sentence"  # in a text; students are taught one of them, in other words
Minutes = tuple[float | None, float | None]  # on a CPU, and on a GPU; None: not there


@dataclass(frozen=True, kw_only=True, eq=False)
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
    students = [f"{name}-{seed}" for name in STUDENTS for seed in range(3)]
    for to, methods, minutes in (
        ("16k", ["yarn", "dca", *students], (4, 0.1)),
        ("32k", ["yarn", "dca", *students[:3]], (9, 0.3)),
    ):
        yield from pages(models, SMOLLM2, to, methods, minutes, kinds=ASKED)
    yield from pages(
        models, SMOLLM2, "32k", ("baseline", "yarn", "rerope", "dca"), (40, 0.3)
    )
    yield making(models / GEMMA, f"{PAGES}/gemma3_270m.py")
    published = ("baseline", "yarn", PUBLISHED_LINEAR)
    yield from pages(
        models, GEMMA, "64k", (*published, *students[:3]), (None, 0.5), kinds=ASKED
    )
    yield from pages(models, GEMMA, "64k", published, (9, 0.5), first=4)
    yield from pages(models, GEMMA, "64k", published, (None, 0.5))
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
STUDENTS: dict[str, Minutes] = {  # the minutes of their trainings, see `students.py`
    "student": (140, 2),
    "student-asked": (140, 2),
    "student-short": (20, 1),
    "student-fast": (140, 2),
    "student-plain": (140, 2),
    "student-target": (None, 6),
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
    file = f"eval/results/{'-'.join([name, *filter(None, kinds.split(','))])}.json"
    rows, target = Rows(ROOT / file, name), relative_length(to, 1)
    for method in methods:
        if len(rows.of(model=name, target=target, method=method)) >= first:
            continue
        needs, measured = [models / name], method
        if method.startswith("student"):
            made = models / f"{name}-{to}" / method
            needs, measured = [*needs, made], str(made)
            words = [f"{PAGES}/students.py", str(models / name), "--to", to]
            yield Entry(
                title=f"{name} to {to}, {method}, made",
                words=[*words, "--out", str(made)],
                minutes=STUDENTS[method.rpartition("-")[0]],
                makes=made,
                needs=[models / name],
            )
        words = [f"{PAGES}/pages_study.py", str(models / name), "--to", to]
        dtype = "float32" if kinds == ASKED else "bfloat16"
        words += ["--methods", measured, "--dtype", dtype, "--json", file]
        if kinds:
            words += ["--kinds", kinds]
        if first < 8:
            words += ["--only", *(f"page={number}" for number in range(first))]
        asked = f" of {kinds}" if kinds else ""
        yield Entry(
            title=f"{name} to {to}, {first} pages{asked}: {method}",
            words=words,
            minutes=minutes,
            needs=needs,
        )


# Running


def start(entry: Entry, log: Path, minutes: float) -> subprocess.Popen[bytes]:
    """Start an entry's command; a model is made under another name."""
    words = [sys.executable, *entry.words]
    if entry.makes:
        other = partial(entry.makes)
        other.parent.mkdir(parents=True, exist_ok=True)
        words = [str(other) if word == str(entry.makes) else word for word in words]
    elif minutes < math.inf:
        words += ["--minutes", f"{minutes:.2f}"]
    with log.open("w", encoding="utf-8") as out:
        return subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=out)


def partial(made: Path) -> Path:
    """The place of a model that is not complete."""
    return made.parent / "partial" / made.name


def interrupt(child: subprocess.Popen[bytes]) -> None:
    """Interrupt a command, and kill it if it does not end in time."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(SAVES)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def run(left: list[Entry], logs: Path, end: float, gpu: bool, at_once: int) -> int:
    """Run entries until the end of the time, several at once, and return the number that failed."""
    running: dict[Entry, subprocess.Popen[bytes]] = {}
    failed = 0
    try:
        while (remaining := (end - time.monotonic()) / 60) > 0:
            for entry, child in list(running.items()):
                if child.poll() is None:
                    continue
                del running[entry]
                failed += bool(child.returncode)
                if entry.makes and not child.returncode:
                    partial(entry.makes).rename(entry.makes)
                log_line(f"{entry.title}: exit code {child.returncode}")
            ready = [
                one
                for one in left
                if not one.waits_for() and (one.minutes[gpu] or 0) <= remaining
            ]
            if ready and len(running) < at_once:
                left.remove(ready[0])
                name = ready[0].title.replace("/", "-")[:80]
                log_line(f"{ready[0].title}: begins")
                running[ready[0]] = start(ready[0], logs / f"{name}.log", remaining)
            elif running:
                time.sleep(0.5)
            else:
                break
    except KeyboardInterrupt:
        failed += 1
    finally:
        for entry, child in running.items():
            interrupt(child)
            log_line(f"{entry.title}: interrupted")
    return failed


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
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="default: 1"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what is left")
    parser.add_argument(
        "--models", type=Path, default=default_cache().parent / "eval", metavar="FOLDER"
    )
    given = parser.parse_args()
    gpu = given.device == "cuda" if given.device else torch.cuda.is_available()
    models = given.models.absolute()
    end = time.monotonic() + 60 * given.minutes
    left = [
        entry
        for entry in entries(models)
        if entry.minutes[gpu] is not None and not entry.is_done()
    ]
    failed = 0
    if not given.dry_run:
        logs = models / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        failed = run(left, logs, end, gpu, given.at_once)
    for entry in left:
        log_line(f"{entry.title}: left, {entry.minutes[gpu]:g} minutes for the first")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
