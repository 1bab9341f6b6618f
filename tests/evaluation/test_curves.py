"""Loss curves of known losses: their means, differences and gains."""

import pytest
import torch

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.perplexity import LossCurve

# Perplexities of a curve


def test_rows_of_one_document_are_one_cluster():
    rows = (torch.tensor([1.0, 1.0]), torch.tensor([5.0, 5.0]), torch.tensor([3.0]))
    read = LossCurve(rows, documents=(4, 9, 4)).between(0, 9)
    assert read.clusters == ((5.0, 3), (10.0, 2))
    assert (read.value, read.weight) == (3.0, 5)
    windows = LossCurve(rows, documents=(0, 1, 2)).of_documents((4, 9, 4))
    assert windows.between(0, 9) == read


# Gains


def test_a_gain_is_the_loss_of_the_limited_curve_minus_that_of_the_full_one():
    full = LossCurve(
        (torch.tensor([4.0, 1.0, 2.0]), torch.tensor([3.0])), documents=(5, 7)
    )
    limited = LossCurve(
        (torch.tensor([4.0, 3.0, 1.5]), torch.tensor([3.5])), documents=(5, 7)
    )
    gain = full.gain_over(limited)
    assert [nll.tolist() for nll in gain.nll] == [[0.0, 2.0, -0.5], [0.5]]
    assert gain.documents == (5, 7)
    assert gain.between(2, 4).value == 0.75


# Refusals


CURVE = LossCurve((torch.ones(9), torch.ones(4)))
SWAPPED = LossCurve((torch.ones(4), torch.ones(9)))
OF_ONE_DOCUMENT = LossCurve(CURVE.nll, documents=(0, 0))


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (
            lambda: LossCurve(CURVE.nll, documents=(0,)),
            "2 rows need the documents of as many, got 1",
        ),
        (lambda: CURVE.at(11), "no document has 11 tokens: the longest has 10"),
        (lambda: CURVE.at(1), "length must be at least 2"),
        (
            lambda: CURVE.between(10, 20),
            r"no document has a scored token in \[10, 20\): the longest has",
        ),
        (lambda: CURVE.between(5, 5), "need 0 <= begin < end, got begin 5, end 5"),
        (lambda: CURVE.gain_over(SWAPPED), "cannot subtract .* not the same tokens"),
        (
            lambda: CURVE.gain_over(OF_ONE_DOCUMENT),
            "cannot subtract .* not the same tokens",
        ),
    ],
)
def test_an_impossible_request_to_a_curve_raises(read, message):
    with pytest.raises(RopepatchError, match=message):
        read()
