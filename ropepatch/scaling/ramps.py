"""Methods that keep fast pairs, interpolate slow ones and blend between."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from ropepatch.scaling.method import Scaling
from ropepatch.scaling.rope import Frequencies, Rope
from ropepatch.settings.parameters import LARGEST, Positive


def blend_by_rotations(rope: Rope, factor: float, low: float, high: float) -> Tensor:
    """theta/s at up to `low` rotations inside L, theta from `high` on, linear between: [D/2].

    In the expression order of transformers' `llama3`, so that the two agree to the bit.
    """
    inv_freq = rope.inv_freq()
    window = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    keep = (window / wavelength - low) / (high - low)
    blended = (1 - keep) * inv_freq / factor + keep * inv_freq
    inside = torch.where(wavelength < window / high, inv_freq, blended)
    return torch.where(wavelength > window / low, inv_freq / factor, inside)


@dataclass(frozen=True, kw_only=True)
class NTKByParts(Scaling):
    """Interpolate by the number of rotations inside the window (YaRN paper, Definition 2).

    The authors' repository has a class LlamaPartNTKScaled of another formula, with a band of NTK in addition.

    Args:
        alpha: At most this many rotations: divided by s.
        beta: At least this many: left alone.
    """

    name = "ntk-by-parts"
    formula = "γ_i·θ_i + (1−γ_i)·θ_i/s, γ_i = clip((r_i−α)/(β−α), 0, 1)"
    paper = "arXiv:2309.00071"
    saved_as = "llama3"

    alpha: Positive = 1.0
    beta: float = 32.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.beta > self.alpha, "beta", f"above alpha = {self.alpha}")

    def frequencies(self, rope: Rope, length: int | None = None) -> Frequencies:
        inv_freq = blend_by_rotations(rope, self.factor, self.alpha, self.beta)
        return Frequencies(inv_freq, rope.carried_attention_factor)

    def native(self, rope: Rope) -> dict[str, Any] | None:
        if rope.is_scaled:
            return None
        return {
            "rope_type": "llama3",
            "factor": float(self.factor),
            "low_freq_factor": float(self.alpha),
            "high_freq_factor": float(self.beta),
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }


@dataclass(frozen=True, kw_only=True)
class Llama3(NTKByParts):
    """Llama 3.1's scaling: NTK-by-parts between one and four rotations."""

    name = "llama3"
    formula = "NTK-by-parts with α = 1, β = 4"
    paper = "arXiv:2407.21783"

    beta: float = 4.0


@dataclass(frozen=True, kw_only=True)
class YaRN(Scaling):
    """NTK-by-parts with a temperature (Peng et al. 2023; jquesnelle/yarn).

    Args:
        beta_fast: Pairs with at least this many rotations are left alone.
        beta_slow: Pairs with at most this many are divided by s.
        truncate: Round the bounds of the index ramp outwards to whole pairs, as the released code does.
        ramp: "index", linear in the pair's index (released code, every published checkpoint); "rotations",
            linear in rotations (paper, equations 18 to 22; taken for a model that is already scaled, whose
            frequencies it reads); "wavelength", the index ramp over wavelengths instead of frequencies
            (PoSE's form).
        attention_factor: Multiplies cos and sin; None for 0.1 ln s + 1.
        mscale: With `mscale_all_dim`, DeepSeek's temperature: the ratio of 0.1 k ln s + 1 at these two k.
        mscale_all_dim: See `mscale`. Attention of DeepSeek's kind multiplies all of its logits by the square
            of 0.1 k ln s + 1 at this k as well; LLaMA's does not.
    """

    name = "yarn"
    formula = "(1−γ_i)·θ_i + γ_i·θ_i/s, γ a ramp over i; a = 0.1·ln s + 1"
    paper = "arXiv:2309.00071"
    saved_as = "yarn"
    composing = MappingProxyType({"ramp": "rotations"})

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    ramp: Literal["index", "rotations", "wavelength"] = "index"
    attention_factor: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.beta_slow >= 1 / LARGEST, "beta_slow", "above 0")
        self._require(self.beta_fast > self.beta_slow, "beta_fast", f"above beta_slow = {self.beta_slow}")
        both = (self.mscale is None) == (self.mscale_all_dim is None)
        self._require(both, "mscale", "given together with mscale_all_dim")
        once = self.mscale is None or self.attention_factor is None
        self._require(once, "mscale", f"left out beside attention_factor = {self.attention_factor}")

    @property
    def temperature(self) -> float:
        """a: multiplies cos and sin, hence logits by its square."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def _mscale(self, k: float) -> float:
        return 0.1 * k * math.log(self.factor) + 1.0

    def frequencies(self, rope: Rope, length: int | None = None) -> Frequencies:
        attention_factor = rope.carried_attention_factor * self.temperature
        if self.ramp == "rotations":
            inv_freq = blend_by_rotations(rope, self.factor, self.beta_slow, self.beta_fast)
            return Frequencies(inv_freq, attention_factor)
        self._refuse_scaled(
            rope, "use --set ramp=rotations, the paper's form, which reads the frequencies themselves"
        )
        powers = rope.rope_theta ** rope.exponents()
        interpolate = self._index_ramp(rope)
        if self.ramp == "wavelength":
            return Frequencies(
                1.0 / (powers * (interpolate * self.factor + 1 - interpolate)), attention_factor
            )
        keep = 1 - interpolate
        inv_freq = 1.0 / (self.factor * powers) * (1 - keep) + 1.0 / powers * keep
        return Frequencies(inv_freq, attention_factor)

    def _index_ramp(self, rope: Rope) -> Tensor:
        """0 up to the pair that turns beta_fast times inside L, 1 from the one that turns beta_slow times."""
        window, log_theta = rope.original_max_position_embeddings, math.log(rope.rope_theta)
        low, high = (
            rope.rotary_dim * math.log(window / (rotations * 2 * math.pi)) / (2 * log_theta)
            for rotations in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.rotary_dim - 1)
        if low == high:
            high += 0.001
        return ((torch.arange(rope.num_pairs, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)

    def native(self, rope: Rope) -> dict[str, Any] | None:
        if self.ramp != "index" or rope.is_scaled:
            return None
        parameters = {
            "rope_type": "yarn",
            "factor": float(self.factor),
            "original_max_position_embeddings": rope.original_max_position_embeddings,
            "beta_fast": float(self.beta_fast),
            "beta_slow": float(self.beta_slow),
            "attention_factor": float(self.temperature),
        }
        usual = self._mscale(1.0)
        if self.mscale:
            parameters |= {"mscale": float(self.mscale), "mscale_all_dim": float(self.mscale_all_dim or 0)}
        elif usual != 1 and not math.isclose(self.temperature, usual, rel_tol=1e-9):
            # SGLang and mlx-lm ignore attention_factor, which precedes these two wherever it is read.
            parameters |= {"mscale": (self.temperature - 1) / (usual - 1), "mscale_all_dim": 0.0}
        return parameters if self.truncate else parameters | {"truncate": False}
