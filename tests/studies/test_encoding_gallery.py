"""Figures of position encodings show their numbers, and the notebook runs."""

import json
import math
import re
from pathlib import Path

import encoding_gallery as gallery
import numpy as np
import pytest
import torch
from encoding_gallery import plot_decay, plot_distances

pytestmark = pytest.mark.sweep

NOTEBOOK = Path(__file__).resolve().parents[2] / "recipes" / "notebooks" / "encodings.ipynb"


def drawn(axes) -> np.ma.MaskedArray:
    (image,) = axes.images
    return image.get_array()


# Maps


def test_the_sinusoidal_table_is_drawn_as_it_is_defined():
    table = drawn(gallery.plot_sinusoidal_table().axes[0])
    assert table.shape == (128, 128)
    assert table[5, 6] == pytest.approx(math.sin(5 / 10000 ** (6 / 128)), abs=1e-6)
    assert table[100, 41] == pytest.approx(math.cos(100 / 10000 ** (40 / 128)), abs=1e-5)


def test_distances_are_zero_with_itself_and_the_same_curve_from_everywhere():
    distances, products = plot_distances(origins=(1, 48)).axes
    one, other = (line.get_ydata() for line in distances.lines)
    assert one[1] == other[48] == 0
    np.testing.assert_allclose(one[1:81], other[48:128], atol=1e-4)
    assert one[2] == pytest.approx(
        math.sqrt(sum(2 - 2 * math.cos(10000 ** (-2 * i / 128)) for i in range(64))), abs=1e-4
    )
    assert [line.get_ydata()[at] for line, at in zip(products.lines, (1, 48), strict=True)] == [
        pytest.approx(64, abs=1e-4)
    ] * 2


def test_the_projection_is_along_the_directions_of_most_variance_and_coloured_by_position():
    draw = torch.Generator().manual_seed(0)
    turned = torch.linalg.qr(torch.randn(5, 5, generator=draw)).Q
    table = torch.randn(400, 5, generator=draw) * torch.tensor([1.0, 5.0, 0.1, 3.0, 0.1]) @ turned + 7
    where, shares = gallery.principal(table)
    expected = np.sort(np.linalg.eigvalsh(np.cov(table.double().numpy().T, bias=True)))[::-1]
    np.testing.assert_allclose(where.var(0, unbiased=False).numpy(), expected, rtol=1e-9)
    np.testing.assert_allclose(shares.numpy(), expected / expected.sum(), rtol=1e-9)
    axes = gallery.plot_projection().axes[0]
    (dots,) = axes.collections
    assert list(dots.get_array()) == list(range(128))
    assert axes.get_xlabel() == "31% of the variance"


# Curves


def test_decay_is_drawn_from_the_modules_of_the_encodings():
    rope, alibi = plot_decay(("rope", "alibi"), tokens=64, head_dim=8).axes
    by_cosines = [
        2 / math.sqrt(8) * sum(math.cos(t * 10000 ** (-2 * i / 8)) for i in range(4)) for t in range(64)
    ]
    np.testing.assert_allclose(rope.lines[0].get_ydata(), by_cosines, atol=1e-5)
    mean_slope = sum(2**-h for h in (2, 4, 6, 8)) / 4
    np.testing.assert_allclose(
        alibi.lines[0].get_ydata(), [math.sqrt(8) - mean_slope * t for t in range(64)], atol=1e-4
    )


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
    assert shown[7]._repr_png_().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "no positions, no mask:     True" in printed
    before, after = re.findall(r"^(?:unchanged|put back): (\S+)", printed, re.MULTILINE)
    assert before == after
