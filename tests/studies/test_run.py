"""`eval/run.py` from end to end on tiny, by a list of its own."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EVAL = Path(__file__).resolve().parents[2] / "eval"
STUDY = """
import sys, time
from pathlib import Path
sys.path.insert(0, {studies!r})
from study import Checkpoint, Study

PLACE = Path(__file__).parent


def measure(case, given):
    if case["windows"] == 2 and not (PLACE / "stopped").exists():
        (PLACE / "stopped").touch()
        time.sleep(600)
    with (PLACE / "journal").open("a") as journal:
        journal.write(str(case["windows"]))
    return Checkpoint("tiny", 2, case["windows"]).through_own_window()


def cases(given):
    return [{{"model": "tiny", "windows": count}} for count in (1, 2, 3)]


STUDY = Study(name="toy", about=None, cases=cases, measure=measure)
if __name__ == "__main__":
    STUDY.main()
"""
RUN = """
import sys
from pathlib import Path
sys.path.insert(0, {eval!r})
import run
from entries import Entry

PLACE = Path({place!r})

def toys(models):
    def making(title, *command, minutes=(0.1, None)):
        return Entry(title=title, command=[*command, models / title], minutes=minutes, makes=models / title)

    yield making("broken", PLACE / "broken.py")
    yield Entry(title="needs it", command=["-m", "this"], minutes=(0.1, None), needs=[models / "broken"])
    yield making("long", "-m", "this", minutes=(100, None))
    yield making("model", PLACE / "maker.py")
    study = [PLACE / "toy.py", "--json", PLACE / "rows.json"]
    yield Entry(title="rows", command=study, minutes=(0.2, None), needs=[models / "model"], rows=3)
    yield making("of a GPU", "-m", "this", minutes=(None, 0.1))

run.entries = toys
run.main()
"""


@pytest.fixture
def command(tmp_path):
    """The command, by a list of its own."""
    (tmp_path / "toy.py").write_text(STUDY.format(studies=str(EVAL / "studies")))
    (tmp_path / "maker.py").write_text("import pathlib, sys; pathlib.Path(sys.argv[1]).mkdir()")
    (tmp_path / "broken.py").write_text("raise SystemExit('error: the maker is broken')")
    (tmp_path / "run.py").write_text(RUN.format(eval=str(EVAL), place=str(tmp_path)))
    words = ["--minutes", "5", "--device", "cpu", "--models", str(tmp_path / "models")]
    return [sys.executable, str(tmp_path / "run.py"), *words]


def test_an_interrupted_run_resumes_with_missing_rows_and_starts_nothing_that_does_not_fit(command, tmp_path):
    listed = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=True).stdout
    fit = {line.split()[-1]: line.split()[-2] for line in listed.splitlines()[1:-1] if "blocked" not in line}
    assert fit == {"broken": "1", "it": "needs", "long": "0", "model": "1", "rows": "3"}
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    while not (tmp_path / "stopped").exists():
        assert first.poll() is None
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    output = first.communicate(timeout=60)[0]
    assert first.returncode == 130
    assert "broken: failed after 0.0 minutes: error: the maker is broken" in output
    assert "needs it (blocked: broken: exit code 1" in output
    assert windows_of(tmp_path) == [1]
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert second.returncode == 1
    done, left = second.stdout.split("Left:")
    assert re.search(r"does not fit into [\d.]+ minutes: long", done)
    assert [line.split()[3] for line in left.splitlines()[2:-1]] == ["broken", "needs", "long"]
    assert windows_of(tmp_path) == [1, 2, 3]
    assert (tmp_path / "journal").read_text() == "123"
    assert not (tmp_path / "models" / "long").exists()


def windows_of(place):
    return [row["windows"] for row in json.loads((place / "rows.json").read_text())["rows"]]
