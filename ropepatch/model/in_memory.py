"""Comparison of a loaded model's rotary modules with those that its configuration gives.

The reference is stock transformers, which builds each module anew from its configuration, in float32 on the
CPU. A module that cannot be built this way is not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from ropepatch.settings import shown

SAME = 1e-5  # relative: devices differ by 1e-7, and 16 bits round by 1e-4 and more
NEAR = 2**-7  # relative, for a frequency rounded to 16 bits, even twice
LEAST = 2**-24  # radians: the smallest number above 0 of float16
RELOAD = "load the model anew, and change rope_parameters before it is built"


def check_rope(model: nn.Module, stated: PreTrainedConfig | None = None) -> list[str]:
    """Compare every rotary buffer of a loaded model, also within wrappers, with its configuration.

    Rounding is only a warning: `model.to(torch.bfloat16)` causes it, and the user runs this model.

    Args:
        model: The model.
        stated: The expected configuration of its language model; its own configuration if None.

    Returns:
        The rounded buffers, with the error.

    Raises:
        RopepatchError: If it contains no transformers model, or its RoPE is not that of its configuration.
    """
    base = base_model(model)
    stated = stated or text_config(base.config)
    roundings = []
    ropes = language_ropes(base)
    for path, module in base.named_modules():
        if isinstance(module, RotarySubstitute) or not holds_frequencies(module):
            continue
        config = getattr(module, "config", None)
        # One of several may have a changed copy, e.g. for layers with another base
        if [*ropes] == [path] and type(config) in (type(stated), type(None)):
            config = stated
        for name, kind, states in _states(module, config):
            held = _read(module, name)
            if held is None or any(_is_same(held, state) for state in states):
                continue
            radians = _rounding(held, states)
            if radians is None:
                raise RopepatchError(
                    f"the RoPE in memory is not the config's: {path}.{name} is {shown(held.tolist())}; "
                    f"the config ({kind}) computes {shown(states[0].tolist())}",
                    hint=RELOAD,
                )
            window = getattr(config, "max_position_embeddings", 1)
            off = f"{radians * window:.2g} radians off at {window} tokens"
            roundings.append(f"{path}.{name} is rounded, {off}")
    return roundings


def reset_dynamic(model: nn.Module) -> None:
    """Reset stock `dynamic` RoPE to its first frequencies, which transformers before 5.13 never does.

    This also resets the shift of text positions that an earlier image caused.
    """
    modules: list[Any] = [*model.modules()]
    for module in modules:
        if hasattr(module, "rope_deltas"):
            module.rope_deltas = None
        if not hasattr(module, "original_max_seq_len"):
            continue
        kinds = module.rope_type
        layers = kinds if isinstance(kinds, dict) else {"": kinds}
        for layer, kind in layers.items():
            prefix = f"{layer}_" if layer else ""
            if kind == "dynamic":
                first = getattr(module, f"{prefix}original_inv_freq")
                now = getattr(module, f"{prefix}inv_freq")
                table = first.to(now.device, copy=True)
                module.register_buffer(f"{prefix}inv_freq", table, persistent=False)
                length = module.original_max_seq_len
                setattr(module, f"{prefix}max_seq_len_cached", length)


def _states(module: Any, config: Any) -> Iterator[tuple[str, str, list[Tensor]]]:
    """Yield the values that a rotary module uses: their name, the rope type, and what they may be.

    Nothing for a module that cannot be built from a configuration.
    """
    try:
        with stock_code("build a rotary module"), torch.device("cpu"):
            fresh = type(module)(config)
    except RopepatchError:
        return
    kinds = getattr(fresh, "rope_type", None)
    layers = kinds if isinstance(kinds, dict) else {None: kinds}
    for layer, kind in layers.items():
        prefix, kind = "" if layer is None else f"{layer}_", kind or "default"
        names = ["inv_freq", "attention_scaling"]
        if kind in ("longrope", "dynamic"):  # static RoPE never uses these
            names.append("original_inv_freq")
        for name in names:
            value = getattr(fresh, f"{prefix}{name}", None)
            if value is None:
                continue
            states = [torch.as_tensor(value)]
            if name == "inv_freq":
                states += _later_states(module, config, layer, kind)
            yield f"{prefix}{name}", kind, states


def _read(module: Any, name: str) -> Tensor | None:
    """Return a value on the CPU; None if this process has only a part of it, or nothing."""
    value = getattr(module, name, None)
    if value is None:
        return None
    held: Any = torch.as_tensor(value)
    if placements := getattr(held, "placements", ()):  # of a DTensor
        if not all(place.is_replicate() for place in placements):
            return None
        held = held.to_local()
    return None if held.is_meta else held.detach().float().cpu()


def _later_states(
    module: Any, config: Any, layer: str | None, kind: str
) -> list[Tensor]:
    """Return the frequencies that length-dependent RoPE may have after a forward pass."""
    every = config.rope_parameters
    parameters = every[layer] if layer else every
    lengths = []
    if kind == "longrope":
        lengths = [int(parameters[ORIGINAL]) + 1]
    elif kind == "dynamic":
        # The second before transformers 5.13
        names = "max_seq_len_cached", f"{layer}_max_seq_len_cached"
        lengths = [
            int(getattr(module, name)) for name in names if hasattr(module, name)
        ]
    device = torch.device("cpu")
    with stock_code(f"compute a {kind} rope"), device:
        return [
            ROPE_INIT_FUNCTIONS[kind](config, device, seq_len=length, layer_type=layer)[
                0
            ]
            for length in lengths
        ]


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), rtol=SAME, atol=1e-30)


def _rounding(values: Tensor, states: list[Tensor]) -> float | None:
    """Return the largest error of values that may be a right table, rounded to 16 bits; else None."""
    for exact in states:
        if values.shape != exact.shape:
            continue
        if torch.allclose(values, exact.float(), rtol=NEAR, atol=LEAST):
            return float((values - exact).abs().max())
    return None
