"""The notebook that extends the bundled checkpoint runs, with less to train and to read."""

import json
from pathlib import Path

from run_recipes import small_recipe, write_recipe_and_suite

import ropepatch
from ropepatch.evaluation.suites import read_suite

NOTEBOOK = Path(__file__).resolve().parents[2] / "recipes" / "notebooks" / "extend.ipynb"


def test_the_notebook_runs_and_shows_what_it_did(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    write_recipe_and_suite(tmp_path)
    monkeypatch.setattr("ropepatch.pipeline.request.read_recipe", lambda name: small_recipe())
    monkeypatch.setattr("ropepatch.pipeline.evaluation.read_suite", lambda name: read_suite("suite.yaml"))
    for amount, number in {"windows": 2, "trials": 1}.items():
        monkeypatch.setitem(ropepatch.choose.__kwdefaults__, amount, number)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    names, shown = {}, []
    for cell in cells:
        *_, last = lines = "".join(cell["source"]).replace('to="2k"', 'to="2x"').splitlines()
        exec("\n".join(lines[:-1]), names)
        shown.append(eval(last, names))
    choice, drawn, frame, mapped, extension, losses, keys, window = shown
    assert frame.label.iloc[0] == choice.ranking.rows[0].label
    assert "<table" in choice._repr_html_()
    assert {row.label for row in mapped.ranking.rows} >= {"yarn", "rerope", "self-extend"}
    assert "yarn + tiny" in extension._repr_html_()
    for figure in (drawn, losses, keys):
        assert figure._repr_png_().startswith(b"\x89PNG")
    assert window == 512
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "step 6/6" in printed.err
    assert (tmp_path / "tiny-2k" / "evaluation.html").is_file()
