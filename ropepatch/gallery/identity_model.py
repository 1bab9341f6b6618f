"""A small model of identity projections, in which an encoding's own module is at work.

A head's query, key and value are its part of the hidden state, and new parameters have standard deviation 1,
so that what is drawn shows. Contents have unit variance, as Vaswani et al.'s embeddings times sqrt(C), so an
absolute encoding's vectors are added times sqrt(C). Where the same content stands at every position, what
still differs between positions is the encoding's doing.

Letters, beside those of `encoding`: L the window, E the dimensions that attention works on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ropepatch.attention.interchange import SLOT
from ropepatch.attention.places import Places
from ropepatch.encodings.attention import attend
from ropepatch.encodings.encoding import AttentionInputs, Encoding, EncodingModule, ModelShape
from ropepatch.encodings.rotary import NoPE
from ropepatch.scaling.rope import Rope
from ropepatch.settings.parameters import required

SHAPE = ModelShape(
    layers=4,
    heads=4,
    key_value_heads=4,
    head_dim=16,
    hidden_size=64,
    rope=Rope(16, 10000.0, 128),  # more positions than channels, or every table would be linear
    initializer_range=1.0,
)
ELEMENTWISE = "add sub rsub mul div neg pow reciprocal sin cos log"  # those that are counted


@dataclass(frozen=True)
class IdentityModel:
    """An encoding in such a model.

    Args:
        module: The encoding.
        shape: That of the model, with as many key-value heads as heads and C = H * D.
    """

    module: EncodingModule
    shape: ModelShape

    @classmethod
    def of(
        cls, kind: type[Encoding], length: int = SHAPE.window, shape: ModelShape = SHAPE, seed: int = 0
    ) -> IdentityModel:
        """An encoding with its default parameters, and with the length of the text where it needs that."""
        encoding = kind(**dict.fromkeys(required(kind), length))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(EncodingModule(encoding, shape), shape)

    @property
    def absolute(self) -> bool:
        """Whether vectors are added to the hidden states."""
        return self.module.encoding.family == "absolute"

    @property
    def layers(self) -> range:
        """Those that may differ."""
        return range(1 if self.absolute else self.shape.layers)

    def attended(self, layer: int, query: Tensor, key: Tensor, places: Places) -> AttentionInputs:
        """What attention works on, for contents [B, H, Q or 1, D] and [B, H, T or 1, D] at these places."""
        query = query.expand(-1, -1, places.queries.shape[1], -1)
        key = key.expand(-1, -1, places.keys.shape[1], -1)
        if self.absolute:
            query, key = query + self._vectors(places.queries), key + self._vectors(places.keys)
        inputs = AttentionInputs(query, key, key, *places, layer, self.shape.head_dim**-0.5)
        encoded: AttentionInputs = inputs if self.absolute else self.module(inputs)
        return encoded

    def scores(self, query: Tensor, key: Tensor, places: Places) -> Tensor:
        """The scores of these contents, before the softmax and with the future: [layers, B, H, Q, T]."""
        layers = []
        for layer in self.layers:
            attended = self.attended(layer, query, key, places)
            scores = attended.query @ attended.key.mT * self.shape.head_dim**-0.5
            if attended.relative is not None:
                scores = scores + attended.relative.bias(attended.query, -places.offsets(slice(None)))
            layers.append(scores)
        return torch.stack(layers)

    @torch.no_grad()
    def mean_scores(self, queries: int, tokens: int) -> Tensor:
        """The mean score of a token with itself by distance, over contents, heads and layers: [T].

        The contents have zero mean and unit covariance.

        Args:
            queries: So many last positions of the text ask.
            tokens: T.
        """
        basis = math.sqrt(self.shape.head_dim) * torch.eye(self.shape.head_dim)
        content = torch.cat((basis, -basis))[:, None, None].expand(-1, self.shape.heads, -1, -1)
        positions = torch.arange(tokens)[None]
        scores = self.scores(content, content, Places(positions[:, -queries:], positions))
        return by_distance(scores.mean((0, 1, 2)), torch.nan).nanmean(0)

    def carried(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """What tokens of the window carry into attention, and the norms of their contents.

        Hidden states [1, B, 1, L, C] of an absolute encoding, otherwise keys [layers, B, H, L, E].
        """
        places = text(self.shape.window)
        carried = torch.stack([self.attended(layer, key, key, places).key for layer in self.layers])
        if self.absolute:
            carried, key = (x.transpose(-3, -2).flatten(-2).unsqueeze(-3) for x in (carried, key))
        return carried, key.norm(dim=-1)

    def outputs(self, content: Tensor, mask: Tensor | None) -> Tensor:
        """What every layer by itself makes of a text of contents [B, H, T, D]: [layers, B, T, H, D].

        Args:
            content: Queries, keys and values.
            mask: [B, 1, T, T], True where a query sees a key; None for those up to itself.
        """
        module = self.module
        if self.absolute:
            content = content + self._vectors(text(content.shape[2]).keys)
            module = EncodingModule(NoPE(), self.shape)
        return torch.stack([_attention(module, layer, content, mask) for layer in self.layers])

    @torch.no_grad()
    def cost(self) -> tuple[int, int]:
        """The floating-point operations per token, and per query and key, that it adds to the model."""
        counts, step = [], self.shape.window // 4
        for tokens in (step, 2 * step, 3 * step):
            hidden = torch.ones(1, tokens, self.shape.hidden_size)
            content = hidden.view(1, self.shape.heads, tokens, self.shape.head_dim)
            if self.absolute:
                counts.append(_operations(lambda x: x + self.module(text(x.shape[1]).keys), hidden))
            else:
                unpositioned = IdentityModel(EncodingModule(NoPE(), self.shape), self.shape)
                plain = _operations(unpositioned.outputs, content, None)
                counts.append(_operations(self.outputs, content, None) - plain)
        per_pair = (counts[2] - 2 * counts[1] + counts[0]) // (2 * step**2)
        return (counts[1] - counts[0]) // step - 3 * step * per_pair, per_pair

    def _vectors(self, positions: Tensor) -> Tensor:
        """sqrt(C) times the vectors of positions [B, T], shared out among the heads: [B, H, T, D]."""
        vectors: Tensor = self.module(positions) * math.sqrt(self.shape.hidden_size)
        return vectors.view(*positions.shape, self.shape.heads, -1).transpose(1, 2)


def text(tokens: int) -> Places:
    """Every token is asking and is read."""
    positions = torch.arange(tokens)[None]
    return Places(positions, positions)


def contents(seed: int, shape: ModelShape = SHAPE) -> Tensor:
    """D orthogonal contents of norm sqrt(D), the same in all heads: [D, H, 1, D]."""
    drawn = torch.randn(shape.head_dim, shape.head_dim, generator=torch.Generator().manual_seed(seed))
    orthogonal: Tensor = torch.linalg.qr(drawn).Q * math.sqrt(shape.head_dim)
    return orthogonal[:, None, None].expand(-1, shape.heads, -1, -1)


def by_distance(scores: Tensor, nothing: float) -> Tensor:
    """The scores [..., Q, T] of the last queries with the keys 0, 1, ... T - 1 tokens behind them.

    Args:
        scores: The scores of any number of heads.
        nothing: What stands where a text has not begun.
    """
    queries, tokens = scores.shape[-2:]
    columns = torch.arange(tokens - queries, tokens)[:, None] - torch.arange(tokens)
    return scores.gather(-1, columns.clamp(min=0).expand_as(scores)).masked_fill(columns < 0, nothing)


def _attention(module: EncodingModule, layer: int, content: Tensor, mask: Tensor | None) -> Tensor:
    """The attention that a swapped model runs, with all scores written down: [B, T, H, D]."""
    attention: Any = nn.Module()
    attention.layer_idx = layer
    attention.__dict__[SLOT] = SimpleNamespace(encoded=module, wants_weights=True)
    output, _ = attend(attention, content, content, content, mask)
    return output


def _operations(run: Callable[..., object], *arguments: Any) -> int:
    counter = _Counter()  # type: ignore[no-untyped-call]  # torch
    with counter:
        run(*arguments)
    return counter.count


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Counts floating-point operations: two per number and column in a product of matrices."""

    count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")  # type: ignore[attr-defined]  # an OpOverload
        if name in ("mm", "bmm"):
            self.count += 2 * out.numel() * args[0].shape[-1]
        elif name == "scatter_add":
            self.count += args[3].numel()
        elif name in ELEMENTWISE.split() and out.is_floating_point():
            self.count += out.numel()
        return out
