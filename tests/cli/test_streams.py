"""stdout and stderr that are closed or full, and control characters in log lines."""

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from ropepatch.cli.streams import Output, safe_streams

HOSTILE = "model.\x1b]0;owned\x07\x9bx"
ESCAPED = r"model.\x1b]0;owned\x07\x9bx"


def shell(words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    line = f"{sys.executable} -m ropepatch {words}"
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("redirected", "why"), [(">&-", "it is closed"), (">/dev/full", "No space left")]
)
def test_a_command_that_cannot_print_prints_on_stderr_and_fails(
    redirected, why, tmp_path
):
    done = shell(f"suites {redirected}", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("suite")
    assert f"error: cannot write to stdout: {why}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_command_without_any_stream_still_writes_its_file(tmp_path):
    done = shell("explore --no-tiny --out page.html >&- 2>&- <&-", tmp_path)
    assert done.returncode == 0
    (page,) = tmp_path.iterdir()
    assert page.read_text().startswith("<!doctype html>")  # nothing was printed into it


def test_a_result_that_stdout_cannot_take_is_said_on_stderr(tmp_path, capsys):
    with Path("/dev/full").open("w") as full:
        out = Output(full, sys.stderr)
        print("out: written", file=out)
    assert capsys.readouterr().err == "out: written\n"
    assert not out.isatty()


@pytest.mark.parametrize(
    ("before", "line"),
    [
        (
            "mkdir gone; cd gone; rmdir ../gone;",
            "the working folder cannot be used: No such file or directory",
        ),
        (
            "export PYTHONOPTIMIZE=2;",
            "Python runs without docstrings (-OO), which transformers needs",
        ),
    ],
)
def test_where_no_command_can_run_one_line_says_so(before, line, tmp_path):
    code = f"{before} {sys.executable} -m ropepatch suites"
    done = subprocess.run(
        ["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"error: {line}\nhint: " in done.stderr
    assert "Traceback" not in done.stderr


def test_log_lines_and_warnings_of_any_library_are_printable(capsys):
    logger = logging.getLogger("some.library")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    with safe_streams():
        logger.warning("no weight %s\nin the file", HOSTILE)
        warned = warnings.formatwarning(HOSTILE, UserWarning, "x.py", 1)
    logger.removeHandler(handler)
    assert capsys.readouterr().err == f"no weight {ESCAPED}\nin the file\n"
    assert warned == f"x.py:1: UserWarning: {ESCAPED}\n"
