"""From a scaling to the `rope_parameters` that stock transformers reads, and the exact table it computes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ropepatch.model.config import SCALING_KEYS
from ropepatch.scaling import Scaling
from ropepatch.scaling.rope import Frequencies, Rope, divisors
from ropepatch.scaling.searched import longrope_attention_factor, longrope_parameters


@dataclass(frozen=True)
class SavedRope:
    """`rope_parameters` and the frequencies that stock transformers computes from them, to the bit."""

    rope_parameters: dict[str, Any]
    frequencies: Frequencies


def saved_ropes(scaling: Scaling, rope: Rope, current: dict[str, Any], to: int) -> Iterator[SavedRope]:
    """The ways to say a scaling in `rope_parameters`, the one that most engines read first.

    First the native rope type, then `longrope` with equal lists, which holds any static map.

    Args:
        scaling: What to save.
        rope: The rope it scales.
        current: The model's `rope_parameters` now (of one layer type), whose own keys stay.
        to: The max_position_embeddings to stand beside it, in tokens.
    """
    # partial_rotary_factor is the share of pairs that rotate under `proportional`, else D / head_dim.
    proportional = {"partial_rotary_factor"} if current.get("rope_type") == "proportional" else set()
    own = {key: value for key, value in current.items() if key not in SCALING_KEYS | proportional}
    if native := scaling.native(rope):
        parameters = own | {"rope_theta": rope.rope_theta} | native
        if native["rope_type"] == "longrope":
            a = native["attention_factor"]
            parameters |= _mscales(a) if scaling.length_dependent else _lengths(a, rope, to)
        yield SavedRope(parameters, scaling.frequencies(rope))
    if not scaling.length_dependent:
        yield as_longrope(scaling.frequencies(rope), rope, to, own)


def as_longrope(frequencies: Frequencies, rope: Rope, to: int, own: dict[str, Any]) -> SavedRope:
    """Any static frequencies as `longrope` with short_factor = long_factor = theta_i / theta'_i.

    The arguments are those of `saved_ropes`, and the model's ``own`` keys of `rope_parameters`. With an
    attention factor of 1 every engine that reads longrope reads it alike.
    """
    ratios = divisors(rope.unscaled(), frequencies.inv_freq).tolist()
    a = frequencies.attention_factor
    longrope = longrope_parameters(rope, 1.0, a, short=tuple(ratios), long=tuple(ratios))
    parameters = own | {"rope_theta": rope.rope_theta} | longrope | _lengths(a, rope, to)
    inv_freq = 1.0 / (torch.tensor(ratios, dtype=torch.float32) * rope.rope_theta ** rope.exponents())
    return SavedRope(parameters, Frequencies(inv_freq, a))


def _lengths(attention_factor: float, rope: Rope, to: int) -> dict[str, Any]:
    """The lengths beside equal lists: only the attention factor that engines derive from them matters.

    They take max_position_embeddings / original_max_position_embeddings for s. With the target for L they
    take 1 for a, and none serves only L tokens (vLLM) or loses its place at L (SGLang).
    """
    window = rope.original_max_position_embeddings
    derived = longrope_attention_factor(to / window, window)
    if derived != 1 and math.isclose(attention_factor, derived, rel_tol=1e-9):
        return {"factor": to / window, "original_max_position_embeddings": window}
    lengths = {"factor": 1.0, "original_max_position_embeddings": to}
    return lengths if attention_factor == 1 else lengths | _mscales(attention_factor)


def _mscales(attention_factor: float) -> dict[str, float]:
    # vLLM and SGLang ignore attention_factor under longrope and read these two.
    return {"short_mscale": float(attention_factor), "long_mscale": float(attention_factor)}
