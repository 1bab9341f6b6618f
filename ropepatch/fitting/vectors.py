"""The vector of a fit and its starts: divisors, an attention factor, and query factors.

Shapes: P rotary pairs; Q query factors, by layer, amplitude or phase, head and pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ropepatch.attention import REMAPPINGS
from ropepatch.errors import RopepatchError, argument
from ropepatch.scaling import formulas, make_scaling
from ropepatch.scaling.rope import Frequencies, Rope, divisors
from ropepatch.scaling.searched import CustomDivisors
from ropepatch.settings import seed_of

SPREAD = 0.5  # log-scale noise on the slowest pair of a mixture; it falls to 0 at the fastest
STOPPED = 5.0  # largest log-divisor in a mixture
WARMEST = 0.15  # largest log attention factor of a mixture
# Largest log-divisor. With a divisor of e^12 even the fastest pair rotates only once in a million tokens.
LARGEST = 12.0


@dataclass(frozen=True, eq=False)
class Vector:
    """The logarithms of a divisor per rotary pair, an attention factor and query factors, float32."""

    log_divisors: Tensor  # ln(theta_i / theta'_i) [P], fastest pair first
    log_attention: Tensor  # ln a, []
    log_queries: Tensor = field(default_factory=lambda: torch.zeros(0))  # ln and phase [Q]; empty for none

    @classmethod
    def of(cls, frequencies: Frequencies, rope: Rope) -> Vector:
        """Return the vector of frequencies; a pair that does not rotate gets the largest divisor."""
        logarithms = divisors(rope.inv_freq(), frequencies.inv_freq).log()
        a = math.log(frequencies.attention_factor / rope.carried_attention_factor)
        return cls(logarithms.clamp(-LARGEST, LARGEST).float(), torch.tensor(a, dtype=torch.float32))

    @classmethod
    def unscaled(cls, rope: Rope) -> Vector:
        """Return the vector of the unscaled RoPE."""
        return cls(torch.zeros(rope.num_pairs), torch.zeros(()))

    def flat(self) -> Tensor:
        """Return one tensor [P + 1 + Q]: the divisors, the attention factor, the query factors."""
        return torch.cat([self.log_divisors, self.log_attention[None], self.log_queries])

    @classmethod
    def from_flat(cls, values: Tensor, pairs: int) -> Vector:
        """Invert `flat`."""
        return cls(values[:pairs], values[pairs], values[pairs + 1 :])

    def clamped(self) -> Vector:
        """Clamp log-divisors to `LARGEST`."""
        return replace(self, log_divisors=self.log_divisors.clamp(-LARGEST, LARGEST))

    def scaling(self, factor: float, heads: int = 1) -> CustomDivisors:
        """Return the method with this vector at s, the target length over the original length.

        Divisors have 8 digits; query factors, of so many heads per layer, have 4 decimals.
        """
        ratios, a = self.log_divisors.detach().double().exp(), math.exp(self.log_attention.item())
        custom = CustomDivisors.rounded(ratios, a, factor=factor, digits=8)
        if not self.log_queries.numel():
            return custom
        logs, phases = self.log_queries.detach().double().view(-1, 2, heads, len(ratios)).unbind(1)
        queries = torch.stack((logs.exp().clamp(min=1e-4), phases), -1).mul(1e4).round().div(1e4)
        return custom.model_copy(update={"queries": queries.tolist()})


def published(rope: Rope, factor: float) -> dict[str, Vector]:
    """Return the registry's static methods that need only a factor, if they apply to this RoPE."""
    starts = {}
    for name in formulas():
        try:
            starts[name] = Vector.of(make_scaling(name, factor=factor).frequencies(rope), rope)
        except RopepatchError:  # a formula of rope_theta, for a RoPE that is already scaled
            continue
    return starts


def named(name: str, rope: Rope, factor: float) -> Vector:
    """Return the vector of one method."""
    if name in REMAPPINGS:
        raise RopepatchError(
            f"{name} is a position remapping: it has no frequencies to start from",
            hint=argument("init", "auto"),
        )
    scaling = make_scaling(name, factor=factor)
    if scaling.length_dependent:
        raise RopepatchError(
            f"{name} depends on the length: a fit needs a static method to start from",
            hint=argument("init", "auto"),
        )
    return Vector.of(scaling.frequencies(rope), rope)


def mixtures(starts: Mapping[str, Vector], *, count: int, seed: int) -> dict[str, Vector]:
    """Draw random vectors between two starts, per rotary pair, with noise that grows towards slow pairs."""
    vectors = list(starts.values())
    pairs = len(vectors[0].log_divisors)
    draw = torch.Generator().manual_seed(seed_of("mixtures", seed) % 2**63)
    noise = SPREAD * (torch.arange(pairs) + 1) / pairs
    mixed = {}
    for index in range(count):
        one, other = torch.randint(len(vectors), (2,), generator=draw).tolist()
        share = torch.rand(pairs, generator=draw)
        if torch.rand(1, generator=draw) < 0.5:
            share = share.round()
        ends = [vectors[chosen].log_divisors.clamp(-1.0, STOPPED) for chosen in (one, other)]
        divisors = ends[0].lerp(ends[1], share) + noise * torch.randn(pairs, generator=draw)
        mixed[f"mixture {index}"] = Vector(divisors, WARMEST * torch.rand(1, generator=draw)[0])
    return mixed
