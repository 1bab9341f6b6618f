import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from passkey_cases import DETERMINISTIC, TOKENIZERS, Known, copied

from ropepatch.data.templates import NAMED
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.passkey import Passkey, PasskeyGrid, passkey

# Counts and intervals


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (1, 1, 0.2065, 1.0),
        (81, 263, 0.2553, 0.3662),  # Newcombe, Stat. Med. 17 (1998), table I
    ],
)
def test_the_interval_is_wilsons(correct, n, low, high):
    assert Passkey(correct, n).interval == pytest.approx((low, high), abs=5e-5)


@DETERMINISTIC
@given(n=st.integers(1, 10**6), share=st.floats(0, 1))
def test_the_interval_holds_the_accuracy_and_lies_within_0_to_1(n, share):
    read = Passkey(round(share * n), n)
    low, high = read.interval
    assert 0 <= low <= read.accuracy <= high <= 1
    assert read.accuracy == read.correct / n
    assert low < high


TABLE = PasskeyGrid(
    {
        (16384, 0.5): Passkey(0, 20),
        (256, 1.0): Passkey(20, 20),
        (256, 0.0): Passkey(7, 20),
        (256, 0.5): Passkey(12, 20),
        (16384, 0.0): Passkey(1, 20),
        (16384, 1.0): Passkey(3, 20),
    }
)


def test_a_length_that_was_not_measured_is_an_error():
    with pytest.raises(RopepatchError, match="no passkey was asked for at 512 tokens") as refusal:
        TABLE.at(512)
    assert refusal.value.hint == "measured: [256, 16384]"


def test_a_grid_prints_as_a_table_with_the_interval_of_each_length():
    assert str(TABLE).splitlines() == [
        "tokens  depth 0.00  depth 0.50  depth 1.00    all     (95 %)",
        "   256        7/20       12/20       20/20  39/60  (52–76 %)",
        " 16384        1/20        0/20        3/20   4/60   (3–16 %)",
    ]


def grid_of(correct: dict[int, int]) -> PasskeyGrid:
    """Of two depths; a thousand keys per length."""
    return PasskeyGrid(
        {
            (length, depth): Passkey(min(500, right) if depth else max(0, right - 500), 500)
            for length, right in correct.items()
            for depth in (0.0, 1.0)
        }
    )


@pytest.mark.parametrize(
    ("correct", "threshold", "expected"),
    [
        ({128: 1000, 256: 856, 512: 855}, {}, 256),
        ({128: 100, 256: 900, 512: 100}, {}, 256),  # RULER's rule does not ask for the shorter lengths
        ({512: 900, 128: 100}, {}, 512),
        ({128: 855, 256: 100}, {}, None),
        ({128: 1000, 256: 900, 512: 800}, {"threshold": 0.8}, 512),
    ],
)
def test_the_effective_length_is_the_largest_with_the_accuracy(correct, threshold, expected):
    assert grid_of(correct).effective_length(**threshold) == expected


@pytest.mark.parametrize("threshold", [0, -0.1, 1.01, 85.6, math.nan])
def test_a_threshold_that_is_no_share_is_refused(threshold):
    with pytest.raises(RopepatchError, match="the threshold must be above 0 and at most 1, got") as refusal:
        TABLE.effective_length(threshold)
    assert refusal.value.hint


def test_a_grid_tells_what_was_asked():
    tokenizer = TOKENIZERS["bundled"]()
    grid = passkey(
        Known(copied), tokenizer, lengths=[400], depths=[0.5], trials=3, seed=7, distractors=2, queries=2
    )
    assert (grid.seed, grid.trials, grid.distractors, grid.queries) == (7, 3, 2, 2)
    assert grid.template == NAMED
    assert grid.at(400).n == 6
