"""Figures show the numbers they were given, and leave nothing behind."""

import math
from dataclasses import replace
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from made_results import asking, model_record, reading
from remapping_oracle import ORACLE, SMALL, distances
from tiny_models import tiny_config

import ropepatch
from ropepatch.attention import make_remapping
from ropepatch.evaluation.results import comparisons
from ropepatch.report.plots.changes import plot_plan
from ropepatch.report.plots.lines import figures
from ropepatch.report.plots.style import save_figure


def labelled(axes):
    """The lines of data."""
    return {
        line.get_label(): line
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


# Results


def test_losses_are_drawn_with_their_intervals():
    result = reading("yarn", [2.0, 1.5, 1.0], method="yarn", width=0.25)
    drawn = figures([result])
    assert list(drawn) == ["perplexity", "positions"]
    axes = drawn["perplexity"].axes[0]
    line = labelled(axes)["yarn"]
    assert list(line.get_xdata()) == [256, 512, 1024]
    assert list(line.get_ydata()) == pytest.approx(np.exp([2.0, 1.5, 1.0]), rel=1e-12)
    (band,) = axes.collections
    corners = {round(math.log(y), 6) for _, y in band.get_paths()[0].vertices}
    assert corners >= {1.5, 2.5, 0.75, 1.25}
    places, nats = labelled(drawn["positions"].axes[0])["yarn"].get_data()
    assert list(places) == pytest.approx([128, (256 * 512) ** 0.5, (512 * 1024) ** 0.5])
    assert list(nats) == pytest.approx([2.0, 1.5, 1.0], rel=1e-12)


def test_a_line_far_above_the_best_leaves_the_figure():
    results = [
        reading("floor", [0.1] * 3),
        reading("baseline", [0.6, 2.0, 12.0]),
        reading("yarn", [3.0, 2.5, 2.5], method="yarn"),
    ]
    figure = figures(results)["positions"]
    assert figure.axes[0].get_ylim()[1] == pytest.approx(4.0)


def test_the_accuracy_is_drawn_by_length_for_every_kind():
    of = {"number": [4, 2], "sentence": [2, 0]}
    drawn = figures([asking("baseline", of, lengths=(256, 512))])
    assert list(drawn) == ["retrieval"]
    number, sentence = (labelled(axes)["baseline"] for axes in drawn["retrieval"].axes)
    assert list(number.get_ydata()) == [1, 0.5]
    assert list(sentence.get_ydata()) == [0.5, 0]


# At which distances tokens are read


@pytest.mark.parametrize("name", ORACLE)
def test_the_distances_drawn_are_those_of_the_papers_formula(name):
    config = tiny_config("llama", max_position_embeddings=32)
    method = make_remapping(name, **SMALL[name])
    figure = plot_plan(ropepatch.plan(config, to=44, method=method))
    expected = distances(ORACLE[name](**SMALL[name]), 44)
    true, read = labelled(figure.axes[0])[name].get_data()
    np.testing.assert_allclose(read, expected[43, 43 - np.array(true)], atol=1e-9)
    assert sorted(true) == list(range(44))


# Which results go together


def test_only_results_measured_alike_are_compared():
    alike = [reading("baseline", [1.0] * 3), reading("yarn", [1.0] * 3, method="yarn")]
    other = [
        reading("baseline", [1.0] * 3, stride=128),
        reading("baseline", [1.0] * 3, digest="beef"),
        reading("baseline", [1.0] * 3, model=model_record("other")),
        reading("baseline", [1.0] * 3, lengths=[256, 512, 2048]),
        replace(alike[0], target=2048),
        asking("baseline", [4, 4, 4]),
    ]
    groups = comparisons([*alike, alike[1], *other])
    assert list(groups[0].results) == ["baseline", "yarn", "yarn (2)"]
    assert [len(group.results) for group in groups] == [3, 1, 1, 1, 1, 1, 1]


def test_names_of_figures_tell_models_targets_and_protocols_apart():
    found = figures(
        [
            reading("baseline", [1.0] * 3, model=model_record("a/b")),
            reading("baseline", [1.0] * 3, model=model_record("c")),
            reading("baseline", [1.0] * 3, model=model_record("c"), stride=128),
            reading("baseline", [1.0] * 2, model=model_record("c"), lengths=[256, 512]),
        ]
    )
    kinds = [name for name in found if "perplexity" in name]
    assert kinds == [
        "b-1k-perplexity",
        "c-1k-perplexity",
        "c-1k-perplexity-2",
        "c-512-perplexity",
    ]


# Colours and names


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("label", ["$\\nothing$<b>&amp;a\x00b\x1bc\ud800", "_hidden"])
def test_any_label_can_be_drawn(label, tmp_path):
    before = dict(matplotlib.rcParams)
    results = [
        reading(label, [1.0] * 3, method="yarn", model=model_record("..")),
        asking(label, [1, 2, 3]),
    ]
    for name, figure in figures(results).items():
        _, svg = save_figure(figure, tmp_path / name)
        assert svg.parent == tmp_path
        assert not name.startswith(".")
        ElementTree.parse(svg)
    assert dict(matplotlib.rcParams) == before
