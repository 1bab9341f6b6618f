"""Loss curves of known losses: their means, differences and gains."""

import math

import pytest
import torch

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.curves import LossCurve
from ropepatch.evaluation.intervals import Mean, difference

# Perplexities of a curve


def test_a_perplexity_holds_the_sums_of_its_documents():
    curve = LossCurve((torch.tensor([1.0, 2.0, 4.0]), torch.tensor([8.0]), torch.tensor([16.0, 32.0])))
    assert curve.at(3).loss == Mean(((3.0, 2), (48.0, 2)))
    assert curve.between(2, 4).loss == Mean(((6.0, 2), (32.0, 1)))
    assert curve.at(3).num_documents == 2
    assert curve.at(3).interval == (-math.inf, math.inf)
    assert curve.between(0, 9).interval == curve.between(0, 9).loss.interval()
    assert (curve.at(3).mean, curve.at(3).value) == (51 / 4, pytest.approx(math.exp(51 / 4)))


def test_rows_of_one_document_are_one_cluster():
    rows = (torch.tensor([1.0, 1.0]), torch.tensor([5.0, 5.0]), torch.tensor([3.0]))
    read = LossCurve(rows, documents=(4, 9, 4)).between(0, 9)
    assert read.loss.clusters == ((5.0, 3), (10.0, 2))
    assert (read.mean, read.num_tokens, read.num_documents) == (3.0, 5, 2)
    windows = LossCurve(rows, documents=(0, 1, 2)).of_documents((4, 9, 4))
    assert windows.between(0, 9) == read


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
            lambda: difference(CURVE.between(0, 9).loss, SWAPPED.between(0, 9).loss),
            "not the same in each",
        ),
        (lambda: CURVE.gain_over(SWAPPED), "cannot subtract .* not the same tokens"),
        (lambda: CURVE.gain_over(OF_ONE_DOCUMENT), "cannot subtract .* not the same tokens"),
        (lambda: INFINITE.gain_over(INFINITE), "a gain is not finite"),
    ],
)
def test_what_a_curve_cannot_say_is_an_error(read, message):
    with pytest.raises(RopepatchError, match=message):
        read()
