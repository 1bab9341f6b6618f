"""Methods that keep fast pairs, interpolate slow ones and blend those between."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from ropepatch.scaling.rope import ORIGINAL, Rope, Scaling
from ropepatch.settings import MAX_NUMBER, Amount, Number

BETAS = 32.0, 1.0  # of YaRN, in rotations: fast and slow


def yarn_temperature(factor: float, mscale: float = 1.0) -> float:
    """Compute YaRN's attention factor, 0.1 k ln s + 1 with k = `mscale`, which multiplies cos and sin."""
    return 0.1 * mscale * math.log(factor) + 1.0


def shared_temperature(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """Compute DeepSeek's attention factor: YaRN's, divided by the share that scales its softmax."""
    return yarn_temperature(factor, mscale) / yarn_temperature(factor, mscale_all_dim)


def blend_by_rotations(rope: Rope, factor: float, low: float, high: float) -> Tensor:
    """Compute [d/2]: theta/s up to `low` rotations within L tokens, theta from `high` on, linear between.

    The expression order is that of transformers' `llama3`, so that the two agree bit for bit.
    """
    inv_freq = rope.inv_freq()
    window = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    keep = (window / wavelength - low) / (high - low)
    blended = (1 - keep) * inv_freq / factor + keep * inv_freq
    inside = torch.where(wavelength < window / high, inv_freq, blended)
    return torch.where(wavelength > window / low, inv_freq / factor, inside)


def pair_turning(rotations: float, rotary_dim: int, theta: float, window: int) -> float:
    """Compute the index of the pair that makes so many rotations within `window` tokens, d / 2 at theta."""
    return (
        rotary_dim
        * math.log(window / (rotations * 2 * math.pi))
        / (2 * math.log(theta))
    )


class NTKByParts(Scaling):
    """Interpolation of slow pairs, by their rotations within L tokens (YaRN paper, Definition 2).

    LlamaPartNTKScaled in the authors' repository has another formula, with an additional NTK band.

    Args:
        alpha: Pairs with at most this many rotations are divided by s.
        beta: Pairs with at least this many rotations are kept.
    """

    name = "ntk-by-parts"
    formula = "γ_i·θ_i + (1−γ_i)·θ_i/s, γ_i = clip((r_i−α)/(β−α), 0, 1)"
    paper = "arXiv:2309.00071"
    saved_as = "llama3"

    alpha: Amount = BETAS[1]
    beta: Number = BETAS[0]

    def check(self) -> None:
        super().check()
        self._require(self.beta > self.alpha, "beta", f"above alpha = {self.alpha}")

    def _inv_freq(self, rope: Rope) -> Tensor:
        return blend_by_rotations(rope, self.factor, self.alpha, self.beta)

    def _native(self, rope: Rope) -> dict[str, Any]:
        return {
            "rope_type": "llama3",
            "factor": float(self.factor),
            "low_freq_factor": float(self.alpha),
            "high_freq_factor": float(self.beta),
            ORIGINAL: rope.original_max_position_embeddings,
        }


class Llama3(NTKByParts):
    """Llama 3.1's scaling: NTK-by-parts between one and four rotations."""

    name = "llama3"
    formula = "NTK-by-parts with α = 1, β = 4"
    paper = "arXiv:2407.21783"

    beta: Number = 4.0


class YaRN(Scaling):
    """NTK-by-parts with a temperature (Peng et al. 2023; jquesnelle/yarn).

    γ_i = 1 − clip((i − lo)/(hi − lo), 0, 1). The bounds lo and hi are d·ln(L/2πβ)/(2·ln b) for beta_fast and
    beta_slow, rounded down and up, within 0 and d − 1.

    Args:
        beta_fast: Pairs with at least this many rotations are kept.
        beta_slow: Pairs with at most this many are divided by s.
        truncate: Round the bounds of the index ramp outwards to whole pairs, as the released code does.
        ramp: "index": linear in the pair's index, as the released code and every published checkpoint.
            "rotations": linear in rotations (paper, equations 18 to 22), the default for a model that is
            already scaled. "wavelength": the index ramp over wavelengths instead of frequencies, as in
            the code of PoSE (arXiv:2309.10400).
        attention_factor: Multiplies cos and sin; None for 0.1 ln s + 1.
    """

    name = "yarn"
    formula = "γ_i·θ_i + (1−γ_i)·θ_i/s, γ falls from 1 to 0 over the index i; a = 0.1·ln s + 1"
    paper = "arXiv:2309.00071"
    saved_as = "yarn"
    composing = MappingProxyType({"ramp": "rotations"})

    beta_fast: Number = BETAS[0]
    beta_slow: Number = BETAS[1]
    truncate: bool = True
    ramp: Literal["index", "rotations", "wavelength"] = "index"
    attention_factor: Amount | None = None

    def check(self) -> None:
        super().check()
        self._require(self.beta_slow >= 1 / MAX_NUMBER, "beta_slow", "above 0")
        # Both are 1 in Kimi-K2, whose ramp is rounded to two pairs
        is_step = self.beta_fast == self.beta_slow and self.ramp != "rotations"
        self._require(
            is_step or self.beta_fast > self.beta_slow,
            "beta_fast",
            f"above beta_slow = {self.beta_slow}",
        )

    @property
    def composes(self) -> bool:  # type: ignore[override]
        return self.ramp == "rotations"

    def _temperature(self, rope: Rope) -> float:
        return (
            yarn_temperature(self.factor)
            if self.attention_factor is None
            else self.attention_factor
        )

    def _inv_freq(self, rope: Rope) -> Tensor:
        if self.ramp == "rotations":
            return blend_by_rotations(rope, self.factor, self.beta_slow, self.beta_fast)
        powers = rope.rope_theta ** rope.exponents()
        interpolate = self._index_ramp(rope)
        if self.ramp == "wavelength":
            return 1.0 / (powers * (interpolate * self.factor + 1 - interpolate))
        keep = 1 - interpolate
        return 1.0 / (self.factor * powers) * (1 - keep) + 1.0 / powers * keep

    def _index_ramp(self, rope: Rope) -> Tensor:
        """0 up to the pair with beta_fast rotations within L tokens, 1 from the one with beta_slow on."""
        window = rope.original_max_position_embeddings
        low = pair_turning(self.beta_fast, rope.rotary_dim, rope.rope_theta, window)
        high = pair_turning(self.beta_slow, rope.rotary_dim, rope.rope_theta, window)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.rotary_dim - 1)
        if low == high:
            high += 0.001
        return (
            (torch.arange(rope.num_pairs, dtype=torch.float32, device="cpu") - low)
            / (high - low)
        ).clamp(0, 1)

    def _native(self, rope: Rope) -> dict[str, Any] | None:
        if self.ramp != "index":
            return None
        a, usual = self._temperature(rope), yarn_temperature(self.factor)
        parameters = {
            "rope_type": "yarn",
            "factor": float(self.factor),
            ORIGINAL: rope.original_max_position_embeddings,
            "beta_fast": float(self.beta_fast),
            "beta_slow": float(self.beta_slow),
            "attention_factor": float(a),
        }
        if usual != 1 and not math.isclose(a, usual, rel_tol=1e-9):
            # SGLang and mlx-lm ignore attention_factor; elsewhere it takes precedence over these two.
            parameters |= {"mscale": (a - 1) / (usual - 1), "mscale_all_dim": 0.0}
        return parameters if self.truncate else parameters | {"truncate": False}
