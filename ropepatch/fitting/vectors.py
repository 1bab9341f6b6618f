"""What is fitted, as logarithms: a divisor per rotary pair and an attention factor; and their shapes.

Shapes: P rotary pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropepatch.scaling.rope import Frequencies, Rope, divisors
from ropepatch.scaling.searched import CustomDivisors

SMOOTH_WAVES = 6  # cosines over the pairs of which a smooth vector is made
# Beyond it a pair stands still: at a divisor of e^12 the fastest pair turns 6 times in a million tokens.
LARGEST = 12.0


@dataclass(frozen=True, eq=False)
class Vector:
    """A point of the space that is searched.

    Args:
        log_divisors: ln(theta_i / theta'_i), float32 [P], fastest pair first.
        log_attention: ln a, float32 [].
    """

    log_divisors: Tensor
    log_attention: Tensor

    @classmethod
    def of(cls, frequencies: Frequencies, rope: Rope) -> Vector:
        """The vector of some frequencies; a pair that does not rotate gets the largest divisor."""
        logarithms = divisors(rope.inv_freq(), frequencies.inv_freq).log()
        a = math.log(frequencies.attention_factor / rope.carried_attention_factor)
        return cls(logarithms.clamp(-LARGEST, LARGEST).float(), torch.tensor(a, dtype=torch.float32))

    @classmethod
    def unscaled(cls, rope: Rope) -> Vector:
        """The vector that leaves a rope as it is."""
        return cls(torch.zeros(rope.num_pairs), torch.zeros(()))

    def flat(self) -> Tensor:
        """Both in one tensor [P + 1]: the divisors, then the attention factor."""
        return torch.cat([self.log_divisors, self.log_attention[None]])

    def numbers(self) -> tuple[float, ...]:
        """The numbers of `flat`, JSON-ready."""
        return tuple(self.flat().tolist())

    @classmethod
    def from_flat(cls, values: Tensor | Sequence[float]) -> Vector:
        """The inverse of `flat` and of `numbers`."""
        values = torch.as_tensor(values)
        return cls(values[:-1], values[-1])

    def scaling(self, factor: float) -> CustomDivisors:
        """The method that says the same, to 8 digits.

        Args:
            factor: s, the target over the original window.
        """
        ratios, a = self.log_divisors.detach().double().exp(), math.exp(self.log_attention.item())
        return CustomDivisors.rounded(ratios, a, factor=factor, digits=8)


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


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {"free": free, "monotone": monotone, "smooth": smooth}


def project(vector: Vector, shape: str, keep: int) -> Vector:
    """The nearest vector of a shape; its ``keep`` fastest pairs keep their frequencies."""
    rest = SHAPES[shape](vector.log_divisors[keep:])
    divisors = torch.cat([torch.zeros(keep), rest]).clamp(-LARGEST, LARGEST)
    return Vector(divisors, vector.log_attention)
