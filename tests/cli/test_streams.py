"""Output that cannot be printed, and control characters in log lines."""

import logging
import shlex
import subprocess
import sys
import warnings

import pytest

from ropepatch.cli.streams import printable_logs

HOSTILE = "model.\x1b]0;owned\x07\x9bx"
ESCAPED = r"model.\x1b]0;owned\x07\x9bx"


@pytest.mark.slow
def test_a_command_without_any_stream_still_writes_its_file(tmp_path):
    line = (
        f"{shlex.quote(sys.executable)} -m ropepatch explore --no-tiny --out page.html"
    )
    closed = ["bash", "-c", f"{line} >&- 2>&- <&-"]
    done = subprocess.run(closed, cwd=tmp_path, check=False)
    assert done.returncode == 0
    (page,) = tmp_path.iterdir()
    assert page.read_text().startswith("<!doctype html>")  # nothing was printed into it


def test_log_lines_and_warnings_of_any_library_are_printable(capsys):
    logger = logging.getLogger("some.library")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    with printable_logs():
        logger.warning("no weight %s\nin the file", HOSTILE)
        warned = warnings.formatwarning(HOSTILE, UserWarning, "x.py", 1)
    logger.removeHandler(handler)
    assert capsys.readouterr().err == f"no weight {ESCAPED}\nin the file\n"
    assert warned == f"x.py:1: UserWarning: {ESCAPED}\n"
