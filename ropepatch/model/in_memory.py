"""Comparison of a loaded model's rotary modules with those that its configuration gives.

The reference is stock transformers, which builds each module anew from its configuration, in float32 on the
CPU. A module that cannot be built this way is not compared.
"""

from __future__ import annotations

import math
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
REPAIR = "`ropepatch.diagnose(model, repair=True)` writes what the config computes"


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


def rope_differences(
    model: nn.Module, stated: PreTrainedConfig | None = None
) -> tuple[list[Difference], list[str]]:
    """Compare every rotary buffer of a loaded model, also within wrappers.

    Args:
        model: The model.
        stated: The expected configuration of its language model; its own configuration if None.

    Returns:
        The differences; and for each rotary module what was compared, or why it was not.

    Raises:
        RopepatchError: If it contains no transformers model.
    """
    base = base_model(model)
    stated = stated or text_config(base.config)
    differences, looked_at = list[Difference](), list[str]()
    is_alone = len(language_ropes(base)) == 1
    for path, module in base.named_modules():
        if isinstance(module, RotarySubstitute):
            looked_at.append(f"{path}: not compared, as {module.state}")
        elif holds_frequencies(module):
            config = _config_of(
                module, stated, is_alone=is_alone and path in language_ropes(base)
            )
            try:
                found, names, unread = _compared(path, module, config)
            except RopepatchError as error:
                looked_at.append(f"{path}: not compared, as {error}")
                continue
            differences += found
            looked_at.append(f"{path}: {', '.join(names)}")
            if unread:
                looked_at.append(
                    f"but not {', '.join(unread)}, of which this process holds no whole copy"
                )
    return differences, looked_at or ["no rotary module"]


def check_rope(
    model: nn.Module, stated: PreTrainedConfig | None = None
) -> list[Difference]:
    """Raise a `RopepatchError` if a loaded model's RoPE is not its config's; return milder differences.

    Rounding is only a warning: `model.to(torch.bfloat16)` causes it, and the user runs this model.
    """
    differences, _ = rope_differences(model, stated)
    for one in differences:
        if one.is_error:
            raise RopepatchError(
                f"the RoPE in memory is not the config's: {one}", hint=REPAIR
            )
    return differences


def write_ropes(model: nn.Module, differences: list[Difference]) -> None:
    """Write the config's values into the model: float32, on the buffer's device."""
    base = base_model(model)
    for one in differences:
        module: Any = base.get_submodule(one.path)
        now = getattr(module, one.name)
        if isinstance(one.expected, float):
            setattr(module, one.name, one.expected)
            continue
        value = one.expected.to(now.device)
        if (
            now.dtype == value.dtype
            and now.shape == value.shape
            and not now.is_inference()
        ):
            with torch.no_grad():
                now.copy_(value)  # in place: CUDA graphs keep its address
        else:
            persistent = one.name not in module._non_persistent_buffers_set
            module.register_buffer(one.name, value, persistent=persistent)
    reset_dynamic(base)


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


def _compared(
    path: str, module: Any, config: Any
) -> tuple[list[Difference], list[str], list[str]]:
    """Return the differences of a rotary module, the compared names, and those that cannot be read."""
    if config is None:
        raise RopepatchError(f"{type(module).__name__} has no config")
    with (
        stock_code(f"build {type(module).__name__} from its config"),
        torch.device("cpu"),
    ):
        fresh = type(module)(config)
    kinds = getattr(fresh, "rope_type", None)
    layers = kinds if isinstance(kinds, dict) else {None: kinds}
    differences, names, unread = list[Difference](), list[str](), list[str]()
    for layer, kind in layers.items():
        prefix, kind = "" if layer is None else f"{layer}_", kind or "default"
        for name in (f"{prefix}inv_freq", f"{prefix}original_inv_freq"):
            expected = getattr(fresh, name, None)
            if not isinstance(expected, Tensor):
                continue
            names.append(name)
            held = _read(module, name)
            if held is None:
                unread.append(name)
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
    return differences, names, unread


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
