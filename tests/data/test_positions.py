import random
import re
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropepatch.data.positions import PoSE, Positions, TrueLength
from ropepatch.errors import RopepatchError
from ropepatch.settings import Settings

EVERY = [TrueLength(), PoSE(), PoSE(chunks=1), PoSE(chunks=5)]


@pytest.mark.parametrize("sampling", EVERY, ids=repr)
@given(
    window=st.integers(1, 200), factor=st.floats(0.2, 40), seed=st.integers(0, 2**32)
)
def test_sampled_positions_ascend_and_stay_below_the_target(
    sampling, window, factor, seed
):
    target = max(1, round(factor * window))
    positions = sampling.sample(window, target, random.Random(seed))
    assert (positions.dtype, positions.shape) == (torch.int64, (window,))
    assert (positions.diff() >= 1).all()
    assert 0 <= positions.min() <= positions.max() < max(target, window)
    if window >= target or sampling.name == "true-length" or sampling.chunks == 1:
        assert torch.equal(positions, torch.arange(window))


class Branch(random.Random):
    """Takes one branch of every draw, in the order of `path`, and records its probability."""

    def __init__(self, path):
        super().__init__(0)
        self.path, self.taken, self.width, self.probability = path, [], [], 1.0

    def randint(self, low, high):
        choice = self.path[len(self.taken)] if len(self.taken) < len(self.path) else 0
        self.taken.append(choice)
        self.width.append(high - low + 1)
        self.probability /= high - low + 1
        return low + choice


def distribution(sampling, window, target):
    """All results of a sampling, with their probabilities."""
    shares = Counter()
    path = []
    while path is not None:
        draw = Branch(path)
        shares[tuple(sampling.sample(window, target, draw).tolist())] += (
            draw.probability
        )
        path = draw.taken
        while path and path[-1] + 1 == draw.width[len(path) - 1]:
            path.pop()
        path = [*path[:-1], path[-1] + 1] if path else None
    return shares


def paper(chunks, window, target):
    """The samplers of figure 6 of the paper, which draw lengths and skips first."""
    shares = Counter()
    most = target - window
    for l0 in range(1, window + 2 - chunks):
        for u1 in range(most + 1):
            if chunks == 2:
                row = [*range(l0), *range(u1 + l0, u1 + window)]
                shares[tuple(row)] += 1 / (window - 1) / (most + 1)
                continue
            for l1 in range(1, window - l0):
                for u2 in range(u1, most + 1):
                    row = [
                        *range(l0),
                        *range(u1 + l0, u1 + l0 + l1),
                        *range(u2 + l0 + l1, u2 + window),
                    ]
                    draws = (
                        (window - 2) * (window - l0 - 1) * (most + 1) * (most - u1 + 1)
                    )
                    shares[tuple(row)] += 1 / draws
    return shares


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("window", "target"), [(3, 4), (4, 9), (6, 12)])
def test_pose_positions_follow_the_distribution_of_the_paper(chunks, window, target):
    assert distribution(PoSE(chunks=chunks), window, target) == pytest.approx(
        paper(chunks, window, target)
    )


class Training(Settings):
    positions: Positions


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("poze", "positions"),
        ({"chunks": 2}, "positions"),
        (
            {"name": "pose", "chunks": 0},
            "positions.chunks must be greater than 0, got 0",
        ),
    ],
)
def test_invalid_position_samplings_are_rejected(content, message):
    with pytest.raises(RopepatchError, match=re.escape(message)):
        Training.model_validate({"positions": content})
