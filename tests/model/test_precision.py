"""Which precision a CPU is given, by what is measured on it."""

import pytest
import torch

import ropepatch
from ropepatch.model import precision
from ropepatch.model.precision import fastest, reads_faster_whole


@pytest.fixture
def measured(monkeypatch):
    """Sets what a pass takes in float32 and in bfloat16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def set_to(float32, bfloat16):
        seconds = (("float32", float32), ("bfloat16", bfloat16))
        monkeypatch.setattr(precision, "_measured", lambda shapes, threads: seconds)

    return set_to


@pytest.mark.parametrize(
    ("float32", "bfloat16", "dtype"),
    [(3.0, 1.0, "bfloat16"), (1.0, 3.0, "float32"), (1.0, 0.95, "float32")],
    ids=["with AMX", "without", "no clear difference"],
)
def test_a_cpu_takes_the_faster_and_says_both_times(measured, float32, bfloat16, dtype):
    measured(float32, bfloat16)
    model, _ = ropepatch.load("tiny")
    chosen = fastest(model)
    assert chosen.dtype == dtype
    assert chosen.to_dict()["seconds"] == {"float32": float32, "bfloat16": bfloat16}
    assert f"float32 {1000 * float32:.1f} ms, bfloat16 {1000 * bfloat16:.1f} ms" in str(chosen)
    assert reads_faster_whole(model.bfloat16(), "cpu") is (dtype == "float32")
    assert not reads_faster_whole(model.float(), "cpu")  # it is, and it is never rounded


def test_a_cpu_beside_a_gpu_is_measured_too(measured, monkeypatch):
    measured(1.0, 3.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model, _ = ropepatch.load("tiny")
    assert reads_faster_whole(model.bfloat16(), "cpu")


def test_a_measurement_takes_both_precisions_and_leaves_the_random_state_alone():
    model, _ = ropepatch.load("tiny")
    before = torch.random.get_rng_state()
    chosen = fastest(model)
    assert all(seconds > 0 for seconds in (chosen.seconds or {"gpu": 1.0}).values())
    assert torch.equal(before, torch.random.get_rng_state())
