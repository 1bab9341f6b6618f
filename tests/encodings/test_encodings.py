"""Every position encoding equals a slow oracle, and transformers where it has the same encoding."""

import encoding_oracle as oracle
import numpy as np
import pytest
import torch
from encoding_oracle import Case, by_formula
from hypothesis import given, settings
from hypothesis import strategies as st
from swaps import apart, cast, logits, put
from tiny_models import tiny_model
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from ropepatch.attention import modeling_position_remapping as modeling
from ropepatch.encodings import ENCODINGS, make_encoding, relative
from ropepatch.encodings.encoding import (
    AttentionInputs,
    EncodingModule,
    ModelShape,
)
from ropepatch.errors import RopepatchError
from ropepatch.scaling.rope import Rope

VARIANTS = [
    *((name, {}) for name in ENCODINGS),
    ("sinusoidal", {"base": 50.0}),
    ("shaw", {"clip": 1}),
    ("t5", {"buckets": 7, "max_distance": 40}),
    ("xpos", {"scale_base": 9.0, "gamma": 1e-3}),
    ("p-rope", {"share": 0.4}),
    ("partial", {"share": 0.4}),
    ("axial", {"grid": (3, 5, 2)}),
    ("nope-heads", {"rotated": 0}),
    ("nope-heads", {"rotated": 1}),
    ("nope-layers", {"every": 1}),
]
POSITIONS = torch.tensor(
    [[3, 4, 5, 9, 10, 31, 32, 40, 47], [17, 19, 20, 21, 40, 41, 42, 43, 44]]
)
IDS = torch.randint(3, 120, (2, 9), generator=torch.Generator().manual_seed(1))
# With a mask, gaps between positions are no boundaries of documents
SEEN = torch.ones_like(IDS)


def check_formula(model, name, parameters, **known):
    """Compare the logits with those of the formula, in which `known` values of a `Case` replace others."""
    with put(model, name, **parameters) as handle:
        got = logits(model, IDS, position_ids=POSITIONS, attention_mask=SEEN)
        shape, encoding = handle.module.shape, handle.encoding
        weights = {
            key: value.detach().double().numpy()
            for key, value in handle.module.named_parameters()
        }
    sizes = shape.heads, shape.key_value_heads, shape.head_dim, shape.hidden_size
    case = Case(encoding.parameters(), weights, 0, *sizes, shape.rope.rope_theta)
    inputs = model.get_input_embeddings()(IDS).detach()
    if name in oracle.TABLES:
        vectors = [
            [oracle.TABLES[name](case, int(p)) for p in row] for row in POSITIONS
        ]
        inputs = inputs + torch.tensor(np.array(vectors)).float()
    with by_formula(model, name, case._replace(**known), POSITIONS):
        expected = logits(model, None, inputs_embeds=inputs, position_ids=POSITIONS)
    assert apart(got, expected) < 1e-4


@pytest.mark.parametrize(("name", "parameters"), VARIANTS, ids=str)
def test_attention_with_each_encoding_equals_its_formula(model, name, parameters):
    check_formula(model, name, parameters)


def test_keys_of_empty_cache_slots_are_finite_in_xpos(model):
    with put(model, "xpos") as handle:
        x = torch.ones(1, 1, 2, handle.module.shape.head_dim)
        here, slots = torch.tensor([[0, 1]]), torch.tensor([[1, 10**6]])
        given = AttentionInputs(x, x, x, here, slots, layer=0, scaling=1.0)
        constants = handle.module.constants
        encoded = handle.encoding.apply(given, handle.module.shape, **constants)
        assert encoded.key.isfinite().all()


@pytest.mark.parametrize(
    "name", ["rope", "xpos", "p-rope", "nope-heads", "nope-layers"]
)
def test_rotary_encodings_keep_the_frequencies_of_a_scaled_rope(name):
    scaled = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    scaled["original_max_position_embeddings"] = 16
    model = tiny_model("llama", rope_parameters=scaled)
    stock = model.model.rotary_emb
    assert stock.attention_scaling > 1.1
    theta = stock.inv_freq.double().numpy()
    check_formula(model, name, {}, theta=theta, a=stock.attention_scaling)


@pytest.mark.parametrize("name", ["shaw", "nezha", "t5", "alibi", "rope", "axial"])
def test_bfloat16_does_not_round_positions(model, name):
    put(cast(model, torch.bfloat16), name)
    near, far = (
        logits(model, IDS, position_ids=POSITIONS + shift, attention_mask=SEEN)
        for shift in (0, 40_000)
    )
    assert apart(near, far) < 0.1 * float(near.abs().max())


# transformers as a second oracle


@given(st.integers(1, 80), st.integers(1, 5000))
@settings(derandomize=True, deadline=None, max_examples=40, database=None)
def test_relative_buckets_equal_those_of_t5(half, more):
    distances = torch.arange(2000)
    for buckets in (2 * half, 2 * half + 1):
        theirs = T5Attention._relative_position_bucket(
            -distances,
            bidirectional=False,
            num_buckets=buckets,
            max_distance=half + more,
        )
        assert torch.equal(relative.buckets_of(distances, buckets, half + more), theirs)


def test_alibi_slopes_equal_blooms():
    for heads in range(1, 33):
        theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
        torch.testing.assert_close(relative.slopes(heads), theirs, rtol=1e-6, atol=0)


# Memory


@pytest.mark.parametrize("name", ["t5", "shaw", "transformer-xl"])
def test_tensors_saved_for_backward_grow_linearly_with_tokens(model, name, monkeypatch):
    monkeypatch.setitem(modeling.SCORES, "cpu", 1 << 12)
    put(model, name)

    def saved(tokens):
        sizes = []

        def note(tensor):
            sizes.append(tensor.numel())
            return tensor

        ids = torch.full((1, tokens), 5)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(ids, use_cache=False, logits_to_keep=1)
        return sum(sizes)

    assert saved(256) <= 2.1 * saved(128)


# Errors


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("sinusoidal", {"base": 1e13}),
        ("t5", {"max_distance": 16}),  # of 32 buckets
        ("partial", {"share": 0.0}),
        ("axial", {"grid": ()}),
    ],
    ids=str,
)
def test_encodings_reject_parameters_outside_their_domain(name, parameters):
    wrong = next(iter(parameters))
    with pytest.raises(RopepatchError, match=rf"{name}: {wrong}\S* must "):
        make_encoding(name, **parameters)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("partial", {"share": 0.1}),
        ("axial", {"grid": (4, 4, 4)}),
        ("nope-heads", {"rotated": 0.1}),
        ("nope-heads", {"rotated": 0.9}),
        ("nope-layers", {"every": 4}),
    ],
    ids=str,
)
def test_encodings_reject_models_of_unsuitable_sizes(name, parameters):
    shape = ModelShape(3, 6, 3, 12, 24, Rope(12, 500.0, 64))
    with pytest.raises(RopepatchError):
        EncodingModule(make_encoding(name, **parameters), shape)


def test_positions_beyond_the_learned_table_raise_an_error(model):
    put(model, "learned", rows=9)
    logits(model, IDS)
    with pytest.raises(RopepatchError, match="learned positions end at 8"):
        logits(model, IDS, position_ids=POSITIONS)
