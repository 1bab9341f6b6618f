"""Plans with a position remapping: they agree with patched models and report errors early."""

import json

import pytest
from remapping_oracle import ORACLE

import ropepatch
from ropepatch.attention import REMAPPINGS, make_remapping

every_remapping = pytest.mark.parametrize("name", REMAPPINGS)


def reach(name: str) -> int:
    """A target length that every remapping supports on `tiny`."""
    return 480 if name == "string" else 1024


@every_remapping
def test_a_plan_shows_the_distances_of_its_last_token_and_the_record_is_complete(name):
    plan = ropepatch.plan("tiny", to=reach(name), method=name)
    record = json.loads(plan.to_json())
    assert make_remapping(record["method"], **record["parameters"]) == plan.method
    own = {
        key: value
        for key, value in record["parameters"].items()
        if key not in ("log_n", "attention_factor")
    }
    distance, m = ORACLE[name](**own), reach(name) - 1
    seen = [float(d) for d in (distance(m, n) for n in range(m + 1)) if d is not None]
    lines = (
        str(plan)
        .split("remapped to\n")[1]
        .partition("remapped distances")[0]
        .splitlines()
    )
    read = [
        float(word) for line in lines for word in line.rsplit("  ", 1)[1].split(" to ")
    ]
    assert (min(read), max(read)) == pytest.approx((min(seen), max(seen)), rel=1e-3)


def test_a_plan_for_a_huge_target_is_fast():
    for name in REMAPPINGS.keys() - {
        "string",
        "lampe",
    }:  # which would reach beyond the largest parameter
        assert "remapped distances stay within the original context of 256" in str(
            ropepatch.plan("tiny", to="999999999999", method=name)
        )
