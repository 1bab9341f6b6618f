"""What is measured of position encodings is what theory says of them, and a planted flaw is seen."""

import math
from dataclasses import replace

import pytest
import torch
from encoding_properties import MEANINGS, IdentityModel, identical_tokens_agree, properties_of
from readme import README, check_block
from transformers import LlamaConfig, LlamaForCausalLM

import ropepatch
from ropepatch.encodings import ENCODINGS
from ropepatch.encodings.absolute import Sinusoidal, sinusoid
from ropepatch.encodings.relative import ALiBi
from ropepatch.encodings.rotary import NoPE, RoPE

pytestmark = pytest.mark.sweep

COLUMNS = [name for name in MEANINGS if name not in ("parameters", "per_token", "per_pair")]
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


def answers(kind):
    return {name: one.holds for name, one in properties_of(kind).findings().items()}


@pytest.mark.parametrize("name", ENCODINGS)
def test_what_is_measured_is_what_theory_says(name):
    if name not in THEORY:
        pytest.fail(f"say in THEORY of this file which properties {name!r} has by its formula")
    expected = dict(zip(COLUMNS, (WORDS[word] for word in THEORY[name].split()), strict=True))
    assert answers(ENCODINGS[name]) == expected


def test_numbers_of_what_holds_and_of_what_does_not_are_far_apart():
    for name, kind in ENCODINGS.items():
        measured = properties_of(kind)
        for title in ("length_free", "linear", "norm_kept", "products", "relative"):
            finding = getattr(measured, title)
            assert finding.holds is None or (finding.number < 1e-5) or (finding.number > 1e-2), (name, title)
        for title in ("unique", "grid", "order"):
            number = getattr(measured, title).number
            assert number == 0 or number > 5e-3, (name, title)


# Counts


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("learned", 128 * 64),
        ("shaw", 4 * 2 * 17 * 16),
        ("transformer-xl", 4 * 4 * 16 * 64 + 2 * 4 * 16),
        ("t5", 32 * 4),
        ("rope", 0),
    ],
)
def test_trained_numbers_are_counted(name, count):
    assert properties_of(ENCODINGS[name]).parameters == count


