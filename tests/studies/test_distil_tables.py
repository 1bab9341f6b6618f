"""The table of distillation says what its result file holds, and the study what its recipes read."""

import json
from pathlib import Path

import distil_study
import distil_tables
import pytest
from distil_study import TRIALS, Case, Trial
from readme import check_block

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "results" / "distil.json"
PAGE = ROOT / "eval" / "studies" / "distil" / "distil.md"


def row(of, nats, **more):
    parts = [[nats * 10, 10], [nats * 10 + 1, 10]]
    place = {"model": "m", "factor": 4, "target": 1024, "of": of}
    return place | {"all": parts, "short": parts, "last": parts} | more


def test_the_page_has_the_table_of_the_results():
    check_block("distil", distil_tables.distil_table(json.loads(RESULTS.read_text())["rows"]), PAGE)


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


def test_what_the_page_says_of_its_table_is_in_it():
    rows = json.loads(RESULTS.read_text())["rows"]
    rows = [row for row in rows if (row["model"], row["factor"]) == ("babyllama-361", 4)]
    (own,) = (row for row in rows if row["of"] == "own window")
    (yarn,) = (row for row in rows if row["of"] == "untrained" and row["method"] == "yarn")
    whole = distil_tables.excess(yarn, own)[0]

    def left(of):
        return distil_tables.excess(of, own)[0] / whole

    trials = [row for row in rows if row["of"] == "trial"]
    foreign = [row for row in trials if row["rows"] == "fairy tales" and row["method"] == "yarn"]
    assert all(left(row) > 1 for row in foreign if row["loss"] == "cross-entropy")
    distilled = [row for row in trials if row["loss"] == "distillation"]
    distilled = [row for row in distilled if row["rows"] in ("fairy tales", "self-written")]
    assert max(left(row) for row in distilled if row["skipped"]) < 1 / 3
    assert max(left(row) for row in distilled if not row["skipped"]) < 1 / 5
    assert round(left(next(row for row in rows if row["of"] == "teacher")), 2) == 0.07


@pytest.mark.parametrize("trial", dict.fromkeys(TRIALS))
def test_every_trial_is_a_recipe_of_as_many_tokens_a_step(trial, tmp_path, shared):
    case = Case("babyllama-361", 4)
    recipe = case.recipe(trial, tmp_path)
    windows, room = recipe.data.lengths(case.trained)
    assert room == 2 * case.target
    assert recipe.reads_beyond(case.trained) is not trial.skipped
    assert (recipe.distil is None) is (trial.loss == distil_study.CROSS_ENTROPY)
    assert windows[0] == (case.trained if trial.skipped else case.target)


def test_no_row_is_from_a_story_that_judges(tmp_path, shared):
    case = Case("stories-260k", 4)
    own = case.texts(tmp_path)["own kind"].read_text()
    stories = (tmp_path / "held-out.txt").read_text().split("\n<|endoftext|>\n")
    assert len(stories) > 300
    assert not any(story in own for story in stories if len(story) > 100)
