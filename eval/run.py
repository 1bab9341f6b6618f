"""Run the missing measurements, the most useful first, within a time limit.

    python eval/run.py --dry-run
    python eval/run.py --minutes 9 --device cuda

Each entry is one command in its own process. It measures rows that a file of eval/results lacks, or makes a
model for such rows in the folder `--models`. Its minutes are those of rows measured on a similar device, or
an estimate. An entry starts if its first row fits into the remaining time. The end of the time and Ctrl-C
interrupt it; every finished row is kept, and the same command resumes. The output of the commands is in
`--models`/logs.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # entries.py

from entries import CPU, CUDA, EVAL, Entry, entries

from ropepatch.data.tokens import default_cache

START = 0.3  # minutes before a command begins to measure
SAVES = 60  # seconds for an interrupted command to save


class Agenda:
    """The entries, and those that are left.

    Args:
        entries: The entries; those that make a model come before those that need it.
        gpu: Whether there is a GPU.
    """

    def __init__(self, entries: Sequence[Entry], gpu: bool) -> None:
        self.entries, self.gpu = entries, gpu
        self.failed: dict[str, str] = {}  # reasons by title

    def left(self) -> Iterator[tuple[Entry, list[float], str]]:
        """Each entry that is left, with the minutes of its rows and the reason why it cannot run, if any."""
        blocked: dict[Path | None, str] = {}
        for entry in self.entries:
            why = self.failed.get(entry.title, "") or next(filter(None, map(blocked.get, entry.needs)), "")
            script, minutes = entry.words[0], [entry.minutes[self.gpu] or 0.0]
            if script != "-m" and not (EVAL.parent / script).is_file():
                why = f"there is no {script}"
            try:
                minutes = entry.open(self.gpu)
            except (Exception, SystemExit) as error:  # the other entries continue
                why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            if minutes and (entry.makes is None or entry.makes not in blocked):
                yield entry, minutes, why
            if entry.makes:
                blocked[entry.makes] = why and f"{entry.title}: {why}"

    def table(self, minutes: float) -> str:
        """The entries that are left, and how many of their rows fit into so many minutes."""
        lines, there = [f"{'minutes':>8} {'rows':>5} {'fit':>5}"], set[Path]()
        remaining, in_all = minutes, 0.0
        for entry, taken, why in self.left():
            fitting, spent = 0, START
            if not why and all(place.exists() or place in there for place in entry.needs):
                while fitting < len(taken) and spent + taken[fitting] <= remaining:
                    spent += taken[fitting]
                    fitting += 1
            if fitting:
                remaining -= spent
                there |= {entry.makes} if entry.makes else set()
            rows = "–" if entry.makes else len(taken)
            what = entry.title + (f" (blocked: {why})" if why else "")
            lines.append(f"{sum(taken) + START:8.1f} {rows:>5} {fitting:>5} {what}")
            in_all += sum(taken) + START
        return "\n".join([*lines, f"{in_all:8.1f} in all"]) if in_all else "nothing is left"

    def run(self, minutes: float, logs: Path) -> None:
        """Run the entries that fit, in order."""
        end = time.monotonic() + 60 * minutes
        for entry, taken, why in self.left():
            remaining = (end - time.monotonic()) / 60
            if why or not all(place.exists() for place in entry.needs):
                continue
            if START + taken[0] > remaining:
                log_line(f"does not fit into {remaining:.1f} minutes: {entry.title}")
                continue
            log_line(f"{entry.title}: about {START + sum(taken):.1f} minutes")
            began, log = time.monotonic(), logs / f"{entry.title.replace('/', '-')[:80]}.log"
            code = self._finished(entry, remaining, log)
            after = f"after {(time.monotonic() - began) / 60:.1f} minutes"
            if code is None:
                log_line(f"{entry.title}: interrupted at the end of the time, {after}")
            elif code:
                *_, last = ["", *log.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]]
                self.failed[entry.title] = f"exit code {code}, {log}"
                log_line(f"{entry.title}: failed {after}: {last[:200]}")
            else:
                log_line(f"{entry.title}: done {after}")

    def _finished(self, entry: Entry, minutes: float, log: Path) -> int | None:
        """The exit code of an entry; None if it was interrupted at the end of the time."""
        words = [sys.executable, *entry.words]
        if entry.makes:
            partial = entry.makes.parent / "partial" / entry.makes.name
            partial.parent.mkdir(parents=True, exist_ok=True)
            words = [str(partial) if word == str(entry.makes) else word for word in words]
        elif minutes < math.inf:
            words += ["--minutes", f"{minutes - START:.2f}"]
        hidden = {} if self.gpu else {"CUDA_VISIBLE_DEVICES": ""}
        with log.open("w", encoding="utf-8") as out:
            child = subprocess.Popen(
                words,
                cwd=EVAL.parent,
                env=os.environ | hidden,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                code = child.wait(None if minutes == math.inf else 60 * minutes)
            except subprocess.TimeoutExpired:
                return None
            finally:
                if child.poll() is None:
                    interrupt(child)
        if entry.makes and not code:
            partial.rename(entry.makes)
            with suppress(OSError):  # not empty: another model is incomplete
                partial.parent.rmdir()
        return code


def interrupt(child: subprocess.Popen[bytes]) -> None:
    """Interrupt a command, and kill it if it does not end in time."""
    for number, seconds in ((signal.SIGINT, SAVES), (signal.SIGKILL, None)):
        os.killpg(child.pid, number)
        try:
            child.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            continue


def log_line(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=math.inf, help="default: no limit")
    parser.add_argument("--device", choices=[CPU, CUDA], help="default: a GPU, if there is one")
    parser.add_argument("--dry-run", action="store_true", help="print what is left, and what fits")
    parser.add_argument("--models", type=Path, default=default_cache().parent / "eval", metavar="FOLDER")
    given = parser.parse_args(words)
    there = torch.cuda.is_available()
    if given.device == CUDA and not there and not given.dry_run:
        parser.error("there is no GPU here")
    gpu = given.device == CUDA if given.device else there
    agenda = Agenda([*entries(given.models.absolute())], gpu)
    if given.dry_run:
        print(agenda.table(given.minutes))
        return
    logs = given.models / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        agenda.run(given.minutes, logs)
    except KeyboardInterrupt:
        print(f"interrupted; the same command resumes. Left:\n{agenda.table(math.inf)}")
        sys.exit(130)
    print(f"Left:\n{agenda.table(math.inf)}")
    sys.exit(bool(agenda.failed))


if __name__ == "__main__":
    main()
