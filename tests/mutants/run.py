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
SLOW = [  # modules that the forks share
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "peft",
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
JOBS = 2  # rows at a time


class Watch:
    """Records pytest's outcome in a child: failed tests, collection errors, and the number of tests run."""

    def __init__(self, red):
        self.named = tuple(one for one in red if "::" in one)
        self.failed, self.broken, self.ran = [], [], 0

    def pytest_collection_modifyitems(self, items):
        items[:] = [
            item
            for item in items
            if item.nodeid.startswith(self.named)
            or not any(map(item.get_closest_marker, ("slow", "sweep")))
        ]

    def pytest_collectreport(self, report):
        if report.failed:
            self.broken.append(str(report.longrepr))

    def pytest_runtest_logreport(self, report):
        self.ran += report.when == "call" and not report.skipped
        if report.failed:
            self.failed.append(report.nodeid)


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


def stale(row):
    """Why a row no longer applies; None if it does."""
    if list(row)[:-1] != KEYS:
        return f"a row has the keys {', '.join(KEYS)}"
    for path in [row["file"], *row["red"]]:
        if not (ROOT / path.split("::")[0]).exists():
            return f"there is no {path}"
    count = (ROOT / row["file"]).read_text(encoding="utf-8").count(row["old"])
    return None if count == 1 else f"`old` stands {count} times in {row['file']}"


def verdict(folder, status):
    """Return whether a test failed, and a description; keep the folder if no test ran."""
    file = folder / "outcome.json"
    if not file.is_file():
        return False, f"no test ran, see {folder}/log: status {status}"
    outcome = json.loads(file.read_text(encoding="utf-8"))
    if outcome["broken"]:
        why = outcome["broken"][0].splitlines()[-1]
        return False, f"no test ran, see {folder}/log: {why}"
    shutil.rmtree(folder, ignore_errors=True)
    if outcome["failed"]:
        return True, f"{outcome['failed'][0]} is red"
    return False, f"{outcome['ran']} green, SURVIVED"


def main():
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("rooms", nargs="*", metavar="ROOM")
    only = "rows whose `breaks` has these words"
    parser.add_argument("--only", default="", metavar="WORDS", help=only)
    asked = parser.parse_args()
    folder = Path(__file__).parent
    rooms = asked.rooms or sorted(file.stem for file in folder.glob("*.yaml"))
    waiting = [
        row | {"room": room}
        for room in rooms
        for row in yaml.safe_load((folder / f"{room}.yaml").read_text("utf-8"))
        if asked.only in row["breaks"]
    ]
    total, bad, running = len(waiting), 0, {}
    os.environ["OMP_NUM_THREADS"] = "1"
    for module in SLOW:
        import_module(module)
    while waiting or running:
        if waiting and len(running) < JOBS:
            row = waiting.pop(0)
            why = stale(row)
            if why is None:
                pid, folder = start(row)
                running[pid] = row, folder
                continue
            good, words = False, f"the row no longer applies: {why}"
        else:
            pid, status = os.wait()
            row, folder = running.pop(pid)
            good, words = verdict(folder, status)
        bad += not good
        mark = "ok " if good else "BAD"
        print(f"{mark} {row['room']}: {row['breaks']}: {words}", flush=True)
    print(f"{total - bad} of {total} rows as they should be")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
