"""From a scaling to the `rope_parameters` that stock transformers reads, and the exact table it computes from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ropepatch.rope import Frequencies, Rope
from ropepatch.scaling import Scaling

STOPPED = (
    1e30  # the divisor of a pair that does not rotate: `inf` would not be JSON, and cos is 1 all the same
)

# What belongs to a scaling; every other key of rope_parameters is the model's own and is carried over.
SCALING_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "short_factor",
        "long_factor",
        "short_mscale",
        "long_mscale",
        "low_freq_factor",
        "high_freq_factor",
    }
)


@dataclass(frozen=True)
class Export:
    """`rope_parameters` and the frequencies that stock transformers computes from them, to the bit."""

    rope_parameters: dict[str, Any]
    frequencies: Frequencies


def export(scaling: Scaling, rope: Rope, current: dict[str, Any], *, per_layer_type: bool) -> Export | None:
    """The native rope type of a scaling; without one, `longrope` with equal lists, which holds any static map.

    Args:
        scaling: What to export.
        rope: The rope it scales.
        current: The model's `rope_parameters` now (of one layer type), whose own keys stay.
        per_layer_type: Whether `rope_parameters` is nested by layer type.

    Returns:
        None for a length-dependent method that has no native type.
    """
    own = {key: value for key, value in current.items() if key not in SCALING_KEYS}
    native = scaling.native(rope)
    if native and _stock_agrees(native, own, per_layer_type=per_layer_type):
        parameters = own | {"rope_theta": rope.rope_theta} | native
        if native["rope_type"] == "longrope":
            parameters |= _mscales(native["attention_factor"])
        return Export(parameters, scaling.frequencies(rope))
    if scaling.length_dependent:
        return None
    return as_longrope(scaling.frequencies(rope), rope, scaling.factor, own)


def frozen(scaling: Scaling, rope: Rope, current: dict[str, Any], length: int) -> Export:
    """A length-dependent scaling held at one length, where it is as static as any other."""
    own = {key: value for key, value in current.items() if key not in SCALING_KEYS}
    return as_longrope(scaling.frequencies(rope, length), rope, scaling.factor, own)


def as_longrope(frequencies: Frequencies, rope: Rope, factor: float, own: dict[str, Any]) -> Export:
    """Any static frequencies as `longrope` with short_factor = long_factor = theta_i / theta'_i.

    The attention factor is always explicit: without it transformers substitutes sqrt(1 + ln s / ln L).
    """
    base = rope.rope_theta ** -(torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim)
    divisors = torch.where(frequencies.inv_freq == 0, STOPPED, base / frequencies.inv_freq.double()).tolist()
    parameters = own | {
        "rope_type": "longrope",
        "rope_theta": rope.rope_theta,
        "factor": float(factor),
        "original_max_position_embeddings": rope.original_max_position_embeddings,
        "short_factor": divisors,
        "long_factor": divisors,
        "attention_factor": float(frequencies.attention_factor),
        **_mscales(frequencies.attention_factor),
    }
    return Export(parameters, Frequencies(_longrope_table(rope, divisors), frequencies.attention_factor))


def _longrope_table(rope: Rope, divisors: list[float]) -> Tensor:
    return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * rope.rope_theta ** rope.exponents())


def _mscales(attention_factor: float) -> dict[str, float]:
    # vLLM and SGLang ignore attention_factor under longrope and read these two.
    return {"short_mscale": float(attention_factor), "long_mscale": float(attention_factor)}


def _stock_agrees(native: dict[str, Any], own: dict[str, Any], *, per_layer_type: bool) -> bool:
    if native["rope_type"] == "proportional":
        # Under this type partial_rotary_factor means the share of pairs that rotate, under all others D / head_dim.
        return own.get("partial_rotary_factor", 1.0) == 1.0
    return not (per_layer_type and "truncate" in native)  # transformers reads a nested `truncate` nowhere
