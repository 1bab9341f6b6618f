"""What an interrupted call says, and that it is true."""

import itertools
import os
import signal

import pytest
from run_recipes import read_little, write_recipe_and_suite

from ropepatch.evaluation import measuring
from ropepatch.fitting import fitting
from ropepatch.training import adaptation

EVAL = ["eval", "tiny", "--windows", "1", "--lengths", "64", "--method", "yarn", "--to", "512"]
FIT = ["fit", "tiny", "--to", "512", "--steps", "4", "--init", "yarn", "--out", "fitted.json"]
FIT += ["--text", "text.txt"]
EXTEND = ["extend", "tiny", "--recipe", "six.yaml", "--out", "out"]


@pytest.mark.parametrize(
    ("words", "place", "name", "number", "line"),
    [
        (FIT, fitting, "begin", 0, "nothing is kept; the same command starts anew"),
        (FIT, fitting, "write_state", 1, "fitted.json.fit keeps the descent; the same command resumes it"),
        (
            EXTEND,
            adaptation,
            "make_trainer",
            0,
            "out.run keeps step 0 of 6; the same command goes on from it",
        ),
        ([*EVAL, "--out", "out"], measuring, "_measured", 0, "finished is kept in out; the"),
        (EVAL, measuring, "_measured", 0, "nothing is kept; with --out DIR"),
    ],
    ids=["starts", "descent", "training", "eval with --out", "eval"],
)
def test_ctrl_c_says_in_one_line_what_is_kept(
    run_here, tmp_path, monkeypatch, words, place, name, number, line
):
    """It comes before a call of a function, by its number."""
    calls, function = itertools.count(), getattr(place, name)

    def counted(*words, **options):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGINT)
        return function(*words, **options)

    monkeypatch.setattr(place, name, counted)
    read_little(monkeypatch)
    write_recipe_and_suite(tmp_path)
    document = "Once upon a time there was a red fox. " * 80
    (tmp_path / "text.txt").write_text(f"{document}<|endoftext|>" * 30)
    done = run_here(*words, cwd=tmp_path)
    assert done.returncode == 130
    said = [told for told in done.stderr.splitlines() if told.startswith("interrupted: ")]
    assert len(said) == 1
    assert line in said[0]
