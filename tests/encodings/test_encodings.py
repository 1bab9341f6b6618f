"""Every position encoding equals a slow oracle, and transformers where it has the same encoding."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import encoding_oracle as oracle
import numpy as np
import pytest
import torch
from encoding_oracle import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from ropepatch.attention import modeling_position_remapping as modeling
from ropepatch.attention.interchange import OTHER_SCORES, POSITIONS_SLOT
from ropepatch.encodings import ENCODINGS, make_encoding, relative
from ropepatch.encodings.attention import attend
from ropepatch.encodings.encoding import (
    AttentionInputs,
    Encoding,
    EncodingModule,
    ModelShape,
)
from ropepatch.encodings.swapping import SwappedPositions
from ropepatch.errors import RopepatchError
from ropepatch.model.config import Config
from ropepatch.scaling.rope import Rope

LAYERS, HEADS, HEAD_DIM, HIDDEN, BASE, LENGTH = 3, 6, 12, 24, 500.0, 64
ROWS, TOKENS = 2, 9
FEW = ROWS * HEADS * TOKENS * 2  # the number of scores of two queries

# Names of encodings: with required parameters, and some with other parameters
NEEDED: dict[str, dict[str, Any]] = {
    "normalised": {"length": 70},
    "nope-layers": {"every": 3},
}
SHARES = {"p-rope": (0.4, 0.0), "partial": (0.4, 1.0)}
OTHERS: list[tuple[str, dict[str, Any]]] = [
    *(("sinusoidal", {"base": 50.0}), ("learned", {"rows": 90}), ("shaw", {"clip": 3})),
    *(
        ("t5", {"buckets": 7, "max_distance": 40}),
        ("xpos", {"scale_base": 9.0, "gamma": 0.2}),
    ),
    *((name, {"share": share}) for name, shares in SHARES.items() for share in shares),
    *(("axial", {"grid": grid}) for grid in ((4,), (3, 5))),
    *(
        ("nope-heads", {"rotated": 0.3}),
        ("nope-layers", {"every": 2}),
        ("drope", {"temperature": 1.7}),
    ),
]
ENDS: list[tuple[str, dict[str, Any]]] = [  # parameters at the limits of their domains
    *(
        ("normalised", {"length": 2}),
        ("shaw", {"clip": 1}),
        ("t5", {"buckets": 2, "max_distance": 2}),
    ),
    *(
        ("xpos", {"gamma": 1e-3}),
        ("p-rope", {"share": 1}),
        ("partial", {"share": 2 / HEAD_DIM}),
    ),
    *(("axial", {"grid": [1]}), ("nope-layers", {"every": 1})),
    *(("nope-heads", {"rotated": rotated}) for rotated in (0, 1)),
]
VARIANTS = [(name, NEEDED.get(name, {})) for name in ENCODINGS] + OTHERS
ABSOLUTE = [name for name, kind in ENCODINGS.items() if kind.family == "absolute"]
ATTENDING = [name for name in ENCODINGS if name not in ABSOLUTE]
DRAWN = settings(derandomize=True, deadline=None, max_examples=12, database=None)


def encoding_of(name: str) -> Encoding:
    return make_encoding(name, **NEEDED.get(name, {}))


# One attention layer of a model


@lru_cache
def model_of(
    key_value_heads: int = HEADS, implementation: str = "sdpa", heads: int = HEADS
) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=HIDDEN,
        intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
    )
    return LlamaForCausalLM._from_config(
        config, attn_implementation=implementation
    ).eval()


class Layer(NamedTuple):
    """An attention module of a swapped model, the module of its encoding, and the case of the oracle."""

    attention: Any
    module: Any
    case: Case

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask=None,
        positions=None,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, H, Q, D], and the weights of eager attention."""
        output, weights = attend(
            self.attention, q, k, v, mask, position_ids=positions, **arguments
        )
        return output.transpose(1, 2), weights


@lru_cache
def shape_of_model(model: LlamaForCausalLM) -> ModelShape:
    return ModelShape.of(Config.of(model))


