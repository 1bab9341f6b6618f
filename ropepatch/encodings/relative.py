"""Relative positions: vectors or numbers that the distance of a key behind a query adds to its score."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ropepatch.encodings.absolute import sinusoid
from ropepatch.encodings.encoding import AttentionInputs, Encoding, ModelShape, Relative
from ropepatch.settings import Count, expected


class Shaw(Encoding):
    """Trained vectors for distances up to k, for each layer and all its heads; farther ones share the last.

    Of the 2k + 1 vectors of the paper (Shaw et al. 2018) a decoder reads k + 1, those of keys behind the
    query: row t of a layer's tables is for keys t tokens behind it.

    Args:
        clip: k, in tokens.
    """

    name = "shaw"
    family = "relative"
    formula = "q·(k + w^K_t)/√D, v + w^V_t, t = min(i−j, k)"
    paper = "arXiv:1803.02155"

    clip: Count = 16

    def sizes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("keys", "values"), (shape.layers, self.clip + 1, shape.head_dim))

    def apply(
        self, inputs: AttentionInputs, shape: ModelShape, *, keys: Tensor, values: Tensor
    ) -> AttentionInputs:
        of_keys, of_values = (table[inputs.layer].float().T for table in (keys, values))
        numbers = of_keys.new_zeros(1, self.clip + 1)
        return replace(inputs, relative=Relative(numbers, of_keys[None] * inputs.scaling, of_values))


class TransformerXL(Encoding):
    """(q + u)·k + (q + v)·W R_(i-j): a projection W for each layer and head, u and v for each head.

    R are sinusoids of the distance (Dai et al. 2019).
    """

    name = "transformer-xl"
    family = "relative"
    formula = "((q+u)·k + (q+v)·W R_{i−j})/√D, R sinusoidal"
    paper = "arXiv:1901.02860"

    def check_shape(self, shape: ModelShape) -> None:
        self._require_even("hidden_size", shape.hidden_size, instead="shaw")

    def sizes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        by_head = shape.heads, shape.head_dim
        return {"projection": (shape.layers, *by_head, shape.hidden_size), "u": by_head, "v": by_head}

    def apply(
        self, inputs: AttentionInputs, shape: ModelShape, *, projection: Tensor, u: Tensor, v: Tensor
    ) -> AttentionInputs:
        distances = torch.arange(inputs.reach, device=inputs.device)
        projection, u, v = projection[inputs.layer].float(), u.float(), v.float()
        with torch.autocast(inputs.device.type, enabled=False):
            sinusoids = sinusoid(distances, shape.hidden_size).T
            vectors = projection * inputs.scaling @ sinusoids  # [H, D, distances]
            numbers = ((v - u)[:, None] @ vectors)[:, 0]  # of a query that has u in it
        query = inputs.query + u[:, None].to(inputs.query)
        return replace(inputs, query=query, relative=Relative(numbers, vectors))


class NEZHA(Encoding):
    """The sinusoid of j - i is added to keys and to values, in all layers and heads (Wei et al. 2019).

    The paper's numbers; the authors' code clips at 64 and shifts the phase by as much.
    """

    name = "nezha"
    family = "relative"
    formula = "q·(k + a_{j−i})/√D, v + a_{j−i}, a sinusoidal"
    paper = "arXiv:1909.00204"

    def check_shape(self, shape: ModelShape) -> None:
        self._require_even("head_dim", shape.head_dim, instead="shaw")

    def apply(self, inputs: AttentionInputs, shape: ModelShape) -> AttentionInputs:
        # The sinusoid of a difference is the one of the key's position, rotated by the query's:
        # sin((j-i)w) = sin(jw) cos(iw) - cos(jw) sin(iw), cos((j-i)w) = cos(jw) cos(iw) + sin(jw) sin(iw).
        # So instead of a vector for every pair of tokens, keys and values get D more channels with the
        # sinusoids of their own positions, queries D more that are rotated by theirs, and the output is
        # rotated back.
        query, key, width = inputs.query, inputs.key, shape.head_dim
        of_queries = sinusoid(inputs.query_positions, width)[:, None]
        more = sinusoid(inputs.key_positions, width)[:, None].to(key.dtype).expand_as(key)
        return replace(
            inputs,
            query=torch.cat((query, _rotated(query, of_queries)), -1),
            key=torch.cat((key, more), -1),
            value=torch.cat((inputs.value, more), -1),
            finish=lambda out: out[..., :width] + _rotated_back(out[..., width:], of_queries),
        )


def _rotated(query: Tensor, of_queries: Tensor) -> Tensor:
    """Vectors whose product with a key's sinusoid is the query's with the sinusoid of the difference."""
    (x, y), (sin, cos) = _pairs(query), _pairs(of_queries)
    return torch.stack((x * cos + y * sin, y * cos - x * sin), -1).flatten(-2).to(query.dtype)


def _rotated_back(summed: Tensor, of_queries: Tensor) -> Tensor:
    """Weighted sums of the keys' sinusoids as those of the differences."""
    (x, y), (sin, cos) = _pairs(summed), _pairs(of_queries)
    return torch.stack((x * cos - y * sin, y * cos + x * sin), -1).flatten(-2).to(summed.dtype)


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., 0::2].float(), x[..., 1::2].float()


