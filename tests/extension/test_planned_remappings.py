"""Plans with a position remapping: they agree with patched models and report errors early."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oldest import OLDEST
from remapping_oracle import ORACLE
from tiny_models import tiny_config

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


CARRIES = "it carries a state from token to token"  # in the oldest transformers, which names no such layers


@pytest.mark.parametrize(
    ("model_type", "reason"),
    {
        "falcon": "its attention is no interchangeable function",
        "gemma2": "it caps its attention scores" if OLDEST else "it does not support sdpa",
        "gemma3": "some of its attention is not causal",
        "mistral": "its layers with RoPE attend to only 64 of its 64 tokens",
        "bamba": CARRIES if OLDEST else "it has layers of the type linear_attention",
    }.items(),
)
def test_architectures_without_remappable_attention_are_rejected_with_the_reason(model_type, reason):
    with pytest.raises(RopepatchError, match=f"cannot have a position remapping: {reason}"):
        ropepatch.plan(tiny_config(model_type), to=256, method="self-extend")


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


NUMBERS = [-1, 0, 1, 7, 255, 256, 1024, 1e3, 2.5, 1e308]
WORDS = ["", "none", "true", "1,2", "x.json", "٣", "{}", "\n", "\ud800", "0x10", "1_0", "nan", "inf", "-inf"]
HOSTILE = st.sampled_from([*map(str, NUMBERS), *WORDS, "9" * 30, "9" * 5000])
HOSTILE |= st.text(max_size=6)


@pytest.mark.sweep
@settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    name=st.sampled_from(sorted(REMAPPINGS)),
    settings=st.dictionaries(
        st.sampled_from(["window", "group", "divisor", "clip", "chunk", "length", "mapped", "head", "tail"])
        | st.sampled_from(["sinks", "shift", "log_n", "attention_factor", "factor", "name"])
        | st.text(max_size=4),
        HOSTILE,
        min_size=1,
        max_size=3,
    ),
)
def test_any_parameters_of_a_remapping_give_a_plan_or_a_one_line_error(run_here, name, settings):
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = run_here("plan", "tiny", "--to", "480", "--method", name, *words)
    if done.returncode == 0:
        assert "remapped distances stay within the original context of 256" in done.stdout
        return
    assert (done.returncode, done.stdout) == (2, "")
    assert [line.partition(": ")[0] for line in done.stderr.splitlines()] == ["error", "hint"]
