"""Loss curves of known losses: their intervals, differences and gains."""

import math
import random

import pytest
import torch

from ropepatch.errors import RopepatchError
from ropepatch.evaluation import bootstrap
from ropepatch.evaluation.bootstrap import bootstrap_interval
from ropepatch.evaluation.curves import LossCurve, Perplexity, difference


def slow_interval(parts: list[tuple[float, int]], resamples: int) -> tuple[float, float]:
    """The textbook: draw as many documents as there are, divide the sums, sort, and cut off the tails."""
    draw = random.Random(0)
    ratios = []
    for _ in range(resamples):
        drawn = draw.choices(parts, k=len(parts))
        ratios.append(sum(nats for nats, _ in drawn) / sum(tokens for _, tokens in drawn))
    ratios.sort()
    return ratios[round(0.025 * resamples)], ratios[round(0.975 * resamples)]


def synthetic(seed: int, count: int, *, mean: float = 3.0) -> list[tuple[float, int]]:
    """Documents of uneven lengths and uneven difficulty, whose expected loss per token is ``mean``."""
    draw = random.Random(seed)
    lengths = [round(math.exp(draw.gauss(5, 0.7))) + 1 for _ in range(count)]
    return [(tokens * draw.gauss(mean, 0.5), tokens) for tokens in lengths]


# The bootstrap


@pytest.mark.parametrize("count", [2, 5, 60])
@pytest.mark.parametrize("seed", [1, 2])
def test_an_interval_is_that_of_a_plain_bootstrap_over_documents(count, seed):
    parts = synthetic(seed, count)
    low, high = bootstrap_interval(parts)
    slow_low, slow_high = slow_interval(parts, 20_000)
    width = slow_high - slow_low
    assert abs(low - slow_low) < 0.1 * width
    assert abs(high - slow_high) < 0.1 * width


def test_an_interval_holds_the_true_mean_in_95_of_100_cases():
    held = sum(low <= 3 <= high for low, high in (bootstrap_interval(synthetic(s, 40)) for s in range(400)))
    assert 0.91 <= held / 400 <= 0.98


def test_documents_are_drawn_not_tokens():
    curve = LossCurve((torch.full((10_000,), 1.0), torch.full((10_000,), 3.0)))
    assert curve.at(10_001).interval == (1.0, 3.0)  # of 20,000 independent tokens it would be 2 +- 0.014


@pytest.mark.parametrize("parts", [[], [(3.0, 2)]])
def test_fewer_than_two_documents_leave_the_interval_open(parts):
    assert bootstrap_interval(parts) == (-math.inf, math.inf)


def test_the_order_of_the_documents_and_the_size_of_the_blocks_change_no_interval(monkeypatch):
    parts = synthetic(3, 30)
    interval = bootstrap_interval(parts)
    assert bootstrap_interval(random.Random(0).sample(parts, 30)) == interval
    assert interval == bootstrap_interval(parts)
    torch.manual_seed(5)
    assert bootstrap_interval(parts) == interval
    monkeypatch.setattr(bootstrap, "BLOCK", 30 * 100)
    low, high = bootstrap_interval(parts)
    assert (low, high) == pytest.approx(interval, rel=0.02)


def test_the_bootstrap_does_not_touch_the_callers_random_numbers():
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    bootstrap_interval(synthetic(1, 5))
    assert torch.equal(torch.rand(3), wanted)


# Perplexities of a curve


def test_a_perplexity_holds_the_sums_of_its_documents():
    curve = LossCurve((torch.tensor([1.0, 2.0, 4.0]), torch.tensor([8.0]), torch.tensor([16.0, 32.0])))
    assert curve.at(3).documents == ((3.0, 2), (48.0, 2))
    assert curve.between(2, 4).documents == ((6.0, 2), (32.0, 1))
    assert curve.at(3).num_documents == 2
    assert curve.at(3).interval == (1.5, 24.0)


