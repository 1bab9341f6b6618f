"""Plans, tables, figures and progress bars in a Jupyter kernel, where rich prints differently."""

from importlib.util import find_spec
from pathlib import Path

import pytest

import ropepatch

CELLS = [
    "import ropepatch\nplan = ropepatch.plan('tiny', to=1024)\ntext = str(plan)\n"
    "print(len(text), text == f'{plan}')",
    "print(plan)",
    "plan",
    "model, tokenizer = ropepatch.load('tiny', device='cpu', dtype='float32')\n"
    "curve = ropepatch.perplexity(model, tokenizer, ['Ann has a ball. ' * 40], length=200, progress=True)\n"
    "curve",
    "ropepatch.passkey(model, tokenizer, lengths=[128], haystacks=1, progress=True)",
    "results = ropepatch.evaluate('tiny', methods=['yarn'], to=512, windows=1)\nresults",
    "results.plot()",
    "ropepatch.plan('tiny', to=1024, method='yarm')",
]


@pytest.mark.slow
def test_a_notebook_shows_plans_tables_figures_and_hints(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS]
    )
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": tmp_path}},
    )
    client.execute()
    outputs = [cell.outputs for cell in notebook.cells]
    text = str(ropepatch.plan("tiny", to=1024))
    printed = [
        "".join(
            out.text
            for out in cell
            if out.output_type == "stream" and out.name == "stdout"
        )
        for cell in outputs
    ]
    shown = [
        [
            out.data
            for out in cell
            if out.output_type in ("display_data", "execute_result")
        ]
        for cell in outputs
    ]
    assert printed[:2] == [f"{len(text)} True\n", f"{text}\n"]
    assert shown[:2] == [[], []]  # no display output for each line
    parts = {2: "256 -> 1024", 3: "perplexity", 4: "128", 5: "yarn"}
    for cell, part in parts.items():
        assert part in shown[cell][-1]["text/plain"]
    if (
        find_spec("ipywidgets") is None
    ):  # no warning per measurement, no bar, no empty output
        assert [len(shown[cell]) for cell in (3, 4, 5)] == [1, 1, 1]
    assert shown[6][-1]["image/png"]
    (error,) = outputs[7]
    assert error.ename == "RopepatchError"
    assert "did you mean yarn" in "".join(error.traceback)
    assert not list(Path(tmp_path).iterdir())
