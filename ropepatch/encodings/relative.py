"""Relative positions: additions to a score that depend on the distance between query and key."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ropepatch.encodings.absolute import sinusoid
from ropepatch.encodings.encoding import AttentionInputs, Encoding, ModelShape, Relative
from ropepatch.settings import Count


class Shaw(Encoding):
    """Trained vectors for distances up to k, per layer; larger distances use the last one.

    A decoder needs only k + 1 of the 2k + 1 vectors in the paper (Shaw et al. 2018). Row t of a layer's
    tables is for keys t tokens before the query.

    Args:
        clip: k, in tokens.
    """

    name = "shaw"
    family = "relative"
    formula = "q·(k + w^K_t)/√D, v + w^V_t, t = min(m−n, k)"
    paper = "arXiv:1803.02155"

    clip: Count = 16

    def sizes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(
            ("keys", "values"), (shape.layers, self.clip + 1, shape.head_dim)
        )

    def apply(
        self,
        inputs: AttentionInputs,
        shape: ModelShape,
        *,
        keys: Tensor,
        values: Tensor,
    ) -> AttentionInputs:
        of_keys, of_values = (table[inputs.layer].float().T for table in (keys, values))
        numbers = of_keys.new_zeros(1, self.clip + 1)
        return replace(
            inputs,
            relative=Relative(numbers, of_keys[None] * inputs.scaling, of_values),
        )


class TransformerXL(Encoding):
    """(q + u)·k + (q + v)·W R_(i-j), with a projection W per layer and head, and u and v per head.

    R are sinusoids of the distance (Dai et al. 2019).
    """

    name = "transformer-xl"
    family = "relative"
    formula = "((q+u)·k + (q+v)·W R_{m−n})/√D, R sinusoidal"
    paper = "arXiv:1901.02860"

    def sizes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        by_head = shape.heads, shape.head_dim
        return {
            "projection": (shape.layers, *by_head, shape.hidden_size),
            "u": by_head,
            "v": by_head,
        }

    def apply(
        self,
        inputs: AttentionInputs,
        shape: ModelShape,
        *,
        projection: Tensor,
        u: Tensor,
        v: Tensor,
    ) -> AttentionInputs:
        distances = torch.arange(inputs.reach, device=inputs.device)
        projection, u, v = projection[inputs.layer].float(), u.float(), v.float()
        with torch.autocast(inputs.device.type, enabled=False):
            sinusoids = sinusoid(distances, shape.hidden_size).T
            vectors = projection * inputs.scaling @ sinusoids  # [H, D, distances]
            # For queries that already include u
            numbers = ((v - u)[:, None] @ vectors)[:, 0]
        query = inputs.query + u[:, None].to(inputs.query)
        return replace(inputs, query=query, relative=Relative(numbers, vectors))


class NEZHA(Encoding):
    """The sinusoid of j - i, added to keys and values in all layers and heads (Wei et al. 2019).

    As in the paper; the authors' code clips the distance at 64 and shifts the phase by 64.
    """

    name = "nezha"
    family = "relative"
    formula = "q·(k + a_{n−m})/√D, v + a_{n−m}, a sinusoidal"
    paper = "arXiv:1909.00204"

    def apply(self, inputs: AttentionInputs, shape: ModelShape) -> AttentionInputs:
        # The sinusoid of a difference is that of the key's position, rotated by the query's position:
        # sin((j-i)w) = sin(jw) cos(iw) - cos(jw) sin(iw), cos((j-i)w) = cos(jw) cos(iw) + sin(jw) sin(iw).
        # This avoids a vector for every pair of tokens: keys and values get D more channels with the
        # sinusoids of their positions, queries get D more rotated by their positions, and the output is
        # rotated back.
        query, key, width = inputs.query, inputs.key, shape.head_dim
        of_queries = sinusoid(inputs.query_positions, width)[:, None]
        of_keys = sinusoid(inputs.key_positions, width)[:, None]
        back = sinusoid(-inputs.query_positions, width)[:, :, None]
        more = of_keys.to(key.dtype).expand_as(key)
        return replace(
            inputs,
            query=torch.cat((query, _rotated(query, of_queries)), -1),
            key=torch.cat((key, more), -1),
            value=torch.cat((inputs.value, more), -1),
            finish=lambda out: out[..., :width] + _rotated(out[..., width:], back),
        )


def _rotated(x: Tensor, sinusoids: Tensor) -> Tensor:
    """Rotate a query, so that its product with a key's sinusoid is that with the difference's sinusoid."""
    (even, odd), (sin, cos) = _pairs(x), _pairs(sinusoids)
    pairs = torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1)
    return pairs.flatten(-2).to(x.dtype)


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., 0::2].float(), x[..., 1::2].float()


class T5Bias(Encoding):
    """A trained bias per head and bucket of distances, shared by all layers (Raffel et al. 2019).

    Args:
        buckets: Number of buckets; the first half hold one distance each, the others a growing range.
        max_distance: Distances from here on, and some smaller ones, share the last bucket.
    """

    name = "t5"
    family = "relative"
    formula = "q·k + B[bucket(m−n), h]"
    paper = "arXiv:1910.10683"

    buckets: Annotated[int, Field(ge=2)] = 32
    max_distance: Count = 128

    def check(self) -> None:
        super().check()
        self._require(
            self.max_distance > self.buckets // 2, "max_distance", "above buckets/2"
        )

    def sizes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        return {"table": (self.buckets, shape.heads)}

    def apply(
        self, inputs: AttentionInputs, shape: ModelShape, *, table: Tensor
    ) -> AttentionInputs:
        # Larger distances use the last one
        distances = torch.arange(self.max_distance + 1, device=inputs.device)
        rows = buckets_of(distances, self.buckets, self.max_distance)
        return replace(inputs, relative=Relative(table.float()[rows].T))


def buckets_of(distances: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance, as in T5's decoder: int64.

    Args:
        distances: [...] int64, 0 or more tokens.
        buckets: Number of buckets.
        max_distance: See `T5Bias`.
    """
    exact = buckets // 2
    ratio = torch.log(distances.clamp(min=1).float() / exact) / math.log(
        max_distance / exact
    )
    beyond = exact + (ratio * (buckets - exact)).long()
    return torch.where(distances < exact, distances, beyond.clamp(max=buckets - 1))


class ALiBi(Encoding):
    """A penalty linear in the distance, with a slope per head (Press et al. 2021).

    s_h = 2^(−8h/P), P the largest power of two up to the number of heads. Further heads take every other
    slope of 2P heads, from the first.
    """

    name = "alibi"
    family = "relative"
    formula = "q·k − s_h·(m−n)"
    paper = "arXiv:2108.12409"

    def constants(self, shape: ModelShape) -> dict[str, Tensor]:
        return {"slopes": slopes(shape.heads)}

    def apply(
        self, inputs: AttentionInputs, shape: ModelShape, *, slopes: Tensor
    ) -> AttentionInputs:
        distances = torch.arange(inputs.reach, device=inputs.device)
        return replace(inputs, relative=Relative(-slopes[:, None] * distances.float()))


def slopes(heads: int) -> Tensor:
    """Return s_h for H heads: [H] float32, per token.

    2^(-8h/P) for the largest power of two P <= H, then every other slope of 2P heads, from the first.
    """
    power = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    more = [2.0 ** (-8 * h / (2 * power)) for h in range(1, 2 * power, 2)]
    return torch.tensor(first + more[: heads - power], dtype=torch.float32)
