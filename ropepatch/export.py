"""From a scaling to the `rope_parameters` that stock transformers reads, and the exact table it computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ropepatch.rope import Frequencies, Rope
from ropepatch.scaling import Scaling
from ropepatch.scaling.searched import longrope_parameters

# The divisor of a pair that does not rotate: `inf` would not be JSON, and cos is 1 all the same.
STOPPED = 1e30

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


def forms(scaling: Scaling, rope: Rope, current: dict[str, Any]) -> Iterator[Export]:
    """The ways to say a scaling in `rope_parameters`, best first.

    First the native rope type, then `longrope` with equal lists, which holds any static map.

    Args:
        scaling: What to export.
        rope: The rope it scales.
        current: The model's `rope_parameters` now (of one layer type), whose own keys stay.
    """
    own = _own_keys(current)
    if native := scaling.native(rope):
        parameters = own | {"rope_theta": rope.rope_theta} | native
        if native["rope_type"] == "longrope":
            parameters |= _mscales(native["attention_factor"])
        yield Export(parameters, scaling.frequencies(rope))
    if not scaling.length_dependent:
        yield as_longrope(scaling.frequencies(rope), rope, scaling.factor, own)


def _own_keys(current: dict[str, Any]) -> dict[str, Any]:
    # partial_rotary_factor is the share of pairs that rotate under `proportional`, else D / head_dim.
    proportional = {"partial_rotary_factor"} if current.get("rope_type") == "proportional" else set()
    return {key: value for key, value in current.items() if key not in SCALING_KEYS | proportional}


def as_longrope(frequencies: Frequencies, rope: Rope, factor: float, own: dict[str, Any]) -> Export:
    """Any static frequencies as `longrope` with short_factor = long_factor = theta_i / theta'_i.

    The attention factor is always explicit: without it transformers substitutes sqrt(1 + ln s / ln L).
    """
    base = rope.rope_theta ** -(torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim)
    divisors = torch.where(frequencies.inv_freq == 0, STOPPED, base / frequencies.inv_freq.double()).tolist()
    a = frequencies.attention_factor
    longrope = longrope_parameters(rope, factor, a, short=tuple(divisors), long=tuple(divisors))
    parameters = own | {"rope_theta": rope.rope_theta} | longrope | _mscales(a)
    return Export(parameters, Frequencies(_longrope_table(rope, divisors), frequencies.attention_factor))


def _longrope_table(rope: Rope, divisors: list[float]) -> Tensor:
    return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * rope.rope_theta ** rope.exponents())


def _mscales(attention_factor: float) -> dict[str, float]:
    # vLLM and SGLang ignore attention_factor under longrope and read these two.
    return {"short_mscale": float(attention_factor), "long_mscale": float(attention_factor)}
