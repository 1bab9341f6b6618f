"""The short-context check: what a training changed within the original length."""

import pytest
from run_recipes import ask_little, train

from ropepatch.evaluation.intervals import Mean
from ropepatch.training.recipe import Data, Distil, Generated, Lora, Watch
from ropepatch.training.trainer import short_context_check


def losses(*values):
    """Of texts with 100 tokens each."""
    return Mean(tuple((100 * value, 100.0) for value in values))


BEFORE = losses(1.0, 2.0, 3.0, 2.5)
NOISY = losses(1.2, 1.9, 3.2, 2.5)  # worse by 0.075 with an interval around 0
WORSE = losses(1.21, 2.2, 3.19, 2.7)


def test_a_short_context_check_fails_only_beyond_its_noise():
    within, noisy, failed = (
        short_context_check(BEFORE, now, 0.02) for now in (BEFORE, NOISY, WORSE)
    )
    assert (within.passed, noisy.passed, failed.passed) == (True, True, False)
    assert noisy.increase == pytest.approx(0.075 / 2.125)
    assert noisy.low < 0.02 < noisy.high
    assert not short_context_check(
        losses(1, 2), losses(1.1, 2.1), 0.02
    ).passed  # two texts: the mean itself


@pytest.mark.slow
def test_a_training_that_does_harm_is_saved_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("ROPEPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ropepatch.training.self_written.SHARD", 2048)
    ask_little(monkeypatch)
    sources = (Generated(generated="self"), Generated(generated="questions"))
    fine_tuned = train(
        tmp_path / "out",
        data=Data(
            sources=sources, windows=(64, 256), tokens_per_batch=256, boundaries=False
        ),
        distil=Distil(),
        lora=Lora(r=4, train_norms=False),
        watch=Watch(every=100, windows=4, passkey_trials=0),
        trainer={"max_steps": 4, "learning_rate": 0.3, "warmup_steps": 0},
    )
    assert (fine_tuned.path / "model.safetensors").is_file()
    assert not fine_tuned.record.training.short_context.passed
