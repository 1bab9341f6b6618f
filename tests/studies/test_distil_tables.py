"""The table of distillation says what its result file holds, and the study what its recipes read."""

import json
from dataclasses import replace
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
    parts = [[nats * 10, 10], [nats * 10 + 1, 10], [nats * 10 - 1, 10]]
    place = {"model": "m", "factor": 4, "target": 1024, "of": of}
    return place | {"all": parts, "short": parts, "last": parts, "digest": "d"} | more


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


def left(case, of, **what):
    """Of one row of a case: percent of YaRN's excess, and its loss within L as a share above the base's."""
    (own,) = (row for row in case if row["of"] in ("own window", "floor"))
    (yarn,) = (row for row in case if row["of"] == "untrained" and row["method"] == "yarn")
    wanted = vars(Trial(**what)) if of == "trial" else {}
    (one,) = (row for row in case if row["of"] == of and all(row[key] == wanted[key] for key in wanted))
    tokens = sum(count for _, count in own["short"])
    short = distil_tables.excess(one, own, "short").value * tokens / sum(nats for nats, _ in own["short"])
    return round(100 * distil_tables.excess(one, own).value / distil_tables.excess(yarn, own).value), short


def test_what_the_page_says_of_its_table_is_in_it():
    cases = {}
    for one in json.loads(RESULTS.read_text())["rows"]:
        cases.setdefault(f"{one['model']} {one['factor']}", []).append(one)
    names = ("babyllama-361 4", "babyllama-361 8", "stories-260k 4", "stories-260k 8", "tiny 8")
    four, eight, stories, stories_far, tiny = (cases[name] for name in names)
    own = {"rows": "self-written"}
    said = [
        (four, {}, 5),
        (four, distil_study.BY_TEXT, 137),
        *((four, {"seed": seed}, 5) for seed in (1, 2)),
        (four, own, 13),
        (four, own | {"seed": 1}, 11),
        (four, own | {"seed": 2}, 8),
        (four, own | {"temperature": 1.0}, 18),
        (four, {"rows": "random tokens"}, 751),
        (four, {"rows": "wikitext"}, 24),
        (four, {"skipped": True}, 22),
        (four, own | {"skipped": True}, 27),
        (eight, {}, 12),
        (eight, own, 9),
        (stories, {}, 4),
        (stories, own, 5),
        (stories_far, {}, 3),
        (tiny, {}, 31),
        (tiny, own, 15),
    ]
    assert [left(case, "trial", **what)[0] for case, what, _ in said] == [share for *_, share in said]
    assert left(eight, "teacher")[0] == 7
    assert left(four, "trial", rows="own kind", **distil_study.BY_TEXT)[0] < 0
    near = [left(case, "trial", **kind)[1] for case in (four, eight, stories) for kind in ({}, own)]
    near.append(left(stories_far, "trial")[1])
    assert max(near) < 0.01
    assert {left(four, "trial", method=method)[0] for method in ("yarn", "llama3", "fit")} == {5}


@pytest.mark.parametrize("trial", dict.fromkeys(replace(trial, method="yarn") for trial in TRIALS))
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
