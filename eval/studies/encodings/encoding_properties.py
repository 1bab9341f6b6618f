"""Textbook properties of position encodings, measured with the encodings' own modules.

The model has identity projections: a head's query, key and value are its part of the hidden state. New
parameters have standard deviation 1, so that they have an effect. Contents have unit variance, as Vaswani et
al.'s embeddings times sqrt(C), so an absolute encoding's vectors are added times sqrt(C). Where the same
content is at every position, any difference between positions is due to the encoding.

Letters, in addition to those of `encoding`: L the original length, E the dimensions of attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ropepatch.attention.interchange import POSITIONS_SLOT
from ropepatch.encodings import ENCODINGS
from ropepatch.encodings.attention import attend
from ropepatch.encodings.encoding import (
    AttentionInputs,
    Encoding,
    EncodingModule,
    ModelShape,
)
from ropepatch.encodings.rotary import NoPE
from ropepatch.errors import RopepatchError
from ropepatch.report.printers import markdown_rows
from ropepatch.scaling.rope import Rope

SHAPE = ModelShape(
    layers=4,
    heads=4,
    key_value_heads=4,
    head_dim=16,
    hidden_size=64,
    rope=Rope(
        16, 10000.0, 128
    ),  # more positions than channels, or every table would be linear
    initializer_range=1.0,
)


class Places(NamedTuple):
    """The positions of queries [B or 1, Q] and keys [B or 1, T]."""

    queries: Tensor
    keys: Tensor


@dataclass(frozen=True)
class IdentityModel:
    """An encoding in this model, with as many key-value heads as heads and C = H * D."""

    module: EncodingModule
    shape: ModelShape

    @classmethod
    def of(
        cls,
        kind: type[Encoding],
        length: int = SHAPE.window,
        shape: ModelShape = SHAPE,
        seed: int = 0,
    ) -> IdentityModel:
        """An encoding with its default parameters, and with the length of the text if required."""
        encoding = kind(**dict.fromkeys(kind.required(), length))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(EncodingModule(encoding, shape), shape)

    @property
    def absolute(self) -> bool:
        """Whether vectors are added to the hidden states."""
        return self.module.encoding.family == "absolute"

    @property
    def layers(self) -> range:
        """The layers that may differ."""
        return range(1 if self.absolute else self.shape.layers)

    def attended(
        self, layer: int, query: Tensor, key: Tensor, places: Places
    ) -> AttentionInputs:
        """The inputs of attention for contents [B, H, Q or 1, D] and [B, H, T or 1, D] at these places."""
        query = query.expand(-1, -1, places.queries.shape[1], -1)
        key = key.expand(-1, -1, places.keys.shape[1], -1)
        if self.absolute:
            query, key = (
                query + self._vectors(places.queries),
                key + self._vectors(places.keys),
            )
        inputs = AttentionInputs(
            query, key, key, *places, layer, self.shape.head_dim**-0.5
        )
        encoded: AttentionInputs = inputs if self.absolute else self.module(inputs)
        return encoded

    def scores(self, query: Tensor, key: Tensor, places: Places) -> Tensor:
        """The scores of these contents, before the softmax and with the future: [layers, B, H, Q, T]."""
        layers = []
        for layer in self.layers:
            attended = self.attended(layer, query, key, places)
            scores = attended.query @ attended.key.mT * self.shape.head_dim**-0.5
            if attended.relative is not None:
                scores = scores + attended.relative.bias(
                    attended.query, places.queries[:, :, None] - places.keys[:, None]
                )
            layers.append(scores)
        return torch.stack(layers)

    @torch.no_grad()
    def mean_scores(self, queries: int, tokens: int) -> Tensor:
        """The mean score of a token with itself by distance, over contents, heads and layers: [T]."""
        basis = math.sqrt(self.shape.head_dim) * torch.eye(self.shape.head_dim)
        content = torch.cat((basis, -basis))[:, None, None].expand(
            -1, self.shape.heads, -1, -1
        )
        positions = torch.arange(tokens)[None]
        scores = self.scores(
            content, content, Places(positions[:, -queries:], positions)
        )
        return by_distance(scores.mean((0, 1, 2)), torch.nan).nanmean(0)

    def carried(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors that tokens carry into attention, and the norms of their contents.

        Hidden states [1, B, 1, L, C] of an absolute encoding, otherwise keys [layers, B, H, L, E].
        """
        places = text(self.shape.window)
        carried = torch.stack(
            [self.attended(layer, key, key, places).key for layer in self.layers]
        )
        if self.absolute:
            carried, key = (
                x.transpose(-3, -2).flatten(-2).unsqueeze(-3) for x in (carried, key)
            )
        return carried, key.norm(dim=-1)

    def outputs(self, content: Tensor, mask: Tensor | None) -> Tensor:
        """The output of each single layer for a text [B, H, T, D]: [layers, B, T, H, D]; None is causal."""
        module = self.module
        if self.absolute:
            content = content + self._vectors(text(content.shape[2]).keys)
            module = EncodingModule(NoPE(), self.shape)
        return torch.stack(
            [_attention(module, layer, content, mask) for layer in self.layers]
        )

    def _vectors(self, positions: Tensor) -> Tensor:
        """sqrt(C) times the vectors of positions [B, T], split into heads: [B, H, T, D]."""
        vectors: Tensor = self.module(positions) * math.sqrt(self.shape.hidden_size)
        return vectors.view(*positions.shape, self.shape.heads, -1).transpose(1, 2)


