"""The table of distillation: known rows give known shares; and what the recipes of its study read."""

from dataclasses import replace

import distil_tables
import pytest
from distil_study import CROSS_ENTROPY, TRIALS, Case, Trial


def row(of, nats, **more):
    parts = [[nats * 10, 10], [nats * 10 + 1, 10], [nats * 10 - 1, 10]]
    place = {"model": "m", "factor": 4, "target": 1024, "of": of}
    return place | {"all": parts, "short": parts, "last": parts, "digest": "d"} | more


def test_what_is_left_is_a_share_of_what_the_same_scaling_left():
    trial = vars(Trial(method="llama3")) | {"steps": 3, "seconds": 2.0}
    rows = [
        row("own window", 1.0),
        row("untrained", 1.5, method="yarn"),
        row("untrained", 3.0, method="llama3"),
        row("trial", 1.2, **trial),
    ]
    table = distil_tables.distil_table(rows)
    (found,) = (line for line in table.splitlines() if "fairy tales" in line)
    assert "| +0.2000 [+0.2000, +0.2000] | 10% |" in found
    assert table.index("fairy tales") < table.index("– (yarn)") < table.index("– (llama3)")


@pytest.mark.sweep
@pytest.mark.parametrize("trial", dict.fromkeys(replace(trial, method="yarn") for trial in TRIALS))
def test_every_trial_is_a_recipe_of_as_many_tokens_a_step(trial, tmp_path, shared):
    case = Case("babyllama-361", 4)
    recipe = case.recipe(trial, tmp_path)
    windows, room = recipe.data.lengths(case.trained)
    assert room == 2 * case.target
    assert recipe.reads_beyond(case.trained) is not trial.skipped
    assert (recipe.distil is None) is (trial.loss == CROSS_ENTROPY)
    assert windows[0] == (case.trained if trial.skipped else case.target)


def test_no_row_is_from_a_story_that_judges(tmp_path, shared):
    case = Case("stories-260k", 4)
    own = case.texts(tmp_path)["own kind"].read_text()
    stories = (tmp_path / "held-out.txt").read_text().split("\n<|endoftext|>\n")
    assert len(stories) > 300
    assert not any(story in own for story in stories if len(story) > 100)
