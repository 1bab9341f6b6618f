"""Methods with given divisors: searched, or copied from a paper."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from ropepatch.errors import RopepatchError
from ropepatch.scaling.rope import ORIGINAL, Rope, Scaling
from ropepatch.settings import Amount, Several

# So that every frequency fits float32
Divisors = Several[Annotated[float, Field(ge=1e-30, le=1e30)]]


def divided(rope: Rope, divisors: tuple[float, ...], name: str) -> Tensor:
    """Compute theta_i / divisor_i in the expression order of transformers' `longrope`: [d/2]."""
    if len(divisors) != rope.num_pairs:
        raise RopepatchError(
            f"{name}: this model has {rope.num_pairs} rotary pairs, got {len(divisors)} divisors",
            hint="give one number per pair, fastest pair first",
        )
    divisor = torch.tensor(divisors, dtype=torch.float32, device="cpu")
    if rope.is_scaled:
        return rope.inv_freq() / divisor
    return 1.0 / (divisor * rope.rope_theta ** rope.exponents())


def longrope_parameters(
    rope: Rope,
    factor: float,
    attention_factor: float,
    *,
    short: tuple[float, ...],
    long: tuple[float, ...],
) -> dict[str, Any]:
    """Return transformers' `longrope` parameters with the divisors up to L tokens and beyond."""
    return {
        "rope_type": "longrope",
        "factor": float(factor),
        ORIGINAL: rope.original_max_position_embeddings,
        "short_factor": list(short),
        "long_factor": list(long),
        "attention_factor": float(attention_factor),
    }


def longrope_attention_factor(factor: float, window: float) -> float:
    """Compute sqrt(1 + ln s / ln L), the authors' attention factor and the engines' default."""
    return math.sqrt(1 + math.log(factor) / math.log(window)) if factor > 1 else 1.0


class CustomDivisors(Scaling):
    """Any vector of divisors, one per pair, fastest pair first.

    Args:
        divisors: theta_i / theta'_i; 1 keeps a pair, s interpolates it, 1e30 stops it.
        attention_factor: Multiplies cos and sin.
    """

    name = "custom"
    formula = "θ_i / f_i, f and a given"
    paper = "–"

    divisors: Divisors
    attention_factor: Amount = 1.0

    def _inv_freq(self, rope: Rope) -> Tensor:
        return divided(rope, self.divisors, self.name)

    def _temperature(self, rope: Rope) -> float:
        return self.attention_factor

    def _native(self, rope: Rope) -> dict[str, Any]:
        a = self.attention_factor
        return longrope_parameters(
            rope, self.factor, a, short=self.divisors, long=self.divisors
        )


class LongRoPE(Scaling):
    """Searched divisors, one vector for all lengths (Ding et al. 2024).

    Args:
        long_factor: The divisors, fastest pair first; ropepatch does not search them.
        attention_factor: Multiplies cos and sin; None for sqrt(1 + ln s / ln L).
    """

    name = "longrope"
    formula = "θ_i / f_i, f given; a = √(1 + ln s / ln L)"
    paper = "arXiv:2402.13753"
    composes = False

    long_factor: Divisors
    attention_factor: Amount | None = None

    def _temperature(self, rope: Rope) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return longrope_attention_factor(
            self.factor, rope.original_max_position_embeddings
        )

    def _inv_freq(self, rope: Rope) -> Tensor:
        return divided(rope, self.long_factor, self.name)

    def _native(self, rope: Rope) -> dict[str, Any]:
        a = self._temperature(rope)
        return longrope_parameters(
            rope, self.factor, a, short=self.long_factor, long=self.long_factor
        )


class LongRoPESwitch(LongRoPE):
    """LongRoPE with a second vector for lengths up to L, as in the Phi models.

    Args:
        short_factor: The divisors up to L tokens, fastest pair first.
    """

    name = "longrope-switch"
    formula = "θ_i / f_i, one given f up to L tokens, another beyond"
    paper = "arXiv:2402.13753"
    length_dependent = True

    short_factor: Divisors

    def at(self, rope: Rope, length: int | None) -> Scaling:
        beyond = (length or 0) > rope.original_max_position_embeddings
        divisors = self.long_factor if beyond else self.short_factor
        return LongRoPE(
            factor=self.factor,
            long_factor=divisors,
            attention_factor=self._temperature(rope),
        )

    def _native(self, rope: Rope) -> dict[str, Any]:
        a = self._temperature(rope)
        return longrope_parameters(
            rope, self.factor, a, short=self.short_factor, long=self.long_factor
        )
