"""Methods that change all frequencies smoothly: by a division, another base or another exponent."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ropepatch.errors import RopepatchError, argument
from ropepatch.scaling.rope import Rope, Scaling
from ropepatch.settings import AboveOne


def ntk_theta(rope: Rope, factor: float) -> float:
    """Compute b' = b * s^(d/(d-2)), the base that divides the slowest pair by exactly s."""
    d, slowest = rope.rotary_dim, rope.rotating - 1
    if slowest < 1:
        raise RopepatchError(
            f"NTK-aware scaling needs a rotary dimension of at least 4, got {2 * rope.rotating}",
            hint=f"use {argument('method', 'linear')}",
        )
    return float(rope.rope_theta * factor ** (d / (2 * slowest)))


class Unscaled(Scaling):
    """No scaling: the model's own frequencies, the baseline of every comparison.

    A scaled model keeps its `rope_parameters` if they do not depend on the length; else its frequencies are
    saved as longrope. Its float32 division can change their last bit; patch divides as well, so a patched
    model and its reloaded checkpoint are equal.
    """

    name = "none"
    formula = "θ_i"
    paper = "arXiv:2104.09864"
    saved_as = "default"
    changes_frequencies = False

    def _inv_freq(self, rope: Rope) -> Tensor:
        return rope.inv_freq()

    def _native(self, rope: Rope) -> dict[str, Any]:
        return {"rope_type": "default"}


class PositionInterpolation(Scaling):
    """Position interpolation: divide every frequency by s (Chen et al. 2023, section 2)."""

    name = "linear"
    formula = "θ_i / s"
    paper = "arXiv:2306.15595"
    saved_as = "linear"

    def _inv_freq(self, rope: Rope) -> Tensor:
        return rope.inv_freq() / self.factor

    def _native(self, rope: Rope) -> dict[str, Any] | None:
        return {"rope_type": "linear", "factor": float(self.factor)}


class NTKAware(Scaling):
    """A larger base that keeps the fastest pair and divides the slowest by s (YaRN paper, Definition 1)."""

    name = "ntk"
    formula = "b′^(−2i/d), b′ = b·s^(d/(d−2))"
    paper = "arXiv:2309.00071"
    saved_as = "default"

    def _inv_freq(self, rope: Rope) -> Tensor:
        return rope.rebased(ntk_theta(rope, self.factor))

    def _native(self, rope: Rope) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": ntk_theta(rope, self.factor)}


class AdjustedBase(Scaling):
    """A larger base chosen by hand, to be followed by training (Xiong et al. 2023).

    Args:
        rope_theta: The new base b'.
    """

    name = "abf"
    formula = "b′^(−2i/d), b′ given"
    paper = "arXiv:2309.16039"
    saved_as = "default"

    composes = False

    rope_theta: AboveOne

    def _inv_freq(self, rope: Rope) -> Tensor:
        return rope.rebased(self.rope_theta)

    def _native(self, rope: Rope) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": float(self.rope_theta)}


class NTKFixed(Scaling):
    """NTK-aware scaling that also slows the fastest pair (Su 2023, kexue.fm/archives/9706)."""

    name = "ntk-fixed"
    formula = "θ_i · s^(−2(i+1)/d)"
    paper = "kexue.fm/archives/9706"

    def _inv_freq(self, rope: Rope) -> Tensor:
        pairs = torch.arange(1, rope.num_pairs + 1, dtype=torch.float64, device="cpu")
        inv_freq = rope.inv_freq().double() * self.factor ** (-pairs / rope.rotating)
        return inv_freq.float()


class NTKMixed(Scaling):
    """Division by a stretched exponential of the pair's index (Su 2023; bojone/rerope, ntk_patch.py)."""

    name = "ntk-mixed"
    formula = "θ_i · exp(−A·(i+1)^0.75), A = ln s / (d/2)^0.75"
    paper = "kexue.fm/archives/9706"

    def _inv_freq(self, rope: Rope) -> Tensor:
        pairs = torch.arange(1, rope.num_pairs + 1, dtype=torch.float64, device="cpu")
        exponent = math.log(self.factor) * (pairs / rope.rotating) ** 0.75
        inv_freq = rope.inv_freq().double() * torch.exp(-exponent)
        return inv_freq.float()