@contextmanager
def swapped_layer(
    encoding: Encoding, model: LlamaForCausalLM, layer: int = 0
) -> Iterator[Layer]:
    """A layer as `swap` leaves it, but with parameters large enough to change the output."""
    shape, attended = shape_of_model(model), model.model.layers[layer].self_attn
    module = EncodingModule(encoding, shape)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.7)
    weights = {name: as_array(value) for name, value in module.named_parameters()}
    sizes = shape.heads, shape.key_value_heads, shape.head_dim, shape.hidden_size
    case = Case(encoding.parameters(), weights, layer, *sizes, BASE)
    attended.__dict__[POSITIONS_SLOT] = SwappedPositions(
        model.model.rotary_emb, module, model.config
    )
    try:
        yield Layer(attended, module, case)
    finally:
        del attended.__dict__[POSITIONS_SLOT]


def as_array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy().copy()


def drawn(
    key_value_heads: int,
    queries: int,
    keys: int,
    rows: int = ROWS,
    seed: int = 0,
    heads: int = HEADS,
):
    """Queries, keys and values."""
    draw = torch.Generator().manual_seed(seed)
    sizes = ((heads, queries), (key_value_heads, keys), (key_value_heads, keys))
    return [torch.randn(rows, *size, HEAD_DIM, generator=draw) for size in sizes]


# The oracle


class Call(NamedTuple):
    """One call: query positions [B or 1, Q], key positions [B, T], visible pairs [B, Q, T]."""

    key_value_heads: int
    layer: int
    queries: Tensor
    keys: Tensor
    visible: Tensor
    needs_mask: bool = False


def causal(queries: int, keys: int, rows: int = ROWS) -> Tensor:
    return torch.ones(rows, queries, keys, dtype=torch.bool).tril(keys - queries)


CONSECUTIVE = torch.arange(TOKENS)[None]
WITH_GAPS = torch.tensor(
    [[3, 4, 5, 9, 10, 31, 32, 50, 63], [17, 19, 20, 21, 40, 41, 55, 56, 57]]
)
PADDED, STATIC = (
    causal(3, TOKENS),
    torch.cat((causal(3, TOKENS - 2), torch.zeros(ROWS, 3, 2).bool()), -1),
)
PADDED[1, :, :2] = False
RIGHT = causal(
    TOKENS, TOKENS
)  # the last two tokens of the second row are padding, at position 1
RIGHT[1, 7:] = torch.eye(TOKENS, dtype=torch.bool)[7:]
RIGHT_POSITIONS = torch.stack(
    (CONSECUTIVE[0], CONSECUTIVE[0].where(CONSECUTIVE[0] < 7, 1))
)
CALLS = {
    "consecutive": Call(
        HEADS, 0, CONSECUTIVE, CONSECUTIVE.repeat(ROWS, 1), causal(TOKENS, TOKENS)
    ),
    "with gaps": Call(3, 1, WITH_GAPS, WITH_GAPS, causal(TOKENS, TOKENS)),
    "right padding": Call(3, 1, RIGHT_POSITIONS, RIGHT_POSITIONS, RIGHT, True),
    "one cached step": Call(
        3,
        2,
        torch.tensor([[8], [40]]),
        torch.cat((CONSECUTIVE, CONSECUTIVE + 32)),
        causal(1, TOKENS),
    ),
    "three cached steps, left padding": Call(
        3,
        2,
        torch.tensor([[6, 7, 8], [4, 5, 6]]),
        torch.cat((CONSECUTIVE, CONSECUTIVE - 2)),
        PADDED,
        True,
    ),
    "static cache": Call(
        2,
        0,
        torch.tensor([[4, 5, 6], [14, 15, 16]]),
        torch.cat((CONSECUTIVE, CONSECUTIVE + 10)),
        STATIC,
        True,
    ),
}


