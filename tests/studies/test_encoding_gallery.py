"""Figures of position encodings show their numbers, and the notebook runs."""

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.sweep

NOTEBOOK = (
    Path(__file__).resolve().parents[2] / "recipes" / "notebooks" / "encodings.ipynb"
)


# The notebook


def test_the_notebook_runs_and_restores_the_model(monkeypatch, capsys):
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = [
        cell
        for cell in json.loads(NOTEBOOK.read_text())["cells"]
        if cell["cell_type"] == "code"
    ]
    names = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out
    moved = dict(
        re.findall(r"^(\S.*?) +the reversed text .* (\S+)$", printed, re.MULTILINE)
    )
    assert moved["no positions"] == "0.000"
    assert float(moved["rope"]) > 0.1
    before, after = re.findall(r"^(?:unchanged|put back): (\S+)", printed, re.MULTILINE)
    assert before == after
