"""The precision in which a device computes: bfloat16 where it has units for it, float32 elsewhere.

It follows from the hardware, never from a clock. AVX512_BF16 counts as well as AMX: measured once on an AMD
EPYC that has the former alone (one thread, torch 2.13), bfloat16 takes 0.55 of the time of float32 for a
forward pass of `tiny` over 256 tokens, 0.31 for a LLaMA of 75M parameters over 512; 0.69 and 0.40 for a
training step on 256 tokens in mixed precision; 1.47 and 0.71 for one token at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from transformers import PreTrainedModel

FLOAT32, BFLOAT16 = "float32", "bfloat16"
HOUR = {"cpu": 5e14, "cuda": 1e18}  # operations, about, of two cores and of an H100
LARGE = 10**9  # parameters from which on a CPU is slow
AMPERE = 8, 0  # the first compute capability with units for bfloat16
UNKNOWN = 4 << 30  # bytes that are available where the system does not say
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Limit and use of a control group, and within memory.stat what of its use is cache; of the older version too.
GROUP_FILES = ("memory.max", "memory.current", "inactive_file")
OLDER_GROUP_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
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


@contextmanager
def without_subnormals() -> Iterator[None]:
    """Have this thread, and those that it starts, round numbers below 1.2e-38 to 0 within the block.

    A CPU computes them up to 100 times slower, and the attention of a sharp head is full of them. Threads
    that are there already stay as they are.
    """
    before = torch.tensor(1e-39).mul(1.0).item() == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def best_device() -> str:
    """The accelerator of whatever kind, if there is one."""
    accelerator = torch.accelerator.current_accelerator(True)
    return accelerator.type if accelerator else "cpu"


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
    slow = f"warning: {size / 1e9:.1f} billion parameters run on the CPU, which is slow"
    return [f"on cpu, {dtype}, {threads} thread{'s' * (threads > 1)}", *([slow] * (size >= LARGE))]


def num_parameters(model: PreTrainedModel) -> int:
    """All parameters of a model."""
    return sum(weight.numel() for weight in model.parameters())


def memory_of(device: str | torch.device) -> int:
    """A device's memory in bytes, of the CPU within the limits of a container; 0 where nothing says it."""
    if torch.device(device).type in ("cuda", "xpu"):  # Apple's GPUs share that of the CPU
        return int(torch.get_device_module(device).get_device_properties(device).total_memory)
    return min([_physical_bytes(), *(limit for limit, _ in _limits())])


def available_bytes() -> int:
    """Memory that this process can have without swapping; a conservative 4 GiB where nothing says it."""
    free = 1024 * _numbers(PROC / "meminfo").get("MemAvailable", 0)
    machine = free or _physical_bytes() // 2 or UNKNOWN
    return min([machine, *(max(0, limit - used) for limit, used in _limits())])


def _physical_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def _limits() -> Iterator[tuple[int, int]]:
    """Limits of the memory of this process and what is used of each, in bytes: of its control groups."""
    try:
        groups = [line.split(":", 2) for line in (PROC / "self/cgroup").read_text().splitlines()]
    except OSError:  # not Linux
        return
    for _, controllers, path in groups:
        if not controllers or "memory" in controllers.split(","):
            root, names = (CGROUPS / "memory", OLDER_GROUP_FILES) if controllers else (CGROUPS, GROUP_FILES)
            group = PurePosixPath(path.lstrip("/"))
            for folder in (root / part for part in (group, *group.parents)):
                limit, used = (_numbers(folder / name).get("") for name in names[:2])
                if limit is not None and used is not None:  # not "max"
                    yield limit, used - _numbers(folder / "memory.stat").get(names[2], 0)


def _numbers(file: Path) -> dict[str, int]:
    """The lines `name number` of a file of the kernel; a number that stands alone is named by no letter."""
    try:
        found = re.findall(r"^(\S*?):?\s*(\d+)(?: kB)?$", file.read_text(), re.MULTILINE)
    except OSError:
        return {}
    return {name: int(number) for name, number in found}
