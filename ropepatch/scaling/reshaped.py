"""Methods that stop, round or fade pairs."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ropepatch.scaling.powers import AdjustedBase
from ropepatch.scaling.rope import METHODS, Rope, Scaling, wavelengths
from ropepatch.settings import AboveOne, Amount, Count, Share, Weight


class GiraffePower(Scaling):
    """A gradual slowdown of slow pairs, by a power of their index (Pal et al. 2023).

    Args:
        power: The exponent p; larger slows more.
        interpolate: Divide by s first.
    """

    name = "giraffe-power"
    formula = "θ_i · (1 − 2i/d)^p"
    paper = "arXiv:2308.10882"

    power: Weight = 0.1
    interpolate: bool = False

    def _inv_freq(self, rope: Rope) -> Tensor:
        inv_freq = rope.inv_freq() / (self.factor if self.interpolate else 1.0)
        fade = (1 - rope.exponents().double()) ** self.power
        return (inv_freq.double() * fade).float()


class GiraffeTruncated(Scaling):
    """Three bands: kept, set to one slow frequency, stopped (Pal et al. 2023; abacusai/Long-Context).

    Args:
        cutoff: T: wavelengths up to T tokens are kept, up to 8T set to 16T, longer ones stopped; None for L.
        interpolate: Divide by s first.
    """

    name = "giraffe-truncated"
    formula = "θ_i if θ_i ≥ c = 2π/T; c/16 if ≥ c/8; else 0"
    paper = "arXiv:2308.10882"

    cutoff: Amount | None = None
    interpolate: bool = False

    def _inv_freq(self, rope: Rope) -> Tensor:
        inv_freq = rope.inv_freq() / (self.factor if self.interpolate else 1.0)
        c = 2 * math.pi / (self.cutoff or rope.original_max_position_embeddings)
        slow = torch.where(inv_freq >= c / 8, inv_freq.new_tensor(c / 16), 0.0)
        return torch.where(inv_freq >= c, inv_freq, slow)


class PartialRope(Scaling):
    """Rotation of the fastest pairs only (p-RoPE, Barbero et al. 2024); p = 0 is NoPE.

    Args:
        partial: p, the share of pairs that rotate, 0 to 1.
    """

    name = "p-rope"
    formula = "θ_i for the first p·d/2 pairs, else 0"
    paper = "arXiv:2410.06205"

    partial: Share = 0.75

    def _inv_freq(self, rope: Rope) -> Tensor:
        kept = int(self.partial * rope.rotating)
        fast = rope.inv_freq()[:kept]
        # As transformers computes them: float32 pow depends on the vector's length
        if not rope.is_scaled:
            fast = 1.0 / (rope.rope_theta ** rope.exponents()[:kept])
        stopped = fast.new_zeros(rope.num_pairs - kept)
        return torch.cat((fast, stopped))


class _OverAnother(Scaling):
    """A method that changes the frequencies of another method."""

    composing = MappingProxyType({"over": "ntk"})

    over: str

    def check(self) -> None:
        super().check()
        inner = METHODS.find(self.over)
        is_plain = not (inner.length_dependent or issubclass(inner, _OverAnother))
        is_whole = {*inner.required()} <= {*self._given}
        self._require(
            is_plain and is_whole,
            "over",
            "a static method that needs no more parameters",
        )

    @property
    def _given(self) -> dict[str, Any]:
        """Parameters of the other method."""
        return {}

    @property
    def _inner(self) -> Scaling:
        return METHODS.make(self.over, factor=self.factor, **self._given)

    @property
    def composes(self) -> bool:  # type: ignore[override]
        return self._inner.composes

    def _temperature(self, rope: Rope) -> float:
        return self._inner._temperature(rope)


class Resonance(_OverAnother):
    """Another method's wavelengths, rounded to whole tokens (Wang et al. 2024).

    The released code repeats one table, so that a period is exact at any position. Stock RoPE multiplies
    positions by float32 frequencies, so cos is off by about 2e-3 at position 20,000, and more beyond.

    Args:
        over: The method whose wavelengths are rounded, with its default parameters.
    """

    name = "resonance"
    formula = "2π / round(2π/θ′_i), θ′ of another method"
    paper = "arXiv:2403.00071"

    over: str = "yarn"

    def _inv_freq(self, rope: Rope) -> Tensor:
        return (2 * math.pi / wavelengths(self._inner._inv_freq(rope)).round()).float()


class ClippedRope(_OverAnother):
    """Another method's frequencies, with the slowest pairs faded to zero (CoPE, clipped RoPE).

    Of the last n = `pairs`, or of all if there are fewer, pair k = 0 ... n − 1 is multiplied by
    (1 + cos(πk/(n − 1)))/2: the first is kept, the last stops.

    Args:
        over: The method, with its default parameters; the authors train with "abf".
        rope_theta: The base b' of `over=abf`.
        pairs: The number of faded pairs.
        hard: Stop them all instead of fading along a half cosine.
    """

    name = "cope"
    formula = (
        "θ′_i of another method × half a cosine over the last 20 pairs, or all if fewer"
    )
    paper = "arXiv:2602.05258"

    over: str = "ntk"
    pairs: Count = 20
    hard: bool = False
    rope_theta: AboveOne | None = None

    def check(self) -> None:
        super().check()
        unused = self.rope_theta is not None and self.over != AdjustedBase.name
        self._require(not unused, "rope_theta", f"left out with over={self.over}")

    @property
    def _given(self) -> dict[str, Any]:
        return {} if self.rope_theta is None else {"rope_theta": self.rope_theta}

    def _inv_freq(self, rope: Rope) -> Tensor:
        inv_freq = self._inner._inv_freq(rope)
        n = min(self.pairs, rope.num_pairs)
        fade = torch.ones(rope.num_pairs, dtype=torch.float64, device="cpu")
        fade[-n:] = (
            0.0
            if self.hard
            else (
                1
                + torch.linspace(0, math.pi, n, dtype=torch.float64, device="cpu").cos()
            )
            / 2
        )
        fade[-1] = 0.0  # cos(pi) is not exactly -1 in every library
        return (inv_freq.double() * fade).float()
