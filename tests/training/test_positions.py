import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropepatch.errors import RopepatchError
from ropepatch.settings import Settings
from ropepatch.training.positions import (
    CREAM,
    Mixture,
    MixturePart,
    PoSE,
    Positions,
    PositionSampling,
    RandPos,
    TrueLength,
    row_positions,
)

EVERY = [
    TrueLength(),
    PoSE(),
    PoSE(chunks=1),
    PoSE(chunks=5),
    RandPos(),
    CREAM(),
    Mixture(parts=(MixturePart(sampling=PoSE(chunks=3), weight=3), MixturePart(sampling=TrueLength()))),
]


class Branch(random.Random):
    """Takes one branch of every draw, in the order of `path`, and notes its probability."""

    def __init__(self, path: list[int], gauss: float, coin: float) -> None:
        super().__init__(0)
        self.path, self.taken, self.width = path, [], []
        self.probability, self.x, self.coin = 1.0, gauss, coin

    def randint(self, low: int, high: int) -> int:
        assert low <= high
        choice = self.path[len(self.taken)] if len(self.taken) < len(self.path) else 0
        self.taken.append(choice)
        self.width.append(high - low + 1)
        self.probability /= high - low + 1
        return low + choice

    def gauss(self, mu: float = 0, sigma: float = 1) -> float:
        return self.x

    def random(self) -> float:
        return self.coin