class T5Bias(Encoding):
    """A trained number per head and bucket of distances, for all layers (Raffel et al. 2019).

    Args:
        buckets: The first half holds one distance each, the others ever more.
        max_distance: Distances from here on share the last bucket, and some before it do too.
    """

    name = "t5"
    family = "relative"
    formula = "q·k + B[bucket(i−j), h]"
    paper = "arXiv:1910.10683"

    buckets: Annotated[int, Field(ge=2), expected("a whole number from 2")] = 32
    max_distance: Count = 128

    def check(self) -> None:
        super().check()
        self._require(self.max_distance > self.buckets // 2, "max_distance", "above buckets/2")

    def sizes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        return {"table": (self.buckets, shape.heads)}

    def apply(self, inputs: AttentionInputs, shape: ModelShape, *, table: Tensor) -> AttentionInputs:
        distances = torch.arange(self.max_distance + 1, device=inputs.device)  # farther ones add the last
        rows = buckets_of(distances, self.buckets, self.max_distance)
        return replace(inputs, relative=Relative(table.float()[rows].T))


def buckets_of(distances: Tensor, buckets: int, max_distance: int) -> Tensor:
    """The bucket of every distance of 0 or more tokens, for a decoder, as T5 computes it: int64.

    Args:
        distances: [...] int64.
        buckets: Their number n.
        max_distance: D.
    """
    exact = buckets // 2
    ratio = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    beyond = exact + (ratio * (buckets - exact)).long()
    return torch.where(distances < exact, distances, beyond.clamp(max=buckets - 1))


class ALiBi(Encoding):
    """Scores fall linearly with the distance, in every head at a rate of its own (Press et al. 2021)."""

    name = "alibi"
    family = "relative"
    formula = "q·k − m_h·(i−j)"
    paper = "arXiv:2108.12409"

    def constants(self, shape: ModelShape) -> dict[str, Tensor]:
        return {"slopes": slopes(shape.heads)}

    def apply(self, inputs: AttentionInputs, shape: ModelShape, *, slopes: Tensor) -> AttentionInputs:
        distances = torch.arange(inputs.reach, device=inputs.device)
        return replace(inputs, relative=Relative(-slopes[:, None] * distances.float()))


def slopes(heads: int) -> Tensor:
    """m_h for H heads: [H] float32, per token.

    2^(-8h/P) for the greatest power of two P in H, then every other slope of 2P heads, the first one first.
    """
    power = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    more = [2.0 ** (-8 * h / (2 * power)) for h in range(1, 2 * power, 2)]
    return torch.tensor(first + more[: heads - power], dtype=torch.float32)
