"""What vectors are allowed: convex sets, each by its projection.

Shapes: P rotary pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ropepatch.fitting.vectors import LARGEST, Vector

SMOOTH_WAVES = 6  # cosines over the pairs of which a smooth vector is made

Projection = Callable[[Tensor], Tensor]


def free(log_divisors: Tensor) -> Tensor:
    """Any divisors."""
    return log_divisors


def monotone(log_divisors: Tensor) -> Tensor:
    """The nearest divisors that do not fall from faster to slower pairs: isotonic regression.

    By pooling of adjacent violators (Ayer et al., Ann. Math. Stat. 26, 1955).
    """
    pools: list[tuple[float, int]] = []  # mean and size
    for value in log_divisors.tolist():
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    return torch.tensor([mean for mean, size in pools for _ in range(size)], dtype=log_divisors.dtype)


def smooth(log_divisors: Tensor) -> Tensor:
    """The nearest divisors whose logarithm is a sum of a few slow cosines over the pairs (a DCT-II)."""
    pairs = len(log_divisors)
    middle = torch.arange(pairs, dtype=torch.float64) + 0.5
    waves = torch.stack(
        [torch.cos(math.pi * wave * middle / pairs) for wave in range(min(SMOOTH_WAVES, pairs))]
    )
    waves = waves / waves.norm(dim=1, keepdim=True)
    nearest: Tensor = waves.T @ (waves @ log_divisors.double())
    return nearest.to(log_divisors.dtype)


SHAPES: dict[str, Projection] = {"free": free, "monotone": monotone, "smooth": smooth}


def project(vector: Vector, shape: str, keep: int) -> Vector:
    """The vector of a shape that is nearest to one.

    Args:
        vector: Any.
        shape: A name of `SHAPES`; of the pairs that are not kept.
        keep: So many of the fastest pairs keep their frequencies.
    """
    rest = SHAPES[shape](vector.log_divisors[keep:])
    divisors = torch.cat([torch.zeros(keep), rest]).clamp(-LARGEST, LARGEST)
    return Vector(divisors, vector.log_attention)
