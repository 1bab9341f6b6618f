"""The precision in which a device computes: bfloat16 where it has units for it, float32 elsewhere.

It follows from the hardware, never from a clock. AVX512_BF16 counts as well as AMX: measured once on an AMD
EPYC that has the former alone (one thread, torch 2.13), bfloat16 takes 0.55 of the time of float32 for a
forward pass of `tiny` over 256 tokens, 0.31 for a LLaMA of 75M parameters over 512; 0.69 and 0.40 for a
training step on 256 tokens in mixed precision; 1.47 and 0.71 for one token at a time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

FLOAT32, BFLOAT16 = "float32", "bfloat16"
LARGE = 10**9  # parameters from which on a CPU is slow
AMPERE = 8, 0  # the first compute capability with units for bfloat16
UNITS = {"AMX": "_is_amx_tile_supported", "AVX512_BF16": "_is_avx512_bf16_supported"}  # in torch.cpu


@dataclass(frozen=True)
class Precision:
    """`float32`, `bfloat16` or `float16`, and the hardware it follows from; no reason where it is stated."""

    dtype: str
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The JSON-ready data of a record."""
        return {"dtype": self.dtype}

    def __str__(self) -> str:
        return f"{self.dtype} ({self.reason})" if self.reason else self.dtype


def best_device() -> str:
    """The GPU, if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def fastest(device: str | torch.device | None = None) -> Precision:
    """The precision in which a device computes fastest; None for the GPU, if there is one, else the CPU."""
    on = torch.device(device or best_device())
    if on.type == "cuda":
        capability = torch.cuda.get_device_capability(on)
        dtype = BFLOAT16 if capability >= AMPERE else FLOAT32
        return Precision(dtype, f"compute capability {'.'.join(map(str, capability))}")
    units = [name for name, supported in UNITS.items() if getattr(torch.cpu, supported, bool)()]
    if on.type == "cpu" and units:
        return Precision(BFLOAT16, f"this CPU has {units[0]}")
    return Precision(FLOAT32, "no units for bfloat16")


def prefers_float32(model: PreTrainedModel, device: str | torch.device) -> bool:
    """Whether a bfloat16 model runs faster in float32: on a CPU without units for bfloat16.

    False where float32 would take more than half of the machine's memory.
    """
    on_cpu = torch.device(device).type == "cpu"
    if not on_cpu or model.dtype != torch.bfloat16 or getattr(model, "hf_quantizer", None) is not None:
        return False
    return 8 * num_parameters(model) <= memory_of(device) and fastest(device).dtype == FLOAT32


def describe_placement(model: PreTrainedModel) -> list[str]:
    """The device and dtype of a model, in words; and a warning where that will take long."""
    device, dtype = model.device, str(model.dtype).removeprefix("torch.")
    devices = dict.fromkeys(str(place) for place in (getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        return [f"on {', '.join(devices)}, {dtype}"]
    if device.type != "cpu":
        name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
        return [f"on {device}{name}, {dtype}"]
    threads, size = torch.get_num_threads(), num_parameters(model)
    slow = f"warning: {size / 1e9:.1f} billion parameters are read on the CPU, which takes long"
    return [f"on cpu, {dtype}, {threads} thread{'s' * (threads > 1)}", *([slow] * (size >= LARGE))]


def num_parameters(model: PreTrainedModel) -> int:
    """All parameters of a model."""
    return sum(weight.numel() for weight in model.parameters())


def memory_of(device: str | torch.device) -> int:
    """A device's memory in bytes; 0 where the system does not say."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
