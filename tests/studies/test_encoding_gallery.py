"""Figures of position encodings show their numbers, and the notebook runs."""

import json
import math
import re
from itertools import pairwise
from pathlib import Path

import encoding_gallery as gallery
import numpy as np
import pytest
import torch
from encoding_gallery import HEADROOM, plot_decay, plot_distances, plot_extrapolation, plot_turns
from encoding_properties import properties_of

from ropepatch.encodings import ENCODINGS
from ropepatch.errors import RopepatchError
from ropepatch.report.plots.style import GRID

pytestmark = pytest.mark.sweep

NOTEBOOK = Path(__file__).resolve().parents[2] / "recipes" / "notebooks" / "encodings.ipynb"
FAMILIES = {name: kind.family for name, kind in ENCODINGS.items()}
LENGTHS = [256, 512, 1024, 2048, 4096]


def drawn(axes) -> np.ma.MaskedArray:
    (image,) = axes.images
    return image.get_array()


def words(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def panel(figure, title):
    (axes,) = (axes for axes in figure.axes if axes.get_title(loc="left") == title)
    return axes


def coloured(axes) -> dict:
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def curve(last, first=2.0):
    """From the first loss at the trained length to the last one at 16 times that."""
    return {length: first + (last - first) * n / 4 for n, length in enumerate(LENGTHS)}


# Maps


def test_the_sinusoidal_table_is_drawn_as_it_is_defined():
    table = drawn(gallery.plot_sinusoidal_table().axes[0])
    assert table.shape == (128, 128)
    assert table[5, 6] == pytest.approx(math.sin(5 / 10000 ** (6 / 128)), abs=1e-6)
    assert table[100, 41] == pytest.approx(math.cos(100 / 10000 ** (40 / 128)), abs=1e-5)


def test_the_teaching_tables_hold_their_numbers():
    integer, normalised, binary = gallery.plot_teaching_tables(positions=6, channels=4).axes
    assert words(integer)[4:8] == ["1"] * 4
    assert words(normalised)[8:12] == ["0.40"] * 4
    assert words(binary)[20:] == ["1", "0", "1", "0"]  # 5, the lowest digit first
    np.testing.assert_array_equal(drawn(binary)[3], [1, 1, 0, 0])


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


def test_distance_matrices_are_bands_only_where_the_distance_is_all_that_counts():
    figure = gallery.plot_distance_matrices()
    for title, banded in (("sinusoidal", True), ("integer", True), ("binary", False)):
        matrix = drawn(panel(figure, title))
        assert np.allclose(matrix[1:, 1:], matrix[:-1, :-1], atol=1e-4) == banded, title


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


def test_alibi_falls_at_its_slopes_and_the_future_is_empty():
    upper = gallery.plot_biases(heads=8, shown=(1, 8), tokens=40).axes[:2]
    for axes, slope in zip(upper, (1 / 2, 1 / 256), strict=True):
        matrix = drawn(axes)
        assert matrix[30, 10] == pytest.approx(-20 * slope)
        assert np.ma.getmaskarray(np.ma.masked_invalid(matrix))[10, 11]


def test_t5_shows_its_buckets_and_one_number_in_each():
    figure = gallery.plot_biases(heads=8, shown=(1, 8), tokens=160)
    buckets = drawn(panel(figure, "the 32 buckets"))
    assert [int(buckets[159, 159 - distance]) for distance in (0, 15, 16, 19, 112, 113, 159)] == [
        *(0, 15, 16, 17, 30, 31, 31)
    ]
    numbers = drawn(panel(figure, "head 1, untrained"))
    assert numbers[159, 159 - 113] == numbers[159, 0] != numbers[159, 159 - 112]


def test_clipping_stops_at_k():
    figure = gallery.plot_clipping(clip=2, tokens=5)
    assert " ".join(words(figure.axes[0])) == "0 1 0 2 1 0 3 2 1 0 4 3 2 1 0"
    assert " ".join(words(figure.axes[1])) == "0 1 0 2 1 0 2 2 1 0 2 2 2 1 0"


def test_the_table_of_properties_has_a_word_in_every_cell():
    measured = {name: properties_of(ENCODINGS[name]) for name in ("alibi", "nope")}
    (axes,) = gallery.plot_properties(measured).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["alibi", "nope"]
    assert " ".join(words(axes)) == "yes yes – – – yes yes yes no yes no yes – – – yes no yes no no"


# Curves


def test_the_hand_of_a_pair_stands_where_the_pair_has_turned_to():
    figure = plot_turns(positions=(3, 20), head_dim=4)
    for axes, (position, frequency) in zip(
        figure.axes, ((3, 1.0), (3, 0.01), (20, 1.0), (20, 0.01)), strict=True
    ):
        hand = axes.lines[-1]
        assert hand.get_xdata()[1] == pytest.approx(math.cos(position * frequency))
        assert hand.get_ydata()[1] == pytest.approx(math.sin(position * frequency))
    # 3 radians, 0.03 radians, 20 / 2 pi turns, 0.2 radians
    assert [words(axes)[0] for axes in figure.axes] == ["170°", "1.7°", "3.2 turns", "11°"]


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


def test_every_line_is_coloured_in_the_panel_of_its_family_and_grey_in_the_others():
    curves = {name: curve(1.8 + 0.02 * n) for n, name in enumerate(ENCODINGS)}
    figure = plot_extrapolation(curves, 256, curve(1.5, 1.7))
    for family in ("absolute", "relative", "rotary", "none"):
        axes = panel(figure, family)
        own = [name for name in ENCODINGS if FAMILIES[name] == family]
        assert list(coloured(axes)) == [*own, "floor"]
        assert (
            len({(line.get_color(), line.get_linestyle()) for line in coloured(axes).values()})
            == len(own) + 1
        )
        assert sum(line.get_color() == GRID for line in axes.lines) == len(ENCODINGS) - len(own)
        assert set(words(axes)) == {*own, "floor"}
        for name in own:
            assert list(coloured(axes)[name].get_ydata()) == pytest.approx(list(curves[name].values()))


def test_lengths_are_drawn_in_order_and_the_trained_one_is_marked():
    backwards = dict(reversed(curve(3.0).items()))
    (axes, *_) = plot_extrapolation({"rope": backwards}, 256).axes
    assert list(coloured(axes)["rope"].get_xdata()) == LENGTHS
    assert "256\ntrained" in [label.get_text() for label in axes.get_xticklabels()]


def test_a_collapse_leaves_the_picture_which_ends_at_the_worst_loss_otherwise_and_is_named_with_its_value():
    (axes, *_) = plot_extrapolation({"rope": curve(9.0), "xpos": curve(1.9)}, 256).axes
    low, high = axes.get_ylim()
    assert low < 1.9
    assert 1.9 + HEADROOM <= high < 1.9 + 1.1 * HEADROOM
    assert words(axes) == ["rope ↑ 9.0", "xpos"]
    (axes, *_) = plot_extrapolation({"rope": curve(2.4), "xpos": curve(1.9)}, 256).axes
    assert 2.4 < axes.get_ylim()[1] < 2.5


@pytest.mark.parametrize("missing", [{}, {512: math.nan, 1024: math.inf}], ids=["absent", "not numbers"])
def test_a_line_that_ends_early_ends_with_a_cross_and_says_where(missing):
    (axes, *_) = plot_extrapolation({"learned": {256: 2.0, **missing}, "integer": curve(3.0)}, 256).axes
    (cross,) = (line for line in axes.lines if line.get_marker() == "x")
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([256], [2.0])
    assert words(axes) == ["learned, to 256", "integer"]


def test_names_beside_the_lines_do_not_overlap():
    figure = plot_extrapolation({name: curve(2.0) for name in ENCODINGS}, 256)
    figure.canvas.draw()
    for axes in figure.axes:
        boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
        assert all(lower.y1 <= upper.y0 + 2 for lower, upper in pairwise(boxes))


@pytest.mark.parametrize("curves", [{}, {"rope": {}}, {"rope": {256: math.nan}}])
def test_without_losses_nothing_is_drawn(curves):
    with pytest.raises(RopepatchError, match="no losses to draw"):
        plot_extrapolation(curves, 256)


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
