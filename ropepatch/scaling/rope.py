"""The values of a scaling: RoPE before it, frequencies after it, the base of all methods, and bands of pairs.

Letters, as in the papers: d rotary_dim, i = 0 .. d/2-1 the rotary dimension pairs, b rope_theta, theta_i =
b^(-2i/d) radians per token, lambda_i = 2 pi / theta_i tokens, L original_max_position_embeddings, s factor =
target / L, r_i = L / lambda_i rotations within L tokens, a attention_factor.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, final

import torch
from torch import Tensor

from ropepatch.errors import RopepatchError, argument
from ropepatch.settings import MAX_NUMBER, FromOne, Named, Registry, shown

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
        apart = (self.inv_freq - other.inv_freq).abs().tolist()
        apart.append(abs(self.attention_factor - other.attention_factor))
        distance: float = max(apart)
        return distance


@dataclass(frozen=True)
class Rope:
    """The RoPE parameters of one model.

    Args:
        rotary_dim: d, even: head_dim * partial_rotary_factor; 0 without RoPE.
        rope_theta: The base b.
        original_max_position_embeddings: L, the context length that the model was trained with, in tokens.
        carried: The d/2 frequencies of an already scaled model, in radians per token; None for b^(-2i/d).
        carried_attention_factor: The attention factor of an already scaled model.
    """

    rotary_dim: int
    rope_theta: float
    original_max_position_embeddings: int
    carried: tuple[float, ...] | None = None
    carried_attention_factor: float = 1.0

    def __post_init__(self) -> None:
        d, b = self.rotary_dim, self.rope_theta
        window = self.original_max_position_embeddings
        if d % 2 or (d < 2 and self.carried != ()):
            raise RopepatchError(
                f"rotary dimension must be even and at least 2, got {d}",
                hint="rotary dimension = head_dim * partial_rotary_factor: check both in config.json",
            )
        if not 1 < b <= LARGEST_BASE:
            raise RopepatchError(
                f"rope_theta must be a number above 1 and at most {LARGEST_BASE:g}, got {b}",
                hint="LLaMA uses 10000.0; look it up in the model's own card",
            )
        if not 2 <= window <= MAX_NUMBER:
            raise RopepatchError(
                f"max_position_embeddings must be from 2 to {MAX_NUMBER:g}, got {shown(window)}",
                hint="write the model's context length in tokens; check the factor in its rope_parameters",
            )
        if self.carried is None:
            return
        if len(self.carried) != self.num_pairs:
            raise RopepatchError(
                f"{self.num_pairs} rotary pairs need as many frequencies, got {len(self.carried)}"
            )
        if not all(0 <= frequency < math.inf for frequency in self.carried):
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
        if not self.carried:
            return False
        # Unscaled frequencies are carried only if some do not
        all_rotate = self.rotating == self.num_pairs
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


SAME_DIVISOR = 1e-5  # relative, for a divisor: float32 tables agree to about 4e-7


class Band(NamedTuple):
    """Consecutive rotary dimension pairs scaled in the same way.

    Args:
        fate: kept, blended, interpolated (divided by exactly s), stretched (by more), sped up or stopped.
        first: Index of the fastest pair.
        last: Index of the slowest pair.
        wavelength: Tokens per rotation of these two pairs, before scaling.
        rotations: Rotations of these two pairs within L tokens, before scaling.
        divisor: theta / theta' of these two pairs.
    """

    fate: str
    first: int
    last: int
    wavelength: tuple[float, float]
    rotations: tuple[float, float]
    divisor: tuple[float, float]


def bands(rope: Rope, inv_freq: Tensor, factor: float) -> list[Band]:
    """Group the pairs of a model by what the scaled frequencies [d/2] do to them, fastest first."""
    before = rope.inv_freq()
    divisor = (
        (before.double() / inv_freq.double()).masked_fill(before == 0, 1.0).tolist()
    )
    rotated = rotations(before, rope.original_max_position_embeddings).tolist()
    columns = wavelengths(before).tolist(), rotated, divisor
    runs = itertools.groupby(
        range(rope.num_pairs), key=lambda pair: _fate(divisor[pair], factor)
    )
    ends = ((fate, pairs[0], pairs[-1]) for fate, run in runs if (pairs := list(run)))
    return [
        Band(fate, first, last, *((column[first], column[last]) for column in columns))
        for fate, first, last in ends
    ]


def _fate(divisor: float, factor: float) -> str:
    if abs(divisor - 1) <= SAME_DIVISOR:
        return "kept"
    if divisor < 1:
        return "sped up"
    if divisor > 1e20:
        return "stopped"
    if abs(divisor / factor - 1) <= SAME_DIVISOR:
        return "interpolated"
    return "blended" if divisor < factor else "stretched"


class Method(Named):
    """One published method of context extension."""

    listed_by = "ropepatch methods"
    kind: ClassVar[str]
    saved_as: ClassVar[str]
    length_dependent: ClassVar[bool] = False
    changes_frequencies: ClassVar[bool] = False
    # The defaults for RoPE that is already scaled
    composing: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    @classmethod
    def for_target(cls, rope: Rope, target: int, parameters: Mapping[str, Any]) -> Self:
        """Make the method with these parameters for a target length N = `target`."""
        return cls(**parameters)

    def fitted(self, window: int, target: int) -> Self:
        """Return the method with all its parameters set, for L = `window` and N = `target` tokens."""
        return self

    def factor_for(self, window: int, target: int) -> float:
        """Return s, for L = `window` and N = `target` tokens."""
        return target / window

    def on_top(self) -> str:
        """Say with which parameters the method is applied to RoPE that is scaled already."""
        if not self.changes_frequencies:
            return ""
        values = [
            f"{key}={value}"
            for key, value in self.composing.items()
            if getattr(self, key) == value
        ]
        parameters = f" ({', '.join(values)})" if values else ""
        return f"; {self.name} is applied on top of it{parameters}"


class Scaling(Method):
    """One published method of RoPE scaling.

    A subclass implements `_inv_freq(rope)`, `_temperature(rope)` if it has one, and `_native(rope)` if a
    rope type of transformers computes bit-identical frequencies.

    Args:
        factor: s, the target length over the original context length; at least 1.
    """

    common = ("factor",)
    kind = "scaling"
    changes_frequencies = True
    saved_as = "longrope"  # the rope type in the config of an extended LLaMA
    composes: ClassVar[bool] = True  # whether it applies to RoPE that is already scaled
    factor: FromOne

    @classmethod
    def for_target(cls, rope: Rope, target: int, parameters: Mapping[str, Any]) -> Self:
        """Make the scaling with target / L as factor, unless the parameters contain one."""
        composing = cls.composing if rope.is_scaled else {}
        return cls(
            **{
                "factor": target / rope.original_max_position_embeddings,
                **composing,
                **parameters,
            }
        )

    def factor_for(self, window: int, target: int) -> float:
        """Return s, which the user may have set."""
        return self.factor

    @final
    def frequencies(self, rope: Rope, length: int | None = None) -> Frequencies:
        """Scale the frequencies of a model.

        Args:
            rope: The RoPE to scale.
            length: The planned length in tokens, for length-dependent methods; None means L.
        """
        if rope.is_scaled and not self.composes:
            use = "`linear`, `ntk`, `ntk-by-parts` or `custom`, which compose"
            for parameter in self.composing.items():
                use = argument(*parameter)
            raise RopepatchError(
                f"{self.name} is a formula of rope_theta and does not apply to RoPE that is already scaled",
                hint=f"use {use}, or start from the unscaled base model",
            )
        static = self.at(rope, length)
        inv_freq = static._inv_freq(rope)
        sound = isinstance(inv_freq, Tensor) and inv_freq.shape == (rope.num_pairs,)
        if not sound or not inv_freq.isfinite().all():
            raise RopepatchError(
                f"{type(static).__name__}._inv_freq must return {rope.num_pairs} finite numbers, got "
                f"{shown(inv_freq)}",
                hint="one for each rotary pair, radians per token",
            )
        if rope.carried is not None:
            inv_freq = inv_freq.masked_fill(rope.inv_freq() == 0, 0.0)
        return Frequencies(
            inv_freq, rope.carried_attention_factor * static._temperature(rope)
        )

    @final
    def native(self, rope: Rope) -> dict[str, Any] | None:
        """Return the RoPE parameters with which transformers computes the same frequencies.

        They lack an unchanged `rope_theta`. None if no rope type fits, or if `rope` is already scaled or
        rotates only some pairs.
        """
        return None if rope.carried else self._native(rope)

    def at(self, rope: Rope, length: int | None) -> Scaling:
        """Return the equivalent static method at a length; a static method returns itself."""
        return self

    @abstractmethod
    def _inv_freq(self, rope: Rope) -> Tensor:
        """Compute theta'_i: [d/2] float32, radians per token."""

    def _temperature(self, rope: Rope) -> float:
        """Compute a, which multiplies cos and sin, hence attention logits by its square."""
        return 1.0

    def _native(self, rope: Rope) -> dict[str, Any] | None:
        return None


METHODS: Registry[Scaling] = Registry(  # `ropepatch.scaling` fills it
    "method",
    other_names={
        "pi": "linear",
        "position-interpolation": "linear",
        "ntk-aware": "ntk",
        "dynamic-ntk": "dynamic",
        "proportional": "p-rope",
        "nope": "p-rope",
        "su": "longrope",
        "llama-3": "llama3",
    },
)
