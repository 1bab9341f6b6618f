"""The tables of LongPPL and LongCE: known rows give known cells; and what their trainings differ in."""

import long_ce_study
import longppl_tables
import pytest
from distil_study import CROSS_ENTROPY, DISTILLED, Case

PLACE = {"model": "m", "factor": 4, "target": 1024}


def row(nats, key, **more):
    parts = [[nats * 10 + change, 10.0] for change in (0, 1, -1)]
    return PLACE | {"all": parts, "short": parts, "key": key, "digest": "d"} | more


def test_a_long_perplexity_stands_beside_its_scorer_with_its_tokens():
    rows = [
        row(1.0, [[2.0, 2.0]] * 3 if scorer == "yarn" else [], scorer=scorer, part=part, method="ntk")
        for scorer in ("itself", "yarn")
        for part in (2, 4)
    ]
    found = longppl_tables.longppl_table(rows)
    assert "| `ntk` | 2.718 | –, 0 tokens | 2.718 [2.718, 2.718], 6 tokens |" in found


def test_what_long_ce_changes_is_paired_with_the_plain_loss():
    key = [[2.0, 2.0]] * 3
    rows = [
        row(1.0, key, loss="untrained"),
        row(0.6, key, loss=CROSS_ENTROPY, long_ce=False, seed=1),
        row(0.5, key, loss=CROSS_ENTROPY, long_ce=False, seed=0),
        row(0.7, key, loss=CROSS_ENTROPY, long_ce=True, seed=0),
        row(0.9, key, loss=CROSS_ENTROPY, long_ce=True, seed=1),
    ]
    found = longppl_tables.long_ce_table(rows)
    by, none = "+0.{0}000 [+0.{0}000, +0.{0}000]".format, "+0.0000 [+0.0000, +0.0000]"
    assert f"| {by(2)}; {by(3)} | {by(2)}; {by(3)} | {none}; {none} |" in found
    assert "| cross-entropy | yes | 2.226 |" in found  # exp of the mean of 0.7 and 0.9


@pytest.mark.sweep
@pytest.mark.parametrize("loss", [CROSS_ENTROPY, DISTILLED])
def test_trainings_differ_in_long_ce_alone(loss, tmp_path, shared):
    recipes = (
        long_ce_study.recipe_of(Case("tiny", 4), loss, weighed, 1, tmp_path) for weighed in (False, True)
    )
    plain, weighed = (recipe.model_dump() for recipe in recipes)
    assert (plain.pop("long_ce"), weighed.pop("long_ce")["clip"]) == (None, 5.0)
    assert plain == weighed
    assert plain["seed"] == 1