def expected(
    name: str, case: Case, call: Call, inputs: list[Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    positions = call.queries.expand(ROWS, -1)
    return oracle.attention(
        name, case, *map(as_array, inputs), positions, call.keys, call.visible
    )


def assert_close(got: Tensor, wanted: Any, atol: float = 1e-5, what: str = "") -> None:
    wanted = torch.as_tensor(wanted)
    assert got.shape == wanted.shape
    difference = (got.double() - wanted.double()).abs().max().item()
    assert difference <= atol, f"{what}: off by {difference:.2g}"


@pytest.mark.parametrize(
    ("name", "parameters", "situation"),
    [
        (name, NEEDED.get(name, {}), one)
        for name in ENCODINGS
        for one in CALLS
        if one == "consecutive" or name not in ABSOLUTE
    ]
    + [(*other, "with gaps") for other in OTHERS + ENDS if other[0] not in ABSOLUTE],
    ids=lambda value: str(value or ""),
)
def test_attention_with_each_encoding_equals_its_formula(
    name, parameters, situation, monkeypatch
):
    """With and without a mask, in one block and in several, for sdpa and for eager and its weights."""
    call = CALLS[situation]
    inputs = drawn(call.key_value_heads, call.visible.shape[1], TOKENS)
    drawn_mask = call.visible[:, None]
    added = torch.zeros(drawn_mask.shape).masked_fill(
        ~drawn_mask, torch.finfo(torch.float32).min
    )
    masks = {"boolean": drawn_mask, "added": added} | (
        {} if call.needs_mask else {"none": None}
    )
    wanted = None
    for implementation in ("sdpa", "eager"):
        model = model_of(call.key_value_heads, implementation)
        with (
            swapped_layer(
                make_encoding(name, **parameters), model, call.layer
            ) as layer,
            torch.no_grad(),
        ):
            wanted = wanted or expected(name, layer.case, call, inputs)
            for scores in (modeling.SCORES["cpu"], FEW):
                monkeypatch.setitem(modeling.SCORES, "cpu", scores)
                for title, mask in masks.items():
                    way = f"{implementation}, {scores} scores at a time, mask {title}"
                    output, weights = layer.attend(*inputs, mask, call.queries)
                    assert_close(output, wanted[0], what=way)
                    if implementation == "eager":
                        assert_close(weights, wanted[1], what=f"weights, {way}")
        monkeypatch.undo()


@pytest.mark.parametrize("shift", [0, 192])
@pytest.mark.parametrize(
    ("name", "parameters"), [v for v in VARIANTS + ENDS if v[0] in ABSOLUTE], ids=str
)
def test_each_absolute_encoding_equals_its_formula(name, parameters, shift):
    positions = WITH_GAPS + (0 if name == "learned" else shift)
    with (
        swapped_layer(make_encoding(name, **parameters), model_of()) as layer,
        torch.no_grad(),
    ):
        got = layer.module(positions)
        wanted = [
            [oracle.TABLES[name](layer.case, int(p)) for p in row] for row in positions
        ]
    assert got.dtype == torch.float32
    assert_close(got, np.array(wanted))


@pytest.mark.parametrize(
    "name", ["rope", "xpos", "p-rope", "nope-heads", "nope-layers"]
)
def test_rotary_encodings_keep_the_frequencies_and_attention_factor_of_scaled_rope(
    name,
):
    scaled = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": LENGTH,
    }
    config = LlamaConfig.from_dict(model_of(3).config.to_dict())
    config.rope_parameters = {**config.rope_parameters, **scaled}
    config.max_position_embeddings = 4 * LENGTH
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    stock = model.model.rotary_emb
    assert stock.attention_scaling > 1.1
    call = CALLS["with gaps"]
    inputs = drawn(3, TOKENS, TOKENS)
    with swapped_layer(encoding_of(name), model, call.layer) as layer, torch.no_grad():
        case = layer.case._replace(
            theta=as_array(stock.inv_freq), a=stock.attention_scaling
        )
        got, _ = layer.attend(*inputs, None, call.queries)
    assert_close(got, expected(name, case, call, inputs)[0])


@pytest.mark.parametrize("name", ATTENDING)
def test_bfloat16_does_not_round_positions(name):
    inputs = [x.bfloat16().float() for x in drawn(3, TOKENS, TOKENS)]
    with swapped_layer(encoding_of(name), model_of(3)) as layer, torch.no_grad():
        wanted, _ = layer.attend(*inputs, None, WITH_GAPS + 40_001)
        layer.module.bfloat16()
        got, _ = layer.attend(*(x.bfloat16() for x in inputs), None, WITH_GAPS + 40_001)
    assert got.dtype == torch.bfloat16
    assert_close(got, wanted, atol=0.06)


# transformers as a second oracle


@given(st.integers(1, 80), st.integers(1, 5000))
@settings(DRAWN, max_examples=40)
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


# Properties


def shape(**changes: int) -> ModelShape:
    sizes = {
        "layers": LAYERS,
        "heads": HEADS,
        "key_value_heads": 3,
        "head_dim": HEAD_DIM,
        "hidden_size": HIDDEN,
    }
    sizes |= changes
    return ModelShape(**sizes, rope=Rope(sizes["head_dim"], BASE, LENGTH))


def off(got: Tensor, wanted: Any) -> float:
    return (got.double() - torch.as_tensor(wanted).double()).abs().max().item()


# Gradients


def leaves_and_direction() -> tuple[list[Tensor], Tensor]:
    return [x.requires_grad_() for x in drawn(3, TOKENS, TOKENS)], drawn(
        3, TOKENS, TOKENS, seed=1
    )[0]


def gradients(
    layer: Layer, inputs: list[Tensor], direction: Tensor, **arguments: Any
) -> list[Tensor]:
    leaves = [*inputs, *layer.module.parameters()]
    output, _ = layer.attend(*inputs, None, WITH_GAPS, **arguments)
    slopes = torch.autograd.grad((output * direction).sum(), leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if one is None else one
        for leaf, one in zip(leaves, slopes, strict=True)
    ]


@pytest.mark.parametrize("name", ATTENDING)
def test_gradients_equal_finite_differences_of_the_oracle(name, monkeypatch):
    """Compares the derivative along one direction in the space of q, k, v and all parameters."""
    monkeypatch.setitem(modeling.SCORES, "cpu", FEW)
    inputs, direction = leaves_and_direction()
    steps = drawn(3, TOKENS, TOKENS, seed=2)
    with swapped_layer(encoding_of(name), model_of(3), 1) as layer:
        steps += [
            torch.randn_like(parameter) for parameter in layer.module.parameters()
        ]
        slopes = gradients(layer, inputs, direction)
        got = sum(
            (one * step).sum().item() for one, step in zip(slopes, steps, strict=True)
        )
        ends = []
        for h in (1e-5, -1e-5):
            there = [
                x.detach().double() + h * step
                for x, step in zip(inputs, steps, strict=False)
            ]
            weights = {
                key: value + h * as_array(step)
                for (key, value), step in zip(
                    layer.case.weights.items(), steps[3:], strict=True
                )
            }
            output, _ = expected(
                name, layer.case._replace(weights=weights), CALLS["with gaps"], there
            )
            ends.append((output * as_array(direction)).sum())
    assert got == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", ["alibi", "shaw"])
def test_recomputed_blocks_drop_the_same_attention_weights(name, monkeypatch):
    monkeypatch.setitem(modeling.SCORES, "cpu", FEW)
    inputs, direction = leaves_and_direction()
    dropped = []
    with swapped_layer(encoding_of(name), model_of(3), 1) as layer:
        undropped = gradients(layer, inputs, direction)
        for checkpoint in (
            modeling.checkpoint,
            lambda compute, *block, use_reentrant: compute(*block),
        ):
            monkeypatch.setattr(modeling, "checkpoint", checkpoint)
            torch.manual_seed(0)
            dropped.append(gradients(layer, inputs, direction, dropout=0.5))
    for ours, one in zip(*dropped, strict=True):
        assert_close(ours, one)
    assert off(dropped[0][0], undropped[0]) > 1e-2


# Memory


def saved_elements(name: str, positions: Tensor) -> int:
    """The number of elements of all tensors that attention saves for the backward pass."""
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    inputs = [
        x.requires_grad_() for x in drawn(3, len(positions), len(positions), rows=1)
    ]
    with (
        swapped_layer(encoding_of(name), model_of(3)) as layer,
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        layer.attend(*inputs, None, positions[None])
    return sum(sizes)


@pytest.mark.parametrize("name", ["t5", "shaw", "transformer-xl"])
def test_tensors_saved_for_backward_grow_at_most_linearly_with_the_tokens(
    name, monkeypatch
):
    monkeypatch.setitem(modeling.SCORES, "cpu", 1 << 12)
    jumping = torch.arange(256) + (torch.arange(256) > 9)
    for positions in (torch.arange(256), jumping):
        assert saved_elements(name, positions) <= 2 * saved_elements(
            name, positions[:128]
        )


# Errors


OUTSIDE = [
    ("normalised", {"length": 1}),
    *(("sinusoidal", {"base": base}) for base in (1.0, 1e13)),
    ("learned", {"rows": 0}),
    ("shaw", {"clip": 0}),
    *(("t5", one) for one in ({"buckets": 1}, {"max_distance": 16})),  # of 32 buckets
    *(("xpos", one) for one in ({"scale_base": 0.0}, {"gamma": 0})),
    *(("p-rope", {"share": share}) for share in (-0.1, 1.1)),
    *(("partial", {"share": share}) for share in (0.0, 1.5)),
    *(("axial", {"grid": grid}) for grid in ((), (4, 0))),
    ("nope-heads", {"rotated": 1.01}),
    ("nope-layers", {"every": 0}),
    ("drope", {"temperature": 0}),
]
UNFIT = [
    ("sinusoidal", {}, {"hidden_size": 21}),
    ("transformer-xl", {}, {"hidden_size": 21}),
    ("nezha", {}, {"head_dim": 11}),
    ("partial", {"share": 0.1}, {}),
    ("axial", {"grid": (4, 4, 4)}, {}),
    ("nope-heads", {"rotated": 0.1}, {}),
    ("nope-heads", {"rotated": 0.9}, {}),
    ("nope-layers", {"every": 4}, {}),
]


@pytest.mark.parametrize(("name", "parameters"), OUTSIDE, ids=str)
def test_encodings_reject_parameters_outside_their_domain(name, parameters):
    with pytest.raises(
        RopepatchError, match=rf"{name}: {next(iter(parameters))}\S* must "
    ):
        make_encoding(name, **parameters)


@pytest.mark.parametrize(("name", "parameters", "sizes"), UNFIT, ids=str)
def test_encodings_reject_models_of_unsuitable_sizes(name, parameters, sizes):
    with pytest.raises(RopepatchError):
        EncodingModule(make_encoding(name, **parameters), shape(**sizes))


@pytest.mark.parametrize("argument", OTHER_SCORES)
def test_attention_rejects_arguments_that_modify_its_scores(argument):
    with (
        swapped_layer(encoding_of("alibi"), model_of(3)) as layer,
        pytest.raises(RopepatchError),
    ):
        layer.attend(*drawn(3, TOKENS, TOKENS), **{argument: 1.0})


def test_positions_beyond_the_learned_table_raise_an_error():
    module = EncodingModule(encoding_of("learned"), shape())
    assert module(torch.tensor([[LENGTH - 1]])).shape == (1, 1, HIDDEN)
    with pytest.raises(RopepatchError):
        module(torch.tensor([[3, LENGTH]]))


def test_float16_xpos_is_finite_up_to_a_length_and_rejects_longer_sequences():
    module, rejected = (
        EncodingModule(encoding_of("xpos"), shape(heads=1, key_value_heads=1)),
        [],
    )
    for tokens in range(200, 2000, 200):
        positions = torch.arange(tokens)[None]
        inputs = [4 * x.half() for x in drawn(1, tokens, tokens, rows=1, heads=1)]
        try:
            attended = module(AttentionInputs(*inputs, positions, positions, 0, 0.3))
        except RopepatchError:
            rejected.append(tokens)
        else:
            assert attended.query.isfinite().all()
            assert attended.key.isfinite().all()
    assert rejected
    assert rejected == list(range(rejected[0], 2000, 200))
    assert rejected[0] > 200


def test_xpos_rejects_overflowing_lengths_but_ignores_empty_kv_cache_columns():
    mask = (torch.arange(200) <= 5)[None, None, None]
    with (
        swapped_layer(make_encoding("xpos", scale_base=1.0), model_of(3)) as layer,
        torch.no_grad(),
    ):
        with pytest.raises(RopepatchError, match="over 99 tokens"):
            layer.attend(*drawn(3, 100, 100, rows=1))
        got, _ = layer.attend(*drawn(3, 1, 200, rows=1), mask, torch.tensor([[5]]))
    assert got.isfinite().all()