def outcomes(
    sample: Callable[[random.Random], torch.Tensor], gauss: float = 0, coin: float = 0
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Everything that a sampling can give, with its probability."""
    path: list[int] | None = []
    while path is not None:
        draw = Branch(path, gauss, coin)
        yield tuple(sample(draw).tolist()), draw.probability
        path = draw.taken
        while path and path[-1] + 1 == draw.width[len(path) - 1]:
            path.pop()
        path = [*path[:-1], path[-1] + 1] if path else None


def distribution(sampling: PositionSampling, window: int, target: int) -> dict[tuple[int, ...], float]:
    shares: Counter[tuple[int, ...]] = Counter()
    for positions, probability in outcomes(lambda draw: sampling.sample(window, target, draw)):
        shares[positions] += probability
    return dict(shares)


# Every sampling


@pytest.mark.parametrize("sampling", EVERY, ids=repr)
@given(window=st.integers(1, 200), factor=st.floats(0.2, 40), seed=st.integers(0, 2**32))
def test_positions_ascend_strictly_below_the_target(sampling, window, factor, seed):
    target = max(1, round(factor * window))
    positions = sampling.sample(window, target, random.Random(seed))
    assert positions.dtype == torch.int64
    assert positions.shape == (window,)
    assert (positions.diff() >= 1).all()
    assert positions.min() >= 0
    assert positions.max() < max(target, window)


@pytest.mark.parametrize("sampling", EVERY, ids=repr)
@pytest.mark.parametrize(("window", "target"), [(8, 8), (9, 8)])
def test_a_window_that_reaches_the_target_stands_where_it_stands(sampling, window, target):
    for seed in range(20):
        positions = sampling.sample(window, target, random.Random(seed))
        assert torch.equal(positions, torch.arange(window))


# PoSE


def paper(chunks: int, window: int, target: int) -> dict[tuple[int, ...], float]:
    """The samplers of figure 6, where the lengths and the skips are drawn first and the positions follow."""
    shares: Counter[tuple[int, ...]] = Counter()
    most = target - window
    if chunks == 2:
        for l0 in range(1, window):
            for u1 in range(most + 1):
                row = [*range(l0), *range(u1 + l0, u1 + window)]
                shares[tuple(row)] += 1 / (window - 1) / (most + 1)
    else:
        for l0 in range(1, window - 1):
            for l1 in range(1, window - l0):
                for u1 in range(most + 1):
                    for u2 in range(u1, most + 1):
                        row = [*range(l0), *range(u1 + l0, u1 + l0 + l1), *range(u2 + l0 + l1, u2 + window)]
                        draws = (window - 2) * (window - l0 - 1) * (most + 1) * (most - u1 + 1)
                        shares[tuple(row)] += 1 / draws
    return dict(shares)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("window", "target"), [(3, 4), (4, 9), (6, 12)])
def test_pose_draws_lengths_and_skips_as_the_paper_does(chunks, window, target):
    assert distribution(PoSE(chunks=chunks), window, target) == pytest.approx(paper(chunks, window, target))


# RandPos


def test_randpos_draws_every_set_of_positions_alike():
    draw = random.Random(0)
    counts = Counter(tuple(RandPos().sample(2, 5, draw).tolist()) for _ in range(10_000))
    assert set(counts) == set(combinations(range(5), 2))
    assert all(900 < count < 1100 for count in counts.values())


# CREAM


def released(window: int, factor: int, x: float, coin: bool) -> set[tuple[int, ...]]:
    """The rows of one example in the released code, for a whole factor up to a twelfth of the window."""
    ends = 4 * factor if coin else window // 3
    middle = window - 2 * ends
    alpha = math.floor(min(max(x, 2), 2 * factor)) / 2
    rows = set()
    for end in range(int(ends + (middle - 1) * alpha), int(alpha * window - ends - 1) + 1):
        tail = range(factor * window - ends, factor * window)
        rows.add((*range(ends), *range(end - (middle - 1), end + 1), *tail))
    return rows


@pytest.mark.parametrize("coin", [True, False])
@pytest.mark.parametrize("x", [-3.0, 2.99, 3.0, 4.5, 8.0, 30.0])
@pytest.mark.parametrize(("window", "factor"), [(48, 4), (53, 4), (60, 2), (64, 3)])
def test_cream_gives_the_rows_of_the_released_code(window, factor, x, coin):
    drawn = outcomes(
        lambda draw: CREAM().sample(window, factor * window, draw), gauss=x, coin=0.49 if coin else 0.5
    )
    shares = dict(drawn)
    assert shares.keys() == released(window, factor, x, coin)
    assert min(shares.values()) == pytest.approx(max(shares.values()))


@pytest.mark.parametrize(("window", "target"), [(30, 90), (30, 81), (31, 43), (30, 36), (12, 13), (7, 200)])
def test_cream_leaves_no_position_and_no_distance_out(window, target):
    rows = {
        row
        for coin in (0, 0.9)
        for twice in range(1, 2 * target // window + 2)
        for row, _ in outcomes(lambda draw: CREAM().sample(window, target, draw), gauss=twice, coin=coin)
    }
    assert {position for row in rows for position in row} == set(range(target))
    distances = {later - earlier for row in rows for earlier, later in combinations(row, 2)}
    assert distances == set(range(1, target))


@pytest.mark.parametrize(("target", "factor"), [(720, 8), (135, 1.5)])
def test_cream_draws_from_a_normal_distribution_about_the_middle(target, factor, monkeypatch):
    seen, draw = [], random.Random(0)
    monkeypatch.setattr(draw, "gauss", lambda mu, sigma: seen.append((mu, sigma)) or mu)
    CREAM().sample(90, target, draw)
    assert seen == [(1 + factor, 3)]


# Rows


@pytest.mark.parametrize("sampling", EVERY, ids=repr)
def test_every_segment_of_a_row_is_sampled_for_itself(sampling):
    lengths, draw = [5, 1, 30], random.Random(4)
    row = row_positions(sampling, lengths, 200, draw)
    again = random.Random(4)
    chosen = sampling.for_row(again)
    expected = torch.cat([chosen.sample(length, 200, again) for length in lengths])
    assert torch.equal(row, expected)


# Mixtures


def test_a_mixture_draws_its_parts_by_weight():
    draw = random.Random(0)
    mixed = Mixture(parts=(MixturePart(sampling=TrueLength(), weight=3), MixturePart(sampling=RandPos())))
    drawn = Counter(mixed.sample(20, 10_000, draw)[-1].item() == 19 for _ in range(4000))
    assert 2850 < drawn[True] < 3150


# Reading


class Training(Settings):
    positions: Positions


def read_positions(content: Any) -> PositionSampling:
    return Training.model_validate({"positions": content}).positions


@pytest.mark.parametrize("sampling", EVERY, ids=repr)
def test_what_a_sampling_writes_reads_back_as_an_equal_one(sampling):
    content = json.loads(json.dumps(sampling.model_dump(mode="json")))
    assert read_positions(content) == sampling
    assert hash(read_positions(content)) == hash(sampling)


def parts(*content: Any) -> dict[str, Any]:
    return {"name": "mixture", "parts": list(content)}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("poze", "positions must be one of true-length, pose, randpos, cream, mixture, got 'poze'"),
        ({"chunks": 2}, "positions must be a mapping that says which of several it is, got {'chunks': 2}"),
        (parts("cream", {"name": "pose", "chunks": 0}), "positions.parts[1].chunks must be a whole number"),
        (
            parts(parts("true-length")),
            "positions.parts[0] must be one of true-length, pose, randpos, cream, got 'mixture'",
        ),
    ],
)
def test_what_is_no_sampling_is_refused(content, said):
    with pytest.raises(RopepatchError, match=re.escape(said)):
        read_positions(content)
