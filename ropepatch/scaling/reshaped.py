"""Methods that stop, round or fade pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ropepatch.errors import RopepatchError
from ropepatch.scaling.method import Scaling, find_method
from ropepatch.scaling.powers import AdjustedBase
from ropepatch.scaling.rope import Frequencies, Rope, wavelengths
from ropepatch.settings.parameters import AboveOne, FromZero, FromZeroToOne, Positive, WholeFromOne, required


@dataclass(frozen=True, kw_only=True)
class GiraffePower(Scaling):
    """Fade slow pairs by a power of their index (Pal et al. 2023).

    Args:
        power: The exponent p; larger fades more.
        interpolate: Divide by s first.
    """

    name = "giraffe-power"
    formula = "θ_i · (1 − 2i/d)^p"
    paper = "arXiv:2308.10882"

    power: FromZero = 0.1
    interpolate: bool = False

    def frequencies(self, rope: Rope, length: int | None = None) -> Frequencies:
        inv_freq = rope.inv_freq() / (self.factor if self.interpolate else 1.0)
        fade = (1 - rope.exponents().double()) ** self.power
        return Frequencies((inv_freq.double() * fade).float(), rope.carried_attention_factor)


@dataclass(frozen=True, kw_only=True)
class GiraffeTruncated(Scaling):
    """Three bands: keep, hold at one slow frequency, stop (Pal et al. 2023; abacusai/Long-Context).

    Args:
        cutoff: T: wavelengths up to T tokens are kept, up to 8T held at 16T, longer ones stopped; None for L.
        interpolate: Divide by s first.
    """

    name = "giraffe-truncated"
    formula = "θ_i if θ_i ≥ c = 2π/T; c/16 if ≥ c/8; else 0"
    paper = "arXiv:2308.10882"

    cutoff: Positive | None = None
    interpolate: bool = False

    def frequencies(self, rope: Rope, length: int | None = None) -> Frequencies:
        inv_freq = rope.inv_freq() / (self.factor if self.interpolate else 1.0)
        c = 2 * math.pi / (self.cutoff or rope.original_max_position_embeddings)
        slow = torch.where(inv_freq >= c / 8, inv_freq.new_tensor(c / 16), 0.0)
        return Frequencies(torch.where(inv_freq >= c, inv_freq, slow), rope.carried_attention_factor)


@dataclass(frozen=True, kw_only=True)
class PartialRope(Scaling):
    """Keep the fastest pairs, stop the others (Barbero et al. 2024, p-RoPE); p = 0 is NoPE.

    Args:
        partial: p, the share of pairs that still rotate, 0 to 1.
    """

    name = "p-rope"
    formula = "θ_i for the first p·d/2 pairs, else 0"
    paper = "arXiv:2410.06205"

    partial: FromZeroToOne = 0.75

    def frequencies(self, rope: Rope, length: int | None = None) -> Frequencies:
        kept = int(self.partial * rope.rotary_dim // 2)
        fast = rope.inv_freq()[:kept]
        if not rope.is_scaled:  # as transformers computes them: float32 pow depends on the vector's length
            fast = 1.0 / (rope.rope_theta ** rope.exponents()[:kept])
        stopped = fast.new_zeros(rope.num_pairs - kept)
        return Frequencies(torch.cat((fast, stopped)), rope.carried_attention_factor)


@dataclass(frozen=True, kw_only=True)
class _OverAnother(Scaling):
    over: str

    def __post_init__(self) -> None:
        super().__post_init__()
        inner = find_method(self.over)
        plain = not (inner.length_dependent or issubclass(inner, _OverAnother))
        needs = {*required(inner)} - {"factor", *self._given}
        self._require(plain and not needs, "over", "a static method that needs no more parameters")

    @property
    def _given(self) -> dict[str, Any]:
        """Parameters of the other method."""
        return {}

    def _inner(self, rope: Rope) -> Frequencies:
        try:
            return find_method(self.over)(factor=self.factor, **self._given).frequencies(rope)
        except RopepatchError as error:
            raise RopepatchError(
                f"{self.name} over {self.over}: {error}", hint="use --set over=ntk"
            ) from error


@dataclass(frozen=True, kw_only=True)
class Resonance(_OverAnother):
    """Round every wavelength to whole tokens, after another method (Wang et al. 2024).

    The released code repeats one table, so that a period is exact at any position. A stock rope multiplies
    positions by float32 frequencies: there cos is off by about 2e-3 at position 20,000, and more beyond.

    Args:
        over: The method whose wavelengths are rounded, with its default parameters.
    """

    name = "resonance"
    formula = "2π / round(2π/θ′_i), θ′ of another method"
    paper = "arXiv:2403.00071"

    composing = MappingProxyType({"over": "ntk"})

    over: str = "yarn"

    def frequencies(self, rope: Rope, length: int | None = None) -> Frequencies:
        inner = self._inner(rope)
        return Frequencies(
            (2 * math.pi / wavelengths(inner.inv_freq).round()).float(), inner.attention_factor
        )


@dataclass(frozen=True, kw_only=True)
class ClippedRope(_OverAnother):
    """Fade the slowest pairs to zero, after another method (CoPE, clipped RoPE).

    Args:
        over: The method whose slowest pairs are faded, with its default parameters; the authors train over
            "abf".
        rope_theta: The base b' of `over=abf`.
        pairs: How many of them.
        hard: Stop them all instead of fading along a half cosine.
    """

    name = "cope"
    formula = "θ′_i of another method × half a cosine over the last 20 pairs"
    paper = "arXiv:2602.05258"

    over: str = "ntk"
    pairs: WholeFromOne = 20
    hard: bool = False
    rope_theta: AboveOne | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        unused = self.rope_theta is not None and self.over != AdjustedBase.name
        self._require(not unused, "rope_theta", f"left out with over={self.over}")

    @property
    def _given(self) -> dict[str, Any]:
        return {} if self.rope_theta is None else {"rope_theta": self.rope_theta}

    def frequencies(self, rope: Rope, length: int | None = None) -> Frequencies:
        inner = self._inner(rope)
        n = min(self.pairs, rope.num_pairs)
        fade = torch.ones(rope.num_pairs, dtype=torch.float64)
        fade[-n:] = 0.0 if self.hard else (1 + torch.linspace(0, math.pi, n, dtype=torch.float64).cos()) / 2
        fade[-1] = 0.0  # cos(pi) is not exactly -1 in every library
        return Frequencies((inner.inv_freq.double() * fade).float(), inner.attention_factor)
