"""What is fitted: one divisor per rotary pair and one attention factor, both as logarithms.

Shapes: P rotary pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ropepatch.scaling.rope import Frequencies, Rope, divisors
from ropepatch.scaling.searched import CustomDivisors

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

    def flat(self) -> Tensor:
        """Both in one tensor [P + 1]: the divisors, then the attention factor."""
        return torch.cat([self.log_divisors, self.log_attention[None]])

    @classmethod
    def from_flat(cls, values: Tensor) -> Vector:
        """The inverse of `flat`."""
        return cls(values[:-1], values[-1])

    def scaling(self, factor: float) -> CustomDivisors:
        """The method that says the same, to 8 digits.

        Args:
            factor: s, the target over the original window.
        """
        ratios, a = self.log_divisors.detach().double().exp(), math.exp(self.log_attention.item())
        return CustomDivisors.rounded(ratios, a, factor=factor, digits=8)
