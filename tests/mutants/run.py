"""Mutations of the package; the tests that a row names must fail on its mutation.

python tests/mutants/run.py [ROOM ...]    the rows of tests/mutants/ROOM.yaml, or all of them

A row: `breaks` (what goes wrong, in words), `file`, `old` (occurs in the file exactly once), `new`, `red`,
test files or node ids. Tests marked slow or sweep run only where a node id names them.
"""
# ruff: noqa: T201

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
KEYS = ["breaks", "file", "old", "new", "red"]
SLOW = [
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "peft",
    "pytest",
    "hypothesis",
]
QUIET = [
    "-q",
    "-x",
    "-p",
    "no:cacheprovider",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
]
LIMIT = 900  # seconds for a row


class Watch:
    """Records pytest's outcome in a child: failed tests, collection errors, and the number of tests run."""

    def __init__(self, red):
        self.named = tuple(one for one in red if "::" in one)
        self.failed, self.broken, self.ran = [], [], 0

    def pytest_collection_modifyitems(self, items):
        slow = [
            item
            for item in items
            if any(map(item.get_closest_marker, ("slow", "sweep")))
        ]
        items[:] = [
            item
            for item in items
            if item not in slow or item.nodeid.startswith(self.named)
        ]

    def pytest_collectreport(self, report):
        self.broken += [str(report.longrepr)] if report.failed else []

    def pytest_runtest_logreport(self, report):
        self.ran += report.when == "call" and not report.skipped
        self.failed += [report.nodeid] if report.failed else []


def run_tests(folder, red):
    """Run tests in this process on the package in the folder, and write outcome.json there."""
    import pytest

    os.setsid()
    signal.alarm(LIMIT)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    sys.path[:] = [
        str(folder),
        *(path for path in sys.path[1:] if Path(path).resolve() != ROOT),
    ]
    os.environ["PYTHONPATH"] = str(folder)
    watch = Watch(red)
    places = (
        f"--rootdir={ROOT}",
        f"--config-file={ROOT}/pyproject.toml",
        f"--basetemp={folder}/tmp",
    )
    code = pytest.main([*QUIET, *places, *(f"{ROOT}/{one}" for one in red)], [watch])
    if (
        code not in (0, 1)
        or Path(sys.modules["ropepatch"].__file__).parent != folder / "ropepatch"
    ):
        watch.broken.append(
            f"pytest ended with {code!r}, or did not take the package of {folder}"
        )
    (folder / "outcome.json").write_text(json.dumps(vars(watch)), encoding="utf-8")


def start(row):
    """Fork a child that runs the tests of a row on a mutated copy of the package."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-")).resolve()
    for path in ROOT.iterdir():
        if path.name not in ("ropepatch", ".git", ".venv"):
            (folder / path.name).symlink_to(path)
    shutil.copytree(ROOT / "ropepatch", folder / "ropepatch")
    text = (ROOT / row["file"]).read_text(encoding="utf-8")
    (folder / row["file"]).write_text(
        text.replace(row["old"], row["new"]), encoding="utf-8"
    )
    if pid := os.fork():
        return pid, folder
    try:
        run_tests(folder, row["red"])
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def verdict(folder, status, unmutated):
    """Return whether the outcome is as expected, and its description; keep the folder if no test ran."""
    file = folder / "outcome.json"
    outcome = (
        json.loads(file.read_text(encoding="utf-8"))
        if file.is_file()
        else {"broken": [f"status {status}"]}
    )
    if outcome["broken"]:
        return (
            False,
            f"no test ran, see {folder}/log: {outcome['broken'][0].splitlines()[-1]}",
        )
    shutil.rmtree(folder, ignore_errors=True)
    failed, ran = outcome["failed"], outcome["ran"]
    good = bool(ran and not failed) if unmutated else bool(failed)
    return good, f"{failed[0]} is red" if failed else f"{ran} green" + ", SURVIVED" * (
        not unmutated
    )


def main():
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("rooms", nargs="*", metavar="ROOM")
    parser.add_argument(
        "--only",
        default="",
        metavar="WORDS",
        help="rows whose `breaks` has these words",
    )
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time")
    parser.add_argument(
        "--unmutated", action="store_true", help="their tests on the sound package"
    )
    asked = parser.parse_args()
    folder = Path(__file__).parent
    files = [folder / f"{room}.yaml" for room in asked.rooms] or sorted(
        folder.glob("*.yaml")
    )
    read = {file.stem: yaml.safe_load(file.read_text("utf-8")) for file in files}
    rows = [row | {"room": room} for room, rows in read.items() for row in rows]
    waiting = [row for row in rows if asked.only in row["breaks"]]
    if asked.unmutated:
        waiting = [
            row | {"new": row["old"]}
            for row in {str(row["red"]): row for row in waiting}.values()
        ]
    total, bad, running = len(waiting), 0, {}
    os.environ["OMP_NUM_THREADS"] = "1"
    for module in SLOW:
        import_module(module)
    while waiting or running:
        if waiting and len(running) < asked.jobs:
            row = waiting.pop(0)
            if list(row)[:-1] != KEYS:
                sys.exit(f"{row['room']}: a row has the keys {', '.join(KEYS)}: {row}")
            gone = [
                one
                for one in [row["file"], *row["red"]]
                if not (ROOT / one.split("::")[0]).exists()
            ]
            count = (
                0
                if gone
                else (ROOT / row["file"]).read_text(encoding="utf-8").count(row["old"])
            )
            if count == 1:
                pid, folder = start(row)
                running[pid] = row, folder
                continue
            why = (
                f"there is no {gone[0]}"
                if gone
                else f"`old` stands {count} times in {row['file']}"
            )
            good, words = False, f"the row no longer applies: {why}"
        else:
            pid, status = os.wait()
            row, folder = running.pop(pid)
            good, words = verdict(folder, status, asked.unmutated)
        bad += not good
        print(
            f"{'ok ' if good else 'BAD'} {row['room']}: {row['breaks']}: {words}",
            flush=True,
        )
    print(f"{total - bad} of {total} rows as they should be")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