def text(tokens: int) -> Places:
    """The places of a text in which every token is a query and a key."""
    positions = torch.arange(tokens)[None]
    return Places(positions, positions)


def contents(seed: int, shape: ModelShape = SHAPE) -> Tensor:
    """D orthogonal contents of norm sqrt(D), the same in all heads: [D, H, 1, D]."""
    drawn = torch.randn(
        shape.head_dim, shape.head_dim, generator=torch.Generator().manual_seed(seed)
    )
    orthogonal: Tensor = torch.linalg.qr(drawn).Q * math.sqrt(shape.head_dim)
    return orthogonal[:, None, None].expand(-1, shape.heads, -1, -1)


def by_distance(scores: Tensor, nothing: float) -> Tensor:
    """The scores [..., Q, T] of the last queries with the keys 0, 1, ... T - 1 tokens before them."""
    queries, tokens = scores.shape[-2:]
    columns = torch.arange(tokens - queries, tokens)[:, None] - torch.arange(tokens)
    return scores.gather(-1, columns.clamp(min=0).expand_as(scores)).masked_fill(
        columns < 0, nothing
    )


def _attention(
    module: EncodingModule, layer: int, content: Tensor, mask: Tensor | None
) -> Tensor:
    """The attention of a swapped model, computed from explicit scores: [B, T, H, D]."""
    attention: Any = nn.Module()
    attention.layer_idx = layer
    attention.__dict__[POSITIONS_SLOT] = SimpleNamespace(encoded=module)
    positions, scaling = text(content.shape[2]).keys, SHAPE.head_dim**-0.5
    qkv = content, content, content
    output, _ = attend(attention, *qkv, mask, positions, scaling)
    return output


# The properties

TOLERANCE = 1e-4  # relative; float32 is a hundred times as exact
FEW = 4  # contents whose scores are compared
SHIFTS = (1, 5, 16)  # k, in tokens
NEAR = (
    0,
    4,
    16,
    64,
)  # the edges of the ranges of distances whose mean scores are compared
STEADY = 0.1  # the least fall from a range to the next, as a share of the whole
REACH = 16  # times L, the longest text
GRID = (8, 16)  # rows and columns
WORDS = 8  # different contents in a text with repeats

