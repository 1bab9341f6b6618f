"""What is measured of position encodings is what theory says of them."""

import pytest
from encoding_properties import MEANINGS, identical_tokens_agree, parameters_of, properties_of

from ropepatch.encodings import ENCODINGS

pytestmark = pytest.mark.sweep

WORDS = {"yes": True, "no": False, "-": None}
# By hand, from the formulas; not from a run.
THEORY = {
    #                  uniq  free  line  norm  prod  rel   decay beyon grid  order
    # (p+k)u = M_k (p u) for no one matrix: a shift is affine. Later keys have longer vectors, which a query
    # that reads backwards sees as decay.
    "integer":        "yes   yes   no    no    no    no    yes   yes   yes   yes",
    "normalised":     "yes   no    no    no    no    no    yes   yes   yes   yes",
    # Near numbers share their high digits, so products fall in the mean, though not from 63 to 64.
    "binary":         "yes   yes   no    no    no    no    yes   yes   yes   yes",
    # Its products depend on the distance; scores do not, for content is multiplied by positions, too.
    "sinusoidal":     "yes   yes   yes   no    yes   no    yes   yes   yes   yes",
    "learned":        "yes   yes   no    no    no    no    no    no    yes   yes",
    # All keys from k tokens on share a vector. In a decoder it knows no keys ahead, so an axis of a grid, on
    # which the other tokens are on both sides, is lost on it; as on the next, t5 and alibi.
    "shaw":           "no    yes   -     -     -     yes   no    yes   no    yes",
    "transformer-xl": "yes   yes   -     -     -     yes   no    yes   no    yes",
    # Here the sinusoids of the differences are those of keys, turned by queries: a token carries one. Of
    # contents of either sign the mean score with it is 0 at all distances.
    "nezha":          "yes   yes   yes   no    -     yes   no    yes   yes   yes",
    # From 16 on several distances share a bucket.
    "t5":             "no    yes   -     -     -     yes   no    yes   no    yes",
    "alibi":          "yes   yes   -     -     -     yes   yes   yes   no    yes",
    "rope":           "yes   yes   yes   yes   -     yes   yes   yes   yes   yes",
    # Keys grow with their positions, queries shrink: linear still, and by the distance still.
    "xpos":           "yes   yes   yes   no    -     yes   yes   yes   yes   yes",
    "p-rope":         "yes   yes   yes   yes   -     yes   yes   yes   yes   yes",
    "partial":        "yes   yes   yes   yes   -     yes   yes   yes   yes   yes",
    # One token on is one step along the line, or back to its start and a line down: no one matrix, no one
    # score. Each axis by itself has both.
    "axial":          "yes   yes   no    yes   -     no    yes   yes   yes   yes",
    # The same scores everywhere depend on nothing, so on the distance only.
    "nope":           "no    yes   -     -     -     yes   no    yes   no    no",
    # What the other heads and layers turn is enough.
    "nope-heads":     "yes   yes   yes   yes   -     yes   yes   yes   yes   yes",
    "nope-layers":    "yes   yes   yes   yes   -     yes   yes   yes   yes   yes",
    "drope":          "no    yes   -     -     -     yes   no    yes   no    no",
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODINGS)
def test_what_is_measured_is_what_theory_says(name):
    if name not in THEORY:
        pytest.fail(f"say in THEORY of this file which properties {name!r} has by its formula")
    expected = dict(zip(MEANINGS, (WORDS[word] for word in THEORY[name].split()), strict=True))
    found = properties_of(ENCODINGS[name])
    assert {title: one.holds for title, one in found.items()} == expected
    for title, one in found.items():  # far from the tolerance on either side
        if title in ("length_free", "linear", "norm_kept", "products", "relative"):
            assert one.holds is None or one.number < 1e-5 or one.number > 1e-2, title
        elif title in ("unique", "grid", "order"):
            assert one.number == 0 or one.number > 5e-3, title


def test_without_positions_and_mask_identical_tokens_get_identical_outputs():
    agreeing = {name for name, kind in ENCODINGS.items() if identical_tokens_agree(kind)}
    assert agreeing == {"nope", "drope"}
    assert not identical_tokens_agree(ENCODINGS["nope"], causal=True)


@pytest.mark.parametrize(
    ("name", "count"), {"learned": 128 * 64, "shaw": 4 * 2 * 17 * 16, "t5": 32 * 4}.items()
)
def test_trained_numbers_are_counted(name, count):
    assert parameters_of(ENCODINGS[name]) == count
