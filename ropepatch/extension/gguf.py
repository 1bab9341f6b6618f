"""The changes of a GGUF file: the metadata and the table that llama.cpp computes RoPE from."""

from __future__ import annotations

from typing import Any

import numpy as np

from ropepatch.errors import RopepatchError, argument
from ropepatch.extension.config_changes import SavedRope
from ropepatch.model.gguf import FACTORS, FREQS, GgufModel, GgufRope
from ropepatch.model.gguf_file import check_numbers
from ropepatch.model.rotary import float32_on_cpu
from ropepatch.scaling import Scaling, make_scaling
from ropepatch.scaling.ramps import BETAS

TABLES = (*FACTORS, FREQS)


@float32_on_cpu()
def gguf_changes(source: GgufModel, scaling: Scaling, to: int) -> tuple[SavedRope, dict[str, Any]]:
    """Return the frequencies that llama.cpp computes, and the changes of metadata and tables.

    None removes a key or a table.

    Raises:
        RopepatchError: If llama.cpp cannot compute the scaling in this architecture.
    """
    rope = source.find_equivalent(scaling)
    if rope is None:
        raise _unsupported(source, scaling)
    metadata = _metadata(source, rope, to)
    check_numbers(metadata)
    tables: dict[str, Any] = {}
    if source.tables:
        tables = dict.fromkeys(name for name in TABLES if name in source.file.tensors)
    if rope.divisors:
        names = FACTORS if rope.kind == "longrope" else (FREQS,)
        table = np.array(rope.divisors, dtype=np.float32).tolist()
        tables |= dict.fromkeys(names, table)
    return SavedRope({}, rope.frequencies(source.rotary_dim)), metadata | tables


def _metadata(source: GgufModel, rope: GgufRope, to: int) -> dict[str, int | float | str | None]:
    """Return the metadata that change."""
    has_factor = rope.kind not in ("none", "longrope")
    is_scaled = rope.kind != "none" or rope.attn_factor != 1 or rope.divisors
    values: dict[str, int | float | str | None] = {
        "context_length": to,
        "rope.freq_base": rope.base,
        "rope.scaling.type": rope.kind if is_scaled else None,
        "rope.scaling.factor": float(rope.factor) if has_factor else None,
        "rope.scaling.original_context_length": (rope.original or None) if has_factor else None,
        "rope.scaling.attn_factor": None if rope.attn_factor == 1 else rope.attn_factor,
        "rope.scaling.yarn_ext_factor": None,
        "rope.scaling.yarn_attn_factor": None,
        "rope.scaling.yarn_beta_fast": None,
        "rope.scaling.yarn_beta_slow": None,
        "rope.scale_linear": None,
    }
    file, changed = source.file, {}
    for name, value in values.items():
        key = source.key(name)
        held = file.get(key, value) if key in file.fields and value is not None else None
        if key in file.fields if value is None else held != value:
            changed[key] = value
    return changed


def _unsupported(source: GgufModel, scaling: Scaling) -> RopepatchError:
    """Make the error of a scaling that llama.cpp cannot compute, with the methods that it can."""
    can = []
    for name in ("yarn", "linear", "ntk"):
        other = make_scaling(name, factor=scaling.factor)
        if (other.composes or not source.rope.is_scaled) and source.find_equivalent(other):
            can.append(argument("method", name))
    return RopepatchError(
        f"llama.cpp's {source.architecture} does not support this {scaling.name}, only freq_base, "
        f"linear and YaRN with betas {BETAS[0]:g} and {BETAS[1]:g}",
        hint=f"use {' or '.join(can)}, without further parameters"
        if can
        else "extend the safetensors checkpoint for another engine",
    )
