"""Plans with a position remapping: they agree with patched models and report errors early."""

import json

import pytest
from remapping_oracle import ORACLE

import ropepatch
from ropepatch.attention import REMAPPINGS, make_remapping, remap_positions
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.measuring import measure_extension
from ropepatch.evaluation.suites import Suite
from ropepatch.evaluation.tasks import PerplexityTask

every_remapping = pytest.mark.parametrize("name", REMAPPINGS)


def reach(name: str) -> int:
    """A target length that every remapping supports on `tiny`."""
    return 480 if name == "string" else 1024


@every_remapping
def test_a_plan_shows_the_distances_of_its_last_token_and_the_record_is_complete(name):
    plan = ropepatch.plan("tiny", to=reach(name), method=name)
    record = json.loads(plan.to_json())
    assert make_remapping(record["method"], **record["parameters"]) == plan.remapping == plan.method
    own = {
        key: value for key, value in record["parameters"].items() if key not in ("log_n", "attention_factor")
    }
    distance, m = ORACLE[name](**own), reach(name) - 1
    seen = [float(d) for d in (distance(m, n) for n in range(m + 1)) if d is not None]
    lines = str(plan).split("remapped to\n")[1].partition("remapped distances")[0].splitlines()
    read = [float(word) for line in lines for word in line.rsplit("  ", 1)[1].split(" to ")]
    assert (min(read), max(read)) == pytest.approx((min(seen), max(seen)), rel=1e-3)


def test_a_plan_for_a_huge_target_is_fast():
    for name in REMAPPINGS.keys() - {"string", "lampe"}:  # which would reach beyond the largest parameter
        assert "remapped distances stay within the original context of 256" in str(
            ropepatch.plan("tiny", to="999999999999", method=name)
        )


def test_the_measured_model_has_the_requested_remapping(tiny, tmp_path):
    model, tokenizer = tiny
    task = PerplexityTask(windows=None, documents=1, lengths=(512,))
    suite = Suite(to=(512,), tasks=(task,))
    plan = ropepatch.plan("tiny", to=512, method="self-extend", window=32)
    results = {result.label: result for result in measure_extension(suite, plan, out=tmp_path)}
    measurement = task.prepare("tiny", tokenizer, trained=256, to=512)
    with remap_positions(model, "self-extend", to=512, window=32):
        by_hand = measurement.run(model, tokenizer, None, lambda done, total: None)
    assert results["self-extend"].rows == by_hand != results["baseline"].rows
    other = ropepatch.plan("tiny", to=512, method="self-extend", window=64)
    with pytest.raises(RopepatchError, match="measured with other settings: it differs in scaling"):
        measure_extension(suite, other, out=tmp_path)
