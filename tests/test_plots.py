"""Figures show the numbers they were given, and leave nothing behind."""

import subprocess
import sys

import matplotlib
import pytest
import torch

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.passkey import Passkey, PasskeyGrid
from ropepatch.plots import plot_loss, plot_passkey, save_figure

CURVE = LossCurve((torch.linspace(3.0, 1.0, 999), torch.linspace(4.0, 2.0, 999)))
GRID = PasskeyGrid(
    {
        (length, depth): Passkey(length // 256 + int(4 * depth), 8)
        for length in (256, 512)
        for depth in (0.0, 1.0)
    }
)


def test_the_loss_drawn_is_the_mean_over_each_stretch():
    (axes,) = plot_loss({"one": CURVE}, trained=256).axes
    line = axes.lines[0]
    assert line.get_label() == "one"
    middles, means = line.get_data()
    assert list(means) == sorted(means, reverse=True)
    assert 0 < middles[0] < middles[-1] < 1000
    first = torch.cat([nll[:8] for nll in CURVE.nll]).mean().item()
    assert means[0] == pytest.approx(first, abs=1e-6)


def test_every_token_is_in_one_stretch():
    ones = LossCurve((torch.ones(999),))
    (axes,) = plot_loss({"ones": ones}, trained=256).axes
    assert list(axes.lines[0].get_ydata()) == [1.0] * len(axes.lines[0].get_ydata())
    spike = torch.zeros(999)
    spike[-1] = 1.0
    (axes,) = plot_loss({"spike": LossCurve((spike,))}, trained=256).axes
    assert axes.lines[0].get_ydata()[-1] > 0


def test_curves_floor_and_trained_context_are_told_apart():
    (axes,) = plot_loss({"one": CURVE, "two": CURVE}, trained=256, floor=CURVE).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one", "two", "floor"]
    assert list(axes.lines[3].get_xdata()) == [256, 256]
    assert len({line.get_color() for line in axes.lines[:3]}) == 3


def test_the_map_shows_the_share_of_every_cell_with_depth_downwards():
    maps = plot_passkey({"base": GRID, "yarn": GRID}, trained=256)
    axes = maps.axes[0]
    assert axes.get_title() == "base"
    assert axes.images[0].get_array().tolist() == [[1 / 8, 2 / 8], [5 / 8, 6 / 8]]
    assert [text.get_text() for text in axes.texts] == ["12%", "25%", "62%", "75%"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["256", "512"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0%", "100%"]
    assert list(axes.lines[0].get_xdata()) == [0.5, 0.5]


def test_the_same_figure_is_the_same_file(tmp_path):
    first = save_figure(plot_loss({"one": CURVE}, trained=256), tmp_path / "a")
    second = save_figure(plot_loss({"one": CURVE}, trained=256), tmp_path / "b")
    assert [file.name for file in first] == ["a.png", "a.svg"]
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes()


def test_drawing_changes_no_setting(tmp_path):
    before = dict(matplotlib.rcParams)
    save_figure(plot_passkey({"base": GRID}, trained=256), tmp_path / "a")
    assert dict(matplotlib.rcParams) == before


def test_drawing_needs_no_window_system():
    code = """
import sys, torch
from ropepatch.evaluation.curves import LossCurve
from ropepatch.plots import plot_loss
plot_loss({"one": LossCurve((torch.ones(99),))}, trained=16)
assert "matplotlib.figure" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_matplotlib_is_answered_with_the_line_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RopepatchError, match="figures need matplotlib") as error:
        plot_loss({"one": CURVE}, trained=256)
    assert error.value.hint == 'pip install "ropepatch[plot]"'
