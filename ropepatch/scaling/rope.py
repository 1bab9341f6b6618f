"""A model's rotary frequencies before any scaling.

Letters, as in the papers: d rotary_dim, i = 0 .. d/2-1 the rotary pairs, b rope_theta, theta_i = b^(-2i/d)
radians per token, lambda_i = 2 pi / theta_i tokens, L original_max_position_embeddings, s factor = target /
L, r_i = L / lambda_i rotations inside the window, a attention_factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from ropepatch.errors import RopepatchError
from ropepatch.settings import MAX_NUMBER, Settings, expected, shown

STOPPED = 1e30  # the divisor of a pair that does not rotate: infinity is not JSON, and cos is 1 all the same
LARGEST_BASE = 1e30  # powers of a larger one leave the range of numbers
Whole = Annotated[int, expected("a whole number")]
AnyNumber = Annotated[float, expected("a number")]


class Frequencies(NamedTuple):
    """The numbers of a rotary module: `inv_freq` [D/2] float32, radians per token, fastest first."""

    inv_freq: Tensor
    attention_factor: float = 1.0  # multiplies cos and sin, hence logits by its square

    def distance(self, other: Frequencies) -> float:
        """The greatest difference between any two numbers; infinite where there are fewer or more pairs."""
        if self.inv_freq.shape != other.inv_freq.shape:
            return math.inf
        distance = (self.inv_freq - other.inv_freq).abs().max().item()
        return max(distance, abs(self.attention_factor - other.attention_factor))


class Rope(Settings):
    """The rope of one model.

    Args:
        rotary_dim: D, even: head_dim * partial_rotary_factor.
        rope_theta: The base b.
        original_max_position_embeddings: L, the window in tokens that the frequencies below were trained in.
        carried: The D/2 frequencies of a model that is scaled already (radians per token); None: b^(-2i/d).
        carried_attention_factor: The attention factor such a model already applies.
    """

    rotary_dim: Whole
    rope_theta: AnyNumber
    original_max_position_embeddings: Whole
    carried: Annotated[tuple[Any, ...] | None, expected("a tuple of numbers or None")] = None
    carried_attention_factor: AnyNumber = 1.0

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
        """Raise a `RopepatchError` where no rotary embedding has these numbers."""
        d, b, window = self.rotary_dim, self.rope_theta, self.original_max_position_embeddings
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
        if window > MAX_NUMBER:  # tensors of integers hold a million times that
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
        """The number of rotary pairs, D/2."""
        return self.rotary_dim // 2

    @property
    def rotating(self) -> int:
        """The number of the first pairs that rotate: fewer than D/2 in Gemma 4's global layers."""
        if self.carried is None:
            return self.num_pairs
        return max((i + 1 for i, one in enumerate(self.carried) if one), default=0)

    @property
    def is_scaled(self) -> bool:
        """True for a model whose rotating pairs already depart from b^(-2i/d)."""
        if self.carried is None:
            return False
        whole = self.rotating == self.num_pairs  # a plain rope carries nothing
        plain = tuple(self._plain(self.rope_theta).tolist())
        return whole or self.carried_attention_factor != 1 or self.carried != plain

    def exponents(self) -> Tensor:
        """2i/d for every pair: [D/2] float32."""
        return torch.arange(0, self.rotary_dim, 2, dtype=torch.int64).float() / self.rotary_dim

    def inv_freq(self) -> Tensor:
        """theta_i: [D/2] float32, radians per token, in the expression order of transformers."""
        if self.carried is not None:
            return torch.tensor(self.carried, dtype=torch.float32)
        return self._plain(self.rope_theta)

    def _plain(self, rope_theta: float) -> Tensor:
        """b^(-2i/d) of the pairs that rotate, 0 of the others: [D/2] float32."""
        inv_freq = torch.zeros(self.num_pairs, dtype=torch.float32)
        inv_freq[: self.rotating] = 1.0 / (rope_theta ** self.exponents()[: self.rotating])
        return inv_freq

    def unscaled(self) -> Tensor:
        """b^(-2i/d), whatever the model carries: [D/2] float64, radians per token."""
        return self.rope_theta ** -(
            torch.arange(0, self.rotary_dim, 2, dtype=torch.float64) / self.rotary_dim
        )

    def rebased(self, rope_theta: float) -> Tensor:
        """The frequencies at another base b': [D/2]; a scaled rope changes in the same ratios."""
        if not self.is_scaled:
            return self._plain(rope_theta)
        return self.inv_freq() * (rope_theta / self.rope_theta) ** -self.exponents()


def _is_frequency(value: Any) -> bool:
    """Tell a finite number from 0; a zero with a sign comes of a negative divisor, and is no frequency."""
    return isinstance(value, int | float) and math.isfinite(value) and math.copysign(1, value) > 0


def divisors(before: Tensor, after: Tensor) -> Tensor:
    """Divide frequencies before by those after, elementwise.

    Args:
        before: theta_i: [D/2], radians per token.
        after: theta'_i: [D/2].

    Returns:
        theta_i / theta'_i: [D/2] float64; 1 where both are equal, `STOPPED` where a pair no longer rotates.
    """
    ratios = before.double() / after.double()
    return torch.where(before == after, 1.0, ratios).clamp(max=STOPPED)


def wavelengths(inv_freq: Tensor) -> Tensor:
    """Tokens per rotation, 2 pi / inv_freq: float64, infinite where a pair does not rotate."""
    return 2 * math.pi / inv_freq.double()


def rotations(inv_freq: Tensor, window: int) -> Tensor:
    """Rotations of every pair inside `window` tokens: float64."""
    return window * inv_freq.double() / (2 * math.pi)
