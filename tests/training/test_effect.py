"""What a training changed: the line on held-out data, and the short-context check."""

import pytest
from run_recipes import small_recipe

import ropepatch
from ropepatch.evaluation.intervals import Mean
from ropepatch.training.effect import Effect, effects, said, short_context_check
from ropepatch.training.fine_tuning import fine_tune
from ropepatch.training.recipe import Data, Distil, Generated, Lora, Watch


def losses(*values):
    """Of texts with 100 tokens each."""
    return Mean(tuple((100 * value, 100.0) for value in values))


BEFORE = losses(1.0, 2.0, 3.0, 2.5)
NOISY = losses(1.2, 1.9, 3.2, 2.5)  # worse by 0.075 with an interval around 0
WORSE = losses(1.21, 2.2, 3.19, 2.7)


def test_a_training_is_worse_only_where_the_interval_excludes_no_change():
    assert [Effect("loss", BEFORE, after, False).is_worse for after in (NOISY, WORSE)] == [False, True]
    assert [Effect("log-prob", before, BEFORE, True).is_worse for before in (NOISY, WORSE)] == [False, True]
    assert not Effect("loss", losses(1, 2), losses(2, 3), False).is_worse  # two texts have no interval


def test_the_line_warns_of_what_is_significantly_worse():
    found = effects({"loss beyond": BEFORE, "other": BEFORE}, {"loss beyond": WORSE, "other": BEFORE})
    line = said(found, "yarn")
    assert line.startswith("warning: trained, against yarn only")
    assert line.endswith("significantly worse: loss beyond")
    assert "loss beyond 2.1250 -> 2.3250 (+0.2000, +0.1870 to +0.2130)" in line
    assert said(found[1:], "yarn").startswith("trained, against yarn only")


def test_a_short_context_check_fails_only_beyond_its_noise():
    within, noisy, failed = (short_context_check(BEFORE, now, 0.02) for now in (BEFORE, NOISY, WORSE))
    assert (within.passed, noisy.passed, failed.passed) == (True, True, False)
    assert noisy.increase == pytest.approx(0.075 / 2.125)
    assert noisy.low < 0.02 < noisy.high
    assert str(noisy).endswith("not significantly above the limit of 2.00%")
    assert str(failed).endswith("above the limit of 2.00%")
    assert [failed.limited(most).passed for most in (0.08, 0.09)] == [False, True]
    assert not short_context_check(losses(1, 2), losses(1.1, 2.1), 0.02).passed  # two texts: the mean itself


def test_a_training_that_does_harm_is_saved_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("ROPEPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ropepatch.training.self_written.SHARD", 2048)
    sources = (Generated(generated="self"), Generated(generated="questions"))
    recipe = small_recipe(
        data=Data(sources=sources, windows=(64, 256), tokens_per_batch=256, boundaries=False),
        distil=Distil(),
        lora=Lora(r=4, train_norms=False),
        watch=Watch(every=100, windows=4, passkey_trials=0),
        trainer={"max_steps": 4, "learning_rate": 0.3, "warmup_steps": 0},
    )
    lines = []
    plan = ropepatch.plan("tiny", to=512, method="yarn")
    fine_tuned = fine_tune(plan, recipe, tmp_path / "out", say=lines.append)
    (line,) = [line for line in lines if "on held-out data" in line]
    assert line.startswith("warning: trained, against yarn only")
    assert "significantly worse: loss within 256 tokens, loss beyond" in line
    assert (fine_tuned.folder / "model.safetensors").is_file()
    assert not fine_tuned.short_context.passed
