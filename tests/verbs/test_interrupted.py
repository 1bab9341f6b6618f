"""Interrupted commands: their message and the files that they leave."""

import os
import re
import signal
import threading

import pytest
from run_recipes import (
    interrupted,
    run_python,
    small_recipe,
    write_recipe_and_suite,
    yarn,
)

from ropepatch.evaluation import measuring
from ropepatch.training import fine_tuning

EVAL = ["eval", "tiny", "--lengths", "64", "--method", "yarn", "--to", "512"]
SLOW = pytest.mark.slow
TRAIN = ["train", "tiny", "--recipe", "six.yaml", "--out", "out"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("words", "place", "name", "line"),
    [
        (TRAIN, fine_tuning, "LongContextTrainer", "out.run is kept; the same command"),
        (
            [*EVAL, "--out", "out"],
            measuring,
            "_measured",
            "finished results are kept in out; the",
        ),
        (EVAL, measuring, "_measured", "nothing is kept; with --out DIR"),
    ],
    ids=["training", "eval with --out", "eval"],
)
def test_an_interrupted_command_prints_one_line_about_what_is_kept(
    run_here, tmp_path, monkeypatch, words, place, name, line, number
):
    """The signal is sent when a function is called."""
    monkeypatch.setattr(place, name, lambda *_, **__: os.kill(os.getpid(), number))
    write_recipe_and_suite(tmp_path)
    done = run_here(*words, cwd=tmp_path)
    assert done.returncode == 128 + number
    (printed,) = re.findall("^interrupted: .*", done.stderr, re.MULTILINE)
    assert line in printed


SLOW_IMPORT = """
import os, signal, sys
class Slow:  # an import during which a signal comes
    def find_spec(self, name, path, target=None):
        if name == "cyclopts":
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Slow())
sys.argv = ["ropepatch", "methods"]
from ropepatch.__main__ import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_import_prints_no_traceback(number):
    done = run_python("-c", SLOW_IMPORT.format(number=int(number)), check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")


IGNORED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts a job with &
class Interrupted:  # imports, also those of the command while it runs
    def find_spec(self, name, path, target=None):
        os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupted())
sys.argv = ["ropepatch", "recipes"]
from ropepatch.__main__ import main
main()
"""


def test_a_command_started_with_sigint_ignored_ignores_it():
    done = run_python("-c", IGNORED, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "llama2-7b-yarn-32k" in done.stdout


WHILE_IT_WRITES = """
import os, sys
from ropepatch.extension import writing
from ropepatch.__main__ import main
writing.clone_files = lambda *_, **__: os.kill(os.getpid(), {number})
sys.argv = ["ropepatch", "extend", "tiny", "--to", "512", "--out", "out"]
main()
"""


@SLOW
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_writing_exits_and_leaves_no_files(number, tmp_path):
    done = run_python(
        "-c", WHILE_IT_WRITES.format(number=int(number)), check=False, cwd=tmp_path
    )
    assert done.returncode == 128 + number
    assert (
        done.stderr == "interrupted: nothing is kept; the same command starts again\n"
    )
    assert [*tmp_path.iterdir()] == []


@SLOW
def test_nohup_keeps_a_command_running_when_the_terminal_closes(tmp_path):
    code = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{WHILE_IT_WRITES}"
    done = run_python(
        "-c", code.format(number=int(signal.SIGHUP)), check=False, cwd=tmp_path
    )
    assert done.returncode == 2
    assert "error: " in done.stderr


def test_an_interrupted_training_leaves_no_tracker_threads(tmp_path):
    recipe = small_recipe(trainer={"report_to": "tensorboard"})
    before = {*threading.enumerate()}
    interrupted(yarn(), recipe, tmp_path / "out", "step_begin", 1)
    for thread in {*threading.enumerate()} - before:
        thread.join(30)  # one that feeds a queue ends shortly after the queue is closed
    assert {*threading.enumerate()} == before
