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


def test_the_notebook_runs_and_shows_the_whole_gallery(monkeypatch, capsys):
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = [
        cell
        for cell in json.loads(NOTEBOOK.read_text())["cells"]
        if cell["cell_type"] == "code"
    ]
    assert all(
        cell["outputs"] == [] and cell["execution_count"] is None for cell in cells
    )
    names, shown = {}, []
    for cell in cells:
        *_, last = lines = "".join(cell["source"]).splitlines()
        exec("\n".join(lines), names)
        if last.startswith("gallery["):
            shown.append(eval(last, names))
    assert {id(figure) for figure in shown} == {
        id(figure) for figure in names["gallery"].values()
    }
    assert shown[-1]._repr_png_().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "no positions, no mask:     True" in printed
    before, after = re.findall(r"^(?:unchanged|put back): (\S+)", printed, re.MULTILINE)
    assert before == after
