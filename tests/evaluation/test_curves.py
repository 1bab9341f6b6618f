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


@pytest.mark.parametrize("parts", [[], [(3.0, 2)]])
def test_fewer_than_two_documents_leave_the_interval_open(parts):
    assert bootstrap_interval(parts) == (-math.inf, math.inf)


def test_the_order_of_the_documents_and_the_size_of_the_blocks_and_the_random_state_change_no_interval(
    monkeypatch,
):
    parts = synthetic(3, 30)
    interval = bootstrap_interval(parts)
    assert bootstrap_interval(random.Random(0).sample(parts, 30)) == interval
    torch.manual_seed(5)
    random_state = torch.get_rng_state()
    assert bootstrap_interval(parts) == interval
    assert torch.equal(torch.get_rng_state(), random_state)
    monkeypatch.setattr(bootstrap, "BLOCK", 30 * 100)
    low, high = bootstrap_interval(parts)
    assert (low, high) == pytest.approx(interval, rel=0.02)


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


# Gains


def test_a_gain_is_what_the_limited_curve_pays_more_for_each_token():
    full = LossCurve((torch.tensor([4.0, 1.0, 2.0]), torch.tensor([3.0])), documents=(5, 7))
    limited = LossCurve((torch.tensor([4.0, 3.0, 1.5]), torch.tensor([3.5])), documents=(5, 7))
    gain = full.gain_over(limited)
    assert [nll.tolist() for nll in gain.nll] == [[0.0, 2.0, -0.5], [0.5]]
    assert gain.documents == (5, 7)
    assert gain.between(2, 4).mean == 0.75


# Refusals


CURVE = LossCurve((torch.ones(9), torch.ones(4)))
SWAPPED = LossCurve((torch.ones(4), torch.ones(9)))
OF_ONE_DOCUMENT = LossCurve(CURVE.nll, documents=(0, 0))
INFINITE = LossCurve((torch.tensor([1.0, math.inf]),))


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: LossCurve(CURVE.nll, documents=(0,)), "2 rows need the documents of as many, got 1"),
        (lambda: CURVE.at(11), "no document has 11 tokens: the longest has 10"),
        (lambda: CURVE.at(1), "length must be at least 2"),
        (lambda: CURVE.between(10, 20), r"no document has a scored token in \[10, 20\): the longest has"),
        (lambda: CURVE.between(0, 1), r"no document has a scored token in \[0, 1\)"),
        (lambda: CURVE.between(5, 5), "need 0 <= begin < end, got begin 5, end 5"),
        (
            lambda: difference(CURVE.between(0, 9), SWAPPED.between(0, 9)),
            "cannot compare 12 tokens of 2 documents with 12 of 2",
        ),
        (lambda: difference(Perplexity(3.0, 2), Perplexity(3.0, 4)), "cannot compare"),
        (lambda: CURVE.gain_over(SWAPPED), "cannot subtract .* not the same tokens"),
        (lambda: CURVE.gain_over(OF_ONE_DOCUMENT), "cannot subtract .* not the same tokens"),
        (lambda: INFINITE.gain_over(INFINITE), "a gain is not finite"),
    ],
)
def test_what_a_curve_cannot_say_is_an_error(read, message):
    with pytest.raises(RopepatchError, match=message):
        read()
