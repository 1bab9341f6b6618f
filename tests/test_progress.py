"""Progress output without a terminal."""

import os
import sys
from pathlib import Path

import pytest

from ropepatch import progress


@pytest.mark.parametrize(("every", "shown"), [(0.0, True), (60.0, False)])
def test_progress_is_shown_at_intervals_without_a_terminal(
    every, shown, monkeypatch, capsys
):
    monkeypatch.setattr(progress, "EVERY", every)
    with progress.bar("fit") as advance:
        advance(1, 4)
        advance(3, 4)
    said = capsys.readouterr().err
    assert (" 75%" in said and "3.00/4.00" in said) == shown
    assert bool(said) == shown


def test_a_closed_terminal_does_not_end_the_work(monkeypatch):
    with Path(os.devnull).open() as unwritable:
        monkeypatch.setattr(sys, "stderr", unwritable)
        progress.say_on_stderr("step 2")