def test_rows_of_one_document_are_one_part_of_the_interval():
    rows = (torch.tensor([1.0, 1.0]), torch.tensor([5.0, 5.0]), torch.tensor([3.0]))
    read = LossCurve(rows, documents=(4, 9, 4)).between(0, 9)
    assert read.documents == ((5.0, 3), (10.0, 2))
    assert (read.nll, read.num_tokens, read.num_documents) == (15.0, 5, 2)
    assert read.interval == (5 / 3, 5.0)


def test_documents_that_do_not_belong_to_rows_are_an_error():
    with pytest.raises(RopepatchError, match="2 rows need the documents of as many, got 1"):
        LossCurve((torch.ones(1), torch.ones(2)), documents=(0,))


# Differences


def test_a_difference_is_paired_by_document():
    parts_a, parts_b = synthetic(1, 12), synthetic(2, 12)
    parts_b = [(nats, tokens) for (nats, _), (_, tokens) in zip(parts_b, parts_a, strict=True)]
    a, b = (
        Perplexity(math.fsum(n for n, _ in parts), sum(t for _, t in parts), tuple(parts))
        for parts in (parts_a, parts_b)
    )
    mean, (low, high) = difference(a, b)
    gaps = [(x - y, tokens) for (x, tokens), (y, _) in zip(parts_a, parts_b, strict=True)]
    assert mean == pytest.approx(a.mean - b.mean)
    slow_low, slow_high = slow_interval(gaps, 20_000)
    assert low == pytest.approx(slow_low, abs=0.1 * (slow_high - slow_low))
    assert high == pytest.approx(slow_high, abs=0.1 * (slow_high - slow_low))


def test_measurements_of_other_tokens_have_no_difference():
    three, two = LossCurve((torch.ones(3), torch.ones(2))), LossCurve((torch.ones(2), torch.ones(3)))
    with pytest.raises(RopepatchError, match="cannot compare 5 tokens of 2 documents with 5 of 2"):
        difference(three.between(0, 9), two.between(0, 9))
    with pytest.raises(RopepatchError, match="cannot compare"):
        difference(Perplexity(3.0, 2), Perplexity(3.0, 4))


def test_one_document_has_a_difference_without_an_interval():
    one, other = LossCurve((torch.ones(3),)).at(4), LossCurve((torch.zeros(3),)).at(4)
    assert difference(one, other) == (1.0, (-math.inf, math.inf))


# Gains


def test_a_gain_is_what_the_limited_curve_pays_more_for_each_token():
    full = LossCurve((torch.tensor([4.0, 1.0, 2.0]), torch.tensor([3.0])), documents=(5, 7))
    limited = LossCurve((torch.tensor([4.0, 3.0, 1.5]), torch.tensor([3.5])), documents=(5, 7))
    gain = full.gain_over(limited)
    assert [nll.tolist() for nll in gain.nll] == [[0.0, 2.0, -0.5], [0.5]]
    assert gain.documents == (5, 7)
    assert gain.between(2, 4).mean == 0.75


@pytest.mark.parametrize(
    "limited",
    [
        LossCurve((torch.ones(3),)),
        LossCurve((torch.ones(3), torch.ones(3))),
        LossCurve((torch.ones(2), torch.ones(3))),
        LossCurve((torch.ones(3), torch.ones(2)), documents=(0, 0)),
    ],
    ids=["fewer rows", "longer row", "other order", "other documents"],
)
def test_a_gain_over_other_tokens_is_an_error(limited):
    with pytest.raises(RopepatchError, match=r"cannot subtract .* not the same tokens"):
        LossCurve((torch.ones(3), torch.ones(2))).gain_over(limited)


def test_a_gain_that_is_no_number_is_an_error():
    broken = LossCurve((torch.tensor([1.0, math.inf]),))
    with pytest.raises(RopepatchError, match="a gain is not finite"):
        broken.gain_over(broken)