MEANINGS = {
    "unique": "a query distinguishes the keys at any two positions within the original length",
    "length_free": "a position is the same in a text of another length",
    "linear": "for each k one matrix turns what a token at p carries into what it carries at p + k",
    "norm_kept": "what a token carries has the norm of its content",
    "products": "the product of two positions' vectors, without content, depends only on their distance",
    "relative": "a score depends only on content and distance",
    "decays": "the mean score of a token with itself, over contents and heads, falls with the distance",
    "beyond": f"it is defined at {REACH} times the original length",
    "grid": "with an axis in each half of the channels, a query distinguishes the places of a grid",
    "order": "without a causal mask, identical tokens at different positions get different outputs",
}


@dataclass(frozen=True)
class Property:
    """Whether a property holds, and the number that decides it.

    Attributes:
        holds: None if it does not apply, because no single token carries its position.
        number: The least difference for `unique` and `grid`, the greatest for `order`; for `decays` the least
            fall from a range of distances to the next; for `beyond` the multiple of L; for the others the
            greatest deviation. All but the multiple are relative.
    """

    holds: bool | None = None
    number: float | None = None


@cache
@torch.no_grad()
def properties_of(kind: type[Encoding]) -> dict[str, Property]:
    """The properties of an encoding with its default parameters, by the names of `MEANINGS`."""
    model, window = IdentityModel.of(kind), SHAPE.window
    query, key = contents(1)[:FEW], contents(2)[:FEW]
    scores = model.scores(query, key, text(window))
    shorter = IdentityModel.of(kind, window // 2).scores(query, key, text(window // 2))
    carried, plain = model.carried(contents(2))
    moves = not _equal(carried - carried[..., :1, :], carried).holds
    vectors = model.module(text(window).keys) if model.absolute else None
    reach, fall, difference = (
        _reach(kind, query, key),
        _fall(model),
        _difference(model, causal=False),
    )
    return {
        "unique": _apart(scores[..., -1, :]),
        "length_free": _equal(
            scores[..., : window // 2, : window // 2] - shorter, scores
        ),
        "linear": _linear(carried if vectors is None else vectors[:, None, None])
        if moves
        else Property(),
        "norm_kept": _equal(carried.norm(dim=-1) - plain, plain)
        if moves
        else Property(),
        "products": Property()
        if vectors is None
        else _shift_free(vectors @ vectors.mT),
        "relative": _shift_free(scores),
        "decays": Property(fall > STEADY, fall),
        "beyond": Property(reach == REACH, reach),
        "grid": _apart(_on_a_grid(kind)),
        "order": Property(difference > TOLERANCE, difference),
    }


def parameters_of(kind: type[Encoding]) -> int:
    """The number of trained parameters of an encoding in a model of `SHAPE`."""
    return sum(
        parameter.numel() for parameter in IdentityModel.of(kind).module.parameters()
    )


@torch.no_grad()
def identical_tokens_agree(kind: type[Encoding], *, causal: bool = False) -> bool:
    """Whether equal tokens at different positions of a text get equal outputs."""
    return _difference(IdentityModel.of(kind), causal=causal) <= TOLERANCE


def _share(difference: Tensor, compared: Tensor) -> float:
    """The greatest difference, relative to the greatest compared value."""
    tiny = torch.finfo(compared.dtype).tiny
    return float(difference.abs().max() / compared.abs().max().clamp(min=tiny))


def _equal(difference: Tensor, compared: Tensor) -> Property:
    share = _share(difference, compared)
    return Property(share <= TOLERANCE, share)


def _apart(scores: Tensor) -> Property:
    """Whether all keys differ in their scores [layers, B, H, T]."""
    keys = scores.flatten(0, -2).T.double()
    distances = torch.cdist(keys, keys, compute_mode="donot_use_mm_for_euclid_dist")
    others = ~torch.eye(len(keys), dtype=torch.bool)
    share = _share(distances[others].min(), distances)
    return Property(share > TOLERANCE, share)


def _shift_free(matrix: Tensor) -> Property:
    """Whether [..., T, T] has one value on each diagonal, from the main one down."""
    greatest, least = (
        by_distance(matrix, -torch.inf).amax(-2),
        by_distance(matrix, torch.inf).amin(-2),
    )
    return _equal(greatest - least, matrix)


def _linear(carried: Tensor) -> Property:
    """Whether one matrix for each layer and head of [layers, B, H, T, E] shifts by k positions."""
    rows = carried.transpose(1, 2).double()
    worst = 0.0
    for shift in SHIFTS:
        before, after = (
            rows[..., :-shift, :].flatten(2, 3),
            rows[..., shift:, :].flatten(2, 3),
        )
        matrix = torch.linalg.lstsq(before, after, driver="gelsd").solution
        worst = max(worst, float((before @ matrix - after).norm() / after.norm()))
    return Property(worst <= TOLERANCE, worst)


def _fall(model: IdentityModel) -> float:
    """The least fall of the mean score from a range of distances to the next, relative to its range."""
    means = model.mean_scores(SHAPE.window // 2, SHAPE.window)
    stretches = torch.stack([means[start:end].mean() for start, end in pairwise(NEAR)])
    change = stretches.max() - stretches.min()
    return (
        float(-stretches.diff().max() / change)
        if _share(change, means) > TOLERANCE
        else 0.0
    )


def _reach(kind: type[Encoding], query: Tensor, key: Tensor) -> int:
    """The greatest multiple of L, of 1, 2, 4 ... REACH, at which it is defined; 0 for none."""
    for windows in (REACH, 8, 4, 2, 1):
        positions = torch.arange(windows * SHAPE.window)[None]
        try:
            model = IdentityModel.of(kind, positions.numel())
            if (
                model.scores(query, key, Places(positions[:, -1:], positions))
                .isfinite()
                .all()
            ):
                return windows
        except RopepatchError:
            pass  # not defined at this length
    return 0


def _on_a_grid(kind: type[Encoding]) -> Tensor:
    """The scores [layers, B, H, T] of a query within the last row, with itself and all places before."""
    half = SHAPE.head_dim // 2
    rope = replace(SHAPE.rope, rotary_dim=half)
    shape = replace(SHAPE, head_dim=half, hidden_size=SHAPE.hidden_size // 2, rope=rope)
    places = torch.cartesian_prod(*map(torch.arange, GRID))[: 1 - GRID[1] // 2]
    scores = []
    for axis, extent in enumerate(GRID):
        where = Places(places[None, -1:, axis], places[None, :, axis])
        model = IdentityModel.of(kind, extent, shape, seed=axis)
        query, key = contents(3 + axis, shape)[:FEW], contents(5 + axis, shape)[:FEW]
        scores.append(model.scores(query, key, where)[..., 0, :])
    return scores[0] + scores[1]


def _difference(model: IdentityModel, *, causal: bool) -> float:
    """The greatest relative difference between outputs of equal tokens in a text with repeats."""
    draw = torch.Generator().manual_seed(7)
    tokens = SHAPE.window // 2
    words = torch.randint(WORDS, (tokens,), generator=draw)
    content = torch.randn(WORDS, SHAPE.heads, SHAPE.head_dim, generator=draw)[
        words
    ].transpose(0, 1)[None]
    mask = None if causal else torch.ones(1, 1, tokens, tokens, dtype=torch.bool)
    outputs = model.outputs(content, mask)[:, 0].flatten(2)  # [layers, T, C]
    same = (words[:, None] == words)[..., None]
    return _share((outputs[:, :, None] - outputs[:, None]) * same, outputs)


# The table, for docs/tables.py


def properties_table() -> str:
    """The properties of each encoding, measured anew, and the number of its parameters."""
    words = {True: "yes", False: "no", None: "–"}
    head = ["encoding", *(name.replace("_", " ") for name in MEANINGS), "parameters"]
    rows = []
    for name, kind in ENCODINGS.items():
        found = properties_of(kind)
        verdicts = [words[found[one].holds] for one in MEANINGS]
        rows.append([f"`{name}`", *verdicts, f"{parameters_of(kind):,}"])
    return markdown_rows(head, rows)
