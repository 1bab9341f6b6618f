"""Figures of what fitting learned show the divisors and losses that they were given."""

import math
from xml.etree import ElementTree

import pytest
from divisors import LearnedDivisors, plot_divisors

from ropepatch.errors import RopepatchError
from ropepatch.report.plots.style import COLOURS, FAINT, save_figure
from ropepatch.scaling import make_scaling
from ropepatch.scaling.rope import Rope

pytestmark = pytest.mark.sweep

ROPE = Rope(8, 10_000.0, 512)
OTHER = Rope(16, 10_000.0, 256)
SEEDS = ("small 0", "small 1", "small 2", "other 0")


def learned(divisors=(1.0, 1.5, 0.7, 6.0), *, model="small", rope=ROPE, factor=4.0, seed=0, a=1.07):
    return LearnedDivisors(model, rope, factor, seed, tuple(divisors), a)


def other(**changes):
    return learned([1.0] * 7 + [2.0], model="other", rope=OTHER, **changes)


def found(axes, label):
    return [line for line in axes.lines if line.get_label() == label]


def words(axes):
    return [text.get_text() for text in axes.texts]


# Divisors


@pytest.mark.parametrize(
    ("carried", "base"), [(None, 10), ((1.0, 0.5, 0.25, 0.125), 2)], ids=["plain", "scaled already"]
)
def test_a_pair_stands_at_its_wavelength_over_the_trained_context_and_its_divisor(carried, base):
    """Of head width 8 and base 10000 the pairs turn once in 2 pi 10^i tokens."""
    (axes,) = plot_divisors(
        [learned(rope=ROPE.model_copy(update={"carried": carried}))], methods=["linear"]
    ).axes
    (line,) = found(axes, "small 0")
    assert list(line.get_xdata()) == pytest.approx([2 * math.pi * base**i / 512 for i in range(4)], rel=1e-5)
    assert list(line.get_ydata()) == [1.0, 1.5, 0.7, 6.0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_every_factor_has_a_panel_with_its_own_vectors():
    curves = [learned(factor=8.0, seed=1), learned(factor=2.0), other(factor=8.0)]
    figure = plot_divisors(curves)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["2 ×", "8 ×"]
    assert [len(found(axes, "small 0")) for axes in figure.axes] == [1, 0]
    assert [len(found(axes, "small 1")) for axes in figure.axes] == [0, 1]
    assert [len(found(axes, "other 0")) for axes in figure.axes] == [0, 1]


@pytest.mark.parametrize("method", ["yarn", "linear", "dynamic-linear"])
def test_published_divisors_are_those_of_the_registry_at_the_target_on_each_rope(method):
    (axes,) = plot_divisors([learned(), learned(seed=1), other()], methods=[method]).axes
    lines = found(axes, method)
    assert len(lines) == 2
    for line, rope in zip(lines, (ROPE, OTHER), strict=True):
        window = rope.original_max_position_embeddings
        scaled = make_scaling(method, factor=4.0).frequencies(rope, 4 * window).inv_freq
        assert list(line.get_ydata()) == pytest.approx((rope.inv_freq() / scaled).tolist(), rel=1e-6)
        assert list(line.get_xdata()) == pytest.approx((2 * math.pi / rope.inv_freq() / window).tolist())


def test_wavelengths_of_the_trained_and_the_new_context_are_marked():
    for axes, factor in zip(
        plot_divisors([learned(factor=2.0), learned(factor=8.0)]).axes, (2, 8), strict=True
    ):
        upright = [line.get_xdata()[0] for line in axes.lines if len(set(line.get_xdata())) == 1]
        assert {1.0, float(factor)} <= set(upright)
        assert {"L", f"{factor} L"} <= set(words(axes))


def test_a_checkpoint_has_one_colour_for_its_name_its_seeds_and_the_range_of_its_attention_factors():
    curves = [learned(a=1.0712), learned(seed=1, a=1.09), learned(seed=2, a=1.08), other(a=1.25)]
    figure = plot_divisors(curves, methods=["yarn"])
    named = {line.get_label(): line.get_color() for line in figure.legends[0].get_lines()}
    assert named == {"small": COLOURS[0], "other": COLOURS[1], "yarn": FAINT}
    (axes,) = figure.axes
    lines = {line.get_label(): line.get_color() for line in axes.lines if line.get_label() in SEEDS}
    assert lines == dict(zip(SEEDS, [*COLOURS[:1] * 3, COLOURS[1]], strict=True))
    ranges = {text.get_text(): text.get_color() for text in axes.texts if text.get_text().startswith("a =")}
    assert ranges == {"a = 1.071 to 1.090": COLOURS[0], "a = 1.250": COLOURS[1]}


def test_a_pair_beyond_the_picture_is_a_triangle_at_its_edge():
    (axes,) = plot_divisors([learned((0.03, 1.5, 0.7, 50.0))]).axes
    (up,), (down,) = found(axes, "_^"), found(axes, "_v")
    x = list(found(axes, "small 0")[0].get_xdata())
    low, high = axes.get_ylim()
    assert list(up.get_xdata()) == [x[3]]
    assert list(down.get_xdata()) == [x[0]]
    assert 0.03 < low < down.get_ydata()[0] < 0.5
    assert 4 < up.get_ydata()[0] < high < 50


def test_vectors_that_do_not_fit_their_rope_and_nothing_to_draw_are_refused():
    with pytest.raises(RopepatchError, match="small has 4 rotary pairs, got 3 divisors"):
        plot_divisors([learned((1.0, 2.0, 3.0))])
    with pytest.raises(RopepatchError, match="no vectors to draw"):
        plot_divisors([])


def test_any_name_and_a_stopped_pair_can_be_drawn(tmp_path):
    figure = plot_divisors([learned(model="$x_1"), other(factor=8.0)], methods=["p-rope"])
    assert math.inf in list(found(figure.axes[0], "p-rope")[0].get_ydata())
    assert figure.axes[0].get_ylim()[1] < 1000
    _, svg = save_figure(figure, tmp_path / "divisors")
    ElementTree.parse(svg)
