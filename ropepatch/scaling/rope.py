"""A model's RoPE before scaling.

Letters, as in the papers: d rotary_dim, i = 0 .. d/2-1 the rotary dimension pairs, b rope_theta, theta_i =
b^(-2i/d) radians per token, lambda_i = 2 pi / theta_i tokens, L original_max_position_embeddings, s factor =
target / L, r_i = L / lambda_i rotations within L tokens, a attention_factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropepatch.errors import RopepatchError
from ropepatch.settings import MAX_NUMBER, Settings, shown

ORIGINAL = "original_max_position_embeddings"  # the key of L in rope_parameters
STOPPED = 1e30  # the divisor of a pair that does not rotate: JSON has no infinity, and cos is 1 all the same
LONGEST = 2**24  # tokens: beyond it, float32 cannot distinguish neighbouring positions
LARGEST_BASE = 1e30  # powers of a larger one overflow


class Frequencies(NamedTuple):
    """The values of a rotary module: `inv_freq` [d/2] float32, radians per token, fastest first."""

    inv_freq: Tensor
    # Multiplies cos and sin, hence attention logits by its square
    attention_factor: float = 1.0

    def distance(self, other: Frequencies) -> float:
        """Return the largest absolute difference of any value; infinite if the numbers of pairs differ."""
        if self.inv_freq.shape != other.inv_freq.shape:
            return math.inf
        distance = (self.inv_freq - other.inv_freq).abs().max().item()
        return max(distance, abs(self.attention_factor - other.attention_factor))


class Rope(Settings):
    """The RoPE parameters of one model.

    Args:
        rotary_dim: d, even: head_dim * partial_rotary_factor.
        rope_theta: The base b.
        original_max_position_embeddings: L, the context length that the model was trained with, in tokens.
        carried: The d/2 frequencies of an already scaled model, in radians per token; None for b^(-2i/d).
        carried_attention_factor: The attention factor of an already scaled model.
    """

    rotary_dim: int
    rope_theta: float
    original_max_position_embeddings: int
    carried: tuple[Any, ...] | None = None
    carried_attention_factor: float = 1.0

    def __init__(
        self,
        rotary_dim: int,
        rope_theta: float,
        original_max_position_embeddings: int,
        carried: Sequence[float] | None = None,
        carried_attention_factor: float = 1.0,
    ) -> None:
        super().__init__(
            rotary_dim=rotary_dim,
            rope_theta=rope_theta,
            original_max_position_embeddings=original_max_position_embeddings,
            carried=carried,
            carried_attention_factor=carried_attention_factor,
        )

    def check(self) -> None:
        """Raise a `RopepatchError` if the parameters are invalid."""
        d, b, window = (
            self.rotary_dim,
            self.rope_theta,
            self.original_max_position_embeddings,
        )
        if d < 2 or d % 2:
            raise RopepatchError(
                f"rotary dimension must be even and at least 2, got {d}",
                hint="rotary dimension = head_dim * partial_rotary_factor: check both in config.json",
            )
        if not 1 < b <= LARGEST_BASE:
            raise RopepatchError(
                f"rope_theta must be a number above 1 and at most {LARGEST_BASE:g}, got {b}",
                hint="LLaMA uses 10000.0; look it up in the model's own card",
            )
        if window < 2:
            raise RopepatchError(
                f"max_position_embeddings must be at least 2, got {window}",
                hint="write the model's context length in tokens",
            )
        if window > MAX_NUMBER:
            raise RopepatchError(
                f"max_position_embeddings must be at most {MAX_NUMBER:g}, got {shown(window)}",
                hint="check it, and the factor in the model's rope_parameters",
            )
        if self.carried is None:
            return
        if len(self.carried) != self.num_pairs:
            raise RopepatchError(
                f"{self.num_pairs} rotary pairs need as many frequencies, got {len(self.carried)}"
            )
        if not all(map(_is_frequency, self.carried)):
            raise RopepatchError(
                f"the frequencies of RoPE must be finite and at least 0, got {self.carried}",
                hint="check the factors in the model's rope_parameters",
            )

    @property
    def num_pairs(self) -> int:
        """The number of rotary dimension pairs, d/2."""
        return self.rotary_dim // 2

    @property
    def rotating(self) -> int:
        """The number of pairs that rotate: fewer than d/2 in Gemma 4's global layers."""
        if self.carried is None:
            return self.num_pairs
        return max((i + 1 for i, one in enumerate(self.carried) if one), default=0)

    @property
    def is_scaled(self) -> bool:
        """Whether the rotating pairs already differ from b^(-2i/d)."""
        if self.carried is None:
            return False
        all_rotate = (
            self.rotating == self.num_pairs
        )  # unscaled frequencies are carried only if some do not
        plain = tuple(self._plain(self.rope_theta).tolist())
        return all_rotate or self.carried_attention_factor != 1 or self.carried != plain

    def exponents(self) -> Tensor:
        """Return 2i/d for every pair: [d/2] float32."""
        return (
            torch.arange(0, self.rotary_dim, 2, dtype=torch.int64, device="cpu").float()
            / self.rotary_dim
        )

    def inv_freq(self) -> Tensor:
        """Return theta_i, in the expression order of transformers: [d/2] float32, radians per token."""
        if self.carried is not None:
            return torch.tensor(self.carried, dtype=torch.float32, device="cpu")
        return self._plain(self.rope_theta)

    def _plain(self, rope_theta: float) -> Tensor:
        """b^(-2i/d) for the pairs that rotate, 0 for the others: [d/2] float32."""
        inv_freq = torch.zeros(self.num_pairs, dtype=torch.float32, device="cpu")
        inv_freq[: self.rotating] = 1.0 / (
            rope_theta ** self.exponents()[: self.rotating]
        )
        return inv_freq

    def unscaled(self) -> Tensor:
        """Return b^(-2i/d), also for a scaled model: [d/2] float64, radians per token."""
        return self.rope_theta ** -(
            torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device="cpu")
            / self.rotary_dim
        )

    def rebased(self, rope_theta: float) -> Tensor:
        """Return the frequencies for another base b': [d/2]; scaled ones change by the same ratios."""
        if not self.is_scaled:
            return self._plain(rope_theta)
        return self.inv_freq() * (rope_theta / self.rope_theta) ** -self.exponents()


def _is_frequency(value: Any) -> bool:
    """Whether a value is finite and at least 0; -0.0 comes from a negative divisor."""
    return (
        isinstance(value, int | float)
        and math.isfinite(value)
        and math.copysign(1, value) > 0
    )


def divisors(before: Tensor, after: Tensor) -> Tensor:
    """Divide the frequencies before scaling by those after it, elementwise.

    Args:
        before: theta_i: [d/2], radians per token.
        after: theta'_i: [d/2].

    Returns:
        theta_i / theta'_i: [d/2] float64; 1 if both are equal, `STOPPED` if a pair no longer rotates.
    """
    ratios = before.double() / after.double()
    return torch.where(before == after, 1.0, ratios).clamp(max=STOPPED)


def wavelengths(inv_freq: Tensor) -> Tensor:
    """Return the tokens per rotation, 2 pi / inv_freq: float64, infinite if a pair does not rotate."""
    return 2 * math.pi / inv_freq.double()


def rotations(inv_freq: Tensor, window: int) -> Tensor:
    """Return the rotations of every pair within `window` tokens: float64."""
    return window * inv_freq.double() / (2 * math.pi)
