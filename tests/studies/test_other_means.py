"""The other means of eval/: their settings, their search, and what a share is of."""

import math

import other_means
import pytest
import torch
from other_means import Case, Point, map_settings, searched
from study import Rows

from ropepatch.attention import make_map


@pytest.mark.parametrize("name", ["rerope", "leaky-rerope", "self-extend"])
@pytest.mark.parametrize("factor", [2, 4, 8])
def test_every_setting_of_a_map_keeps_the_target_within_the_trained_window(name, factor):
    trained, target = 64, 64 * factor
    for settings in map_settings(name, trained, target):
        assert settings["window"] < trained
        far = make_map(name, **settings).fitted(trained, target)
        read = far.read_at(torch.tensor([target - 1]), torch.arange(target))
        assert read.nan_to_num(0).max() < trained


def test_a_search_is_as_good_as_its_grid_and_ends_near_the_least_cost():
    wanted = Point(math.log(11), 2.5, 1.7, 0.08)
    tried = []

    def cost(point):
        tried.append(point)
        return sum((value - vars(wanted)[name]) ** 2 for name, value in vars(point).items())

    best, count = searched(cost, 4.0)
    assert count == len(tried) == len(set(tried))
    assert cost(best) == min(map(cost, list(tried))) < 0.05


def test_rows_resume_and_a_share_is_of_what_is_left_above_the_floor(monkeypatch, tmp_path):
    case = Case("tiny", 2, windows=2)
    made = []

    def leaving(excess):
        def make(case, rows):
            made.append(list(rows))
            return {"settings": {}, "excess": excess, "clusters": [], "short": 0.0}

        return make

    monkeypatch.setattr(other_means, "MEANS", {"published": leaving(0.5), "half": leaving(0.2)})
    other_means.measure(case, Rows(tmp_path / "rows.json", "other means"))
    assert made == [[], ["published"]]
    first, second = Rows(tmp_path / "rows.json", "other means").rows
    least = case.floor - first["base"]
    assert least < 0
    assert first["share_of_published"] == 1
    assert second["share_of_published"] == pytest.approx((0.2 - least) / (0.5 - least))
    other_means.measure(case, Rows(tmp_path / "rows.json", "other means"))
    assert len(made) == 2
