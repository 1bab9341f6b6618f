"""Figures of position encodings show their numbers, and the notebook runs."""

import json
import math
import re
from pathlib import Path

import encoding_gallery as gallery
import numpy as np
import pytest

pytestmark = pytest.mark.sweep

NOTEBOOK = Path(__file__).resolve().parents[2] / "recipes" / "notebooks" / "encodings.ipynb"


def drawn(axes) -> np.ma.MaskedArray:
    (image,) = axes.images
    return image.get_array()


def test_the_sinusoidal_table_is_drawn_as_it_is_defined():
    table = drawn(gallery.plot_sinusoidal_table().axes[0])
    assert table.shape == (128, 128)
    assert table[5, 6] == pytest.approx(math.sin(5 / 10000 ** (6 / 128)), abs=1e-6)
    assert table[100, 41] == pytest.approx(math.cos(100 / 10000 ** (40 / 128)), abs=1e-5)


def test_distances_are_zero_with_itself_and_the_same_curve_from_everywhere():
    distances, products = gallery.plot_distances(origins=(1, 48)).axes
    one, other = (line.get_ydata() for line in distances.lines)
    assert one[1] == other[48] == 0
    np.testing.assert_allclose(one[1:81], other[48:128], atol=1e-4)
    expected = math.sqrt(sum(2 - 2 * math.cos(10000 ** (-2 * i / 128)) for i in range(64)))
    assert one[2] == pytest.approx(expected, abs=1e-4)
    assert [line.get_ydata()[at] for line, at in zip(products.lines, (1, 48), strict=True)] == [
        pytest.approx(64, abs=1e-4)
    ] * 2


# The notebook


def test_the_notebook_runs_and_shows_the_whole_gallery(monkeypatch, capsys):
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    names, shown = {}, []
    for cell in cells:
        *_, last = lines = "".join(cell["source"]).splitlines()
        exec("\n".join(lines), names)
        if last.startswith("gallery["):
            shown.append(eval(last, names))
    assert {id(figure) for figure in shown} == {id(figure) for figure in names["gallery"].values()}
    assert shown[-1]._repr_png_().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "no positions, no mask:     True" in printed
    before, after = re.findall(r"^(?:unchanged|put back): (\S+)", printed, re.MULTILINE)
    assert before == after