@pytest.mark.parametrize(
    ("name", "per_token", "per_pair"),
    [
        # queries and keys: two products and a sum for each of 64 channels, a sign for half of them; 8 angles,
        # their cos and sin, each times the attention factor
        ("rope", 4 * 2 * (3 * 64 + 64 // 2 + 5 * 8), 0),
        ("nope-layers", 3 * 2 * (3 * 64 + 64 // 2 + 5 * 8), 0),
        # 16 more channels in the products with keys and with values, in 4 layers of 4 heads
        ("nezha", None, 4 * 4 * (2 * 16 + 2 * 16)),
        ("alibi", 4 * 4, 4 * 4),  # a product for every distance, and a sum
        ("t5", 0, 4 * 4),
        ("shaw", None, 4 * 4 * 2),  # a sum of scores and one of weights
        ("transformer-xl", None, 4 * 4 * (2 * 16 + 1) + 4 * 4),  # a product of 16 channels, scaled, and a sum
        ("learned", 64, 0),  # once, not in every layer
        ("sinusoidal", 64 + 32 + 64 + 64, 0),  # added, of 32 angles, sin and cos, each divided by sqrt(C)
        ("nope", 0, 0),
    ],
)
def test_operations_are_those_counted_by_hand(name, per_token, per_pair):
    measured = properties_of(ENCODINGS[name])
    assert measured.per_pair == per_pair
    assert per_token is None or measured.per_token == per_token


# Planted flaws


class Shifted(Sinusoidal):
    """The cosine is of the position before."""

    def vectors(self, positions, width):
        table = sinusoid(positions, width, self.base)
        table[..., 1::2] = sinusoid(positions - 1, width, self.base)[..., 1::2]
        return table


class ByLength(RoPE):
    """It turns by the share of the text."""

    length: int

    def angles(self, positions, inv_freq):
        return super().angles(100 * positions / self.length, inv_freq)


def turning(change, scale=1.0):
    """A rope whose positions are changed, by a function of the positions and the window."""
    factor = scale

    class Flawed(RoPE):
        def apply(self, inputs, shape, *, inv_freq):
            at = {
                name: change(getattr(inputs, name), shape.window)
                for name in ("query_positions", "key_positions")
            }
            return super().apply(replace(inputs, **at), shape, inv_freq=inv_freq)

        def scale(self, shape):
            return factor

    return Flawed


class Inverted(ALiBi):
    """What is farther scores more."""

    def constants(self, shape):
        return {"slopes": -super().constants(shape)["slopes"]}


ENDING = turning(lambda p, window: torch.where(p < 5 * window, p, torch.nan))


@pytest.mark.parametrize(
    ("flawed", "sound", "changed"),
    [
        (turning(lambda p, window: p + 0.01 * (p > window // 2 + 1)), "rope", {"relative", "linear"}),
        (turning(lambda p, window: p, scale=1.001), "rope", {"norm_kept"}),
        (turning(lambda p, window: p // 2), "rope", {"unique", "grid", "relative", "linear"}),
        (Inverted, "alibi", {"decays"}),
        (Shifted, "sinusoidal", {"products"}),
        (ByLength, "rope", {"length_free"}),
        (ENDING, "rope", {"beyond"}),
    ],
    ids=["drifting", "growing", "coarse", "inverted", "shifted", "by length", "ending"],
)
def test_a_planted_flaw_is_seen_and_nothing_else_changes(flawed, sound, changed):
    before, after = answers(ENCODINGS[sound]), answers(flawed)
    assert {name for name in after if after[name] != before[name]} == changed
    assert not any(after[name] for name in changed)


def test_the_reach_is_said_in_windows_of_1_2_4_and_so_on():
    assert properties_of(ENDING).beyond.number == 4


def test_sinusoidal_vectors_stand_to_contents_as_in_the_paper():
    means = IdentityModel.of(Sinusoidal).mean_scores(queries=1, tokens=40)
    angles = torch.arange(40)[:, None] / 10000 ** (torch.arange(32) / 32)
    # content of variance 1 in each of 16 channels; 32 pairs of sin and cos, shared out among 4 heads
    expected = (16 + angles.cos().sum(-1) / 4) / math.sqrt(16)
    torch.testing.assert_close(means, expected, atol=2e-5, rtol=0)


def test_measuring_leaves_the_generator_as_it_was():
    state = torch.get_rng_state()
    IdentityModel.of(ENCODINGS["learned"])
    assert torch.equal(torch.get_rng_state(), state)


# What it all starts from


def test_without_positions_and_mask_identical_tokens_get_identical_outputs():
    agreeing = {name for name, kind in ENCODINGS.items() if identical_tokens_agree(kind)}
    assert agreeing == {"nope", "drope"}


def test_a_causal_mask_is_enough_to_tell_them_apart():
    assert not identical_tokens_agree(NoPE, causal=True)


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_swapped_model_without_a_mask_agrees_on_identical_tokens_only_without_positions(name):
    torch.manual_seed(0)
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 32)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0))
    parameters = {"normalised": {"length": 9}, "nope-layers": {"every": 2}}.get(name, {})
    ids = torch.tensor([[7, 3, 7, 9, 3, 7, 1, 2, 9]])
    with ropepatch.swap(model, name, **parameters), torch.no_grad():
        logits = model(ids, attention_mask=torch.ones(1, 1, 9, 9, dtype=torch.bool)).logits[0]
    agree = all(torch.allclose(logits[0], logits[place], atol=1e-6) for place in (2, 5))
    assert agree == (name in ("nope", "drope"))
    assert not torch.allclose(logits[0], logits[1], atol=1e-6)


# The page


def test_the_table_of_the_page_is_what_is_measured():
    page = README.parent / "eval" / "studies" / "encodings" / "encodings.md"
    titles = [name.replace("_", " ") for name in MEANINGS]
    rows = [f"| encoding | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name, kind in ENCODINGS.items():
        measured = properties_of(kind)
        cells = [{True: "yes", False: "no", None: "–"}[one.holds] for one in measured.findings().values()]
        counts = [f"{getattr(measured, count):,}" for count in ("parameters", "per_token", "per_pair")]
        rows.append(f"| `{name}` | {' | '.join(cells + counts)} |")
    check_block("properties", "\n".join(rows), page)
