"""Relative positions as numbers: a bias for every distance, added to the scaled scores in float32."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ropepatch.encodings.encoding import Attended, AttentionModule, Encoding, ModelShape, Places, Relative


class Biased(AttentionModule):
    """Adds a bias that depends on distance and head.

    Args:
        reach: The first distance whose bias all farther ones have; None where each has its own.
    """

    def __init__(self, reach: int | None = None) -> None:
        super().__init__()
        self.reach = reach

    @abstractmethod
    def bias(self, distances: Tensor) -> Tensor:
        """What is added at distances [R] of i - j tokens, 0 or more: [H, R] float32."""

    def forward(self, stock: Attended, layer: int, places: Places, scaling: float) -> Attended:
        reach = places.reach if self.reach is None else self.reach + 1
        return replace(stock, relative=Relative(self.bias(torch.arange(reach, device=stock.query.device))))


@dataclass(frozen=True, kw_only=True)
class ALiBi(Encoding):
    """Scores fall linearly with the distance, in every head at a rate of its own (Press et al. 2021)."""

    name = "alibi"
    family = "relative"
    formula = "q·k − m_h·(i−j)"
    paper = "arXiv:2108.12409"

    def build(self, shape: ModelShape) -> AttentionModule:
        return LinearBias(slopes(shape.heads))


def slopes(heads: int) -> Tensor:
    """m_h for H heads: [H] float32, per token.

    2^(-8h/P) for the greatest power of two P in H, then every other slope of 2P heads, the first one first.
    """
    power = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    more = [2.0 ** (-8 * h / (2 * power)) for h in range(1, 2 * power, 2)]
    return torch.tensor(first + more[: heads - power], dtype=torch.float32)


class LinearBias(Biased):
    """A slope per head."""

    def __init__(self, slopes: Tensor) -> None:
        super().__init__()
        self.slopes = slopes

    def bias(self, distances: Tensor) -> Tensor:
        return -self.slopes.to(distances.device)[:, None] * distances.float()


@dataclass(frozen=True, kw_only=True)
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
    domains = (
        ("buckets", "at least 2", lambda one: one.buckets >= 2),
        ("max_distance", "above buckets/2", lambda one: one.max_distance > one.buckets // 2),
    )

    buckets: int = 32
    max_distance: int = 128

    def build(self, shape: ModelShape) -> AttentionModule:
        return BucketBias(shape, self.buckets, self.max_distance)


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


class BucketBias(Biased):
    """A row of numbers per bucket, a column per head."""

    def __init__(self, shape: ModelShape, buckets: int, max_distance: int) -> None:
        super().__init__(max_distance)
        self.max_distance = max_distance
        self.table = shape.parameter(buckets, shape.heads)

    def bias(self, distances: Tensor) -> Tensor:
        rows = buckets_of(distances, len(self.table), self.max_distance)
        return self.table.to(distances.device).float()[rows].T
