"""Comparison of a loaded model's rotary modules with those that its configuration gives.

The reference is stock transformers, which builds each module anew from its configuration, in float32 on the
CPU. A module that cannot be built this way is not compared.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropepatch.errors import RopepatchError
from ropepatch.model.config import (
    ORIGINAL,
    holds_frequencies,
    language_ropes,
    stock_code,
    text_config,
)
from ropepatch.model.rotary import RotarySubstitute, base_model

SAME = 1e-5  # relative: devices differ by 1e-7, and 16 bits round by 1e-4 and more
NEAR = 2**-7  # relative, for a frequency rounded to 16 bits, even twice
LEAST = 2**-24  # radians: the smallest number above 0 of float16
RELOAD = "load the model anew, and change rope_parameters before it is built"


@dataclass(frozen=True, eq=False)
class Difference:
    """A buffer or an attention factor in memory that is not the configuration's.

    Args:
        path: The rotary module's path in the model.
        name: The name of the buffer or attribute.
        held: The value in memory.
        expected: The value that the configuration gives.
        kind: The rope type.
        rounded: The 16-bit dtype to which it was rounded, with the error in radians; None for another value.
        is_used: Whether the model computes with it: static RoPE never uses the original frequencies.
    """

    path: str
    name: str
    held: Tensor | float
    expected: Tensor | float
    kind: str
    rounded: str | None
    is_used: bool

    @property
    def is_error(self) -> bool:
        """Whether the model computes something else than its configuration says, beyond rounding."""
        return self.is_used and self.rounded is None

    def __str__(self) -> str:
        if self.rounded:
            return f"{self.path}.{self.name} is rounded to {self.rounded}"
        return (
            f"{self.path}.{self.name} is {_shown(self.held)}; the config ({self.kind}) computes "
            f"{_shown(self.expected)}"
        )


def check_rope(
    model: nn.Module, stated: PreTrainedConfig | None = None
) -> list[Difference]:
    """Compare every rotary buffer of a loaded model, also within wrappers, with its configuration.

    Rounding is only a warning: `model.to(torch.bfloat16)` causes it, and the user runs this model.

    Args:
        model: The model.
        stated: The expected configuration of its language model; its own configuration if None.

    Returns:
        The milder differences.

    Raises:
        RopepatchError: If it contains no transformers model, or its RoPE is not that of its configuration.
    """
    base = base_model(model)
    stated = stated or text_config(base.config)
    differences = list[Difference]()
    ropes = language_ropes(base)
    for path, module in base.named_modules():
        if isinstance(module, RotarySubstitute) or not holds_frequencies(module):
            continue
        is_alone = len(ropes) == 1 and path in ropes
        config = _config_of(module, stated, is_alone=is_alone)
        with suppress(RopepatchError):  # a module that cannot be built is not compared
            differences += _compared(path, module, config)
    for one in differences:
        if one.is_error:
            raise RopepatchError(
                f"the RoPE in memory is not the config's: {one}", hint=RELOAD
            )
    return differences


def reset_dynamic(model: nn.Module) -> None:
    """Reset stock `dynamic` RoPE to its first frequencies, which transformers before 5.13 never does.

    This also resets the shift of text positions that an earlier image caused.
    """
    modules: list[Any] = [*model.modules()]
    for module in modules:
        if hasattr(module, "rope_deltas"):
            module.rope_deltas = None
        kinds = (
            getattr(module, "rope_type", None)
            if hasattr(module, "original_max_seq_len")
            else None
        )
        named = (
            {f"{name}_": kind for name, kind in kinds.items()}
            if isinstance(kinds, dict)
            else {"": kinds}
        )
        for prefix in (
            prefix for prefix, kind in named.items() if "dynamic" in (kind or "")
        ):
            now, first = (
                getattr(module, f"{prefix}{name}")
                for name in ("inv_freq", "original_inv_freq")
            )
            module.register_buffer(
                f"{prefix}inv_freq", first.to(now.device, copy=True), persistent=False
            )
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _config_of(module: nn.Module, stated: PreTrainedConfig, *, is_alone: bool) -> Any:
    """Return the configuration of a rotary module: the language model's if it has only this one.

    One of several may have a changed copy, e.g. for layers with another base.
    """
    own = getattr(module, "config", None)
    return stated if is_alone and type(own) in (type(stated), type(None)) else own


def _compared(path: str, module: Any, config: Any) -> list[Difference]:
    """Return the differences of a rotary module."""
    if config is None:
        raise RopepatchError(f"{type(module).__name__} has no config")
    with (
        stock_code(f"build {type(module).__name__} from its config"),
        torch.device("cpu"),
    ):
        fresh = type(module)(config)
    kinds = getattr(fresh, "rope_type", None)
    layers = kinds if isinstance(kinds, dict) else {None: kinds}
    differences = list[Difference]()
    for layer, kind in layers.items():
        prefix, kind = "" if layer is None else f"{layer}_", kind or "default"
        for name in (f"{prefix}inv_freq", f"{prefix}original_inv_freq"):
            expected, held = getattr(fresh, name, None), _read(module, name)
            if not isinstance(expected, Tensor) or held is None:
                continue
            changes_later = kind in ("longrope", "dynamic")
            is_original = name.endswith("original_inv_freq")
            right = [expected]
            if changes_later and not is_original:
                right += _later_states(module, config, layer, kind)
            values = held.float()
            if not any(_is_same(values, state) for state in right):
                rounded = _rounding(values, right, config)
                is_used = changes_later or not is_original
                differences.append(
                    Difference(path, name, values, expected, kind, rounded, is_used)
                )
        name = f"{prefix}attention_scaling"
        a, held_a = getattr(fresh, name, None), getattr(module, name, None)
        if (
            a is not None
            and held_a is not None
            and not math.isclose(float(held_a), float(a), rel_tol=SAME)
        ):
            differences.append(
                Difference(
                    path, name, float(held_a), float(a), kind, None, is_used=True
                )
            )
    return differences


def _read(module: Any, name: str) -> Tensor | None:
    """Return a buffer on the CPU; None if this process has only a part of it, or nothing."""
    held = getattr(module, name, None)
    if not isinstance(held, Tensor) or held.is_meta:
        return None
    placements = getattr(held, "placements", ())  # of a DTensor
    if not all(place.is_replicate() for place in placements):
        return None
    replicated: Any = held
    return (replicated.to_local() if placements else held).detach().cpu()


def _later_states(
    module: Any, config: Any, layer: str | None, kind: str
) -> list[Tensor]:
    """Return the frequencies that length-dependent RoPE may have after a forward pass."""
    every = config.rope_parameters
    parameters = every[layer] if layer else every
    lengths = {int(parameters[ORIGINAL]) + 1} if kind == "longrope" else set[int]()
    if kind == "dynamic":
        prefixes = {"", f"{layer}_"}  # the last before transformers 5.13
        lengths = {
            int(getattr(module, f"{prefix}max_seq_len_cached", 0))
            for prefix in prefixes
        } - {0}
    with stock_code(f"compute a {kind} rope"), torch.device("cpu"):
        compute, device = ROPE_INIT_FUNCTIONS[kind], torch.device("cpu")
        return [
            compute(config, device, seq_len=length, layer_type=layer)[0]
            for length in lengths
        ]


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), rtol=SAME, atol=1e-30)


def _rounding(values: Tensor, states: list[Tensor], config: Any) -> str | None:
    """Return the 16-bit dtype to which one of the right tables was rounded, with the error; else None."""
    window = getattr(config, "max_position_embeddings", None) or 1
    for exact in states:
        for kind in (torch.bfloat16, torch.float16):
            if values.shape != exact.shape or not values.any():
                continue
            near = torch.allclose(values, exact.to(kind).float(), rtol=NEAR, atol=LEAST)
            if near and torch.equal(values, values.to(kind).float()):
                radians = float((values - exact).abs().max()) * window
                name = str(kind).removeprefix("torch.")
                return f"{name}, {radians:.2g} radians off at {window} tokens"
    return None


def _shown(value: Tensor | float) -> str:
    """Format a number, or the first values of a table and their count."""
    if isinstance(value, float):
        return f"{value:g}"
    numbers = [f"{one:.4g}" for one in value.flatten()[:4].tolist()]
    if value.numel() > len(numbers):
        numbers.append(f"... {value.numel()} frequencies")
    return f"[{', '.join(numbers)}]"
