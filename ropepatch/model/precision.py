"""The precision of a device's computations: bfloat16 with hardware support, else float32.

The choice depends on the hardware, not on a benchmark. AVX512_BF16 suffices, as measured on an AMD EPYC
without AMX (one thread, torch 2.13). Time of bfloat16 over that of float32, for `tiny` and for a LLaMA of 75M
parameters: forward pass over 256 and 512 tokens 0.55 and 0.31; training step on 256 tokens in mixed precision
0.69 and 0.40; one token at a time 1.47 and 0.71.
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
from transformers import (
    PreTrainedModel,
)

from ropepatch.errors import RopepatchError

FLOAT32, BFLOAT16 = "float32", "bfloat16"
LARGE = 10**9  # parameters above which a CPU is slow
AMPERE = 8, 0  # the first compute capability with units for bfloat16
UNKNOWN = 4 << 30  # available bytes if the system does not report them
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Limit and usage of a control group, and the key of cached memory in memory.stat; cgroup v2, then v1.
GROUP_FILES = ("memory.max", "memory.current", "inactive_file")
OLDER_GROUP_FILES = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)
# In torch.cpu
UNITS = {
    "AMX": "_is_amx_tile_supported",
    "AVX512_BF16": "_is_avx512_bf16_supported",
}


@dataclass(frozen=True)
class Precision:
    """A dtype's name and the hardware that decided it; no reason if the user chose it."""

    dtype: str
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {"dtype": self.dtype}

    def __str__(self) -> str:
        return f"{self.dtype} ({self.reason})" if self.reason else self.dtype


@contextmanager
def without_subnormals() -> Iterator[None]:
    """Flush numbers below 1.2e-38 to 0 within the block, in this thread and those it starts.

    A CPU computes with them up to 100 times slower, and sharp attention heads produce many. Existing threads
    do not change.
    """
    before = torch.tensor(1e-39).mul(1.0).item() == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def best_device() -> str:
    """Return the type of the accelerator, else `cpu`."""
    accelerator = torch.accelerator.current_accelerator(True)
    return accelerator.type if accelerator else "cpu"


def fastest(device: str | torch.device | None = None) -> Precision:
    """Return a device's fastest precision; None means `best_device`."""
    on = torch.device(device or best_device())
    if on.type == "cuda":
        capability = torch.cuda.get_device_capability(on)
        dtype = BFLOAT16 if capability >= AMPERE else FLOAT32
        return Precision(dtype, f"compute capability {'.'.join(map(str, capability))}")
    units = [
        name
        for name, supported in UNITS.items()
        if getattr(torch.cpu, supported, bool)()
    ]
    if on.type == "cpu" and units:
        return Precision(BFLOAT16, f"this CPU has {units[0]}")
    return Precision(FLOAT32, "no units for bfloat16")


def prefers_float32(model: PreTrainedModel, device: str | torch.device) -> bool:
    """Return whether a bfloat16 model runs faster in float32, as on a CPU without bfloat16 units.

    False if float32 would need more than half of the machine's memory.
    """
    on_cpu = torch.device(device).type == "cpu"
    if (
        not on_cpu
        or model.dtype != torch.bfloat16
        or getattr(model, "hf_quantizer", None) is not None
    ):
        return False
    return (
        8 * num_parameters(model) <= memory_of(device)
        and fastest(device).dtype == FLOAT32
    )


def placed(
    model: PreTrainedModel,
    device: str | torch.device | None = None,
    *,
    float32: bool | None = None,
) -> PreTrainedModel:
    """Move a model to a device for forward passes, in the precision in which it runs fastest there.

    Args:
        model: The model, which is changed in place.
        device: None means `best_device`.
        float32: Whether to cast it to float32; None to decide by `prefers_float32`.
    """
    on = device or best_device()
    moving: Any = model
    moved = (
        moving.float()
        if (prefers_float32(model, on) if float32 is None else float32)
        else moving
    )
    there: PreTrainedModel = moved.to(on)
    return there


def describe_placement(model: PreTrainedModel) -> list[str]:
    """Describe a model's device and dtype, with a warning if it will be slow."""
    device, dtype = model.device, str(model.dtype).removeprefix("torch.")
    devices = dict.fromkeys(
        str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()
    )
    if len(devices) > 1:
        return [f"on {', '.join(devices)}, {dtype}"]
    if device.type != "cpu":
        name = (
            f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
        )
        return [f"on {device}{name}, {dtype}"]
    threads, size = torch.get_num_threads(), num_parameters(model)
    slow = f"warning: {size / 1e9:.1f} billion parameters run on the CPU, which is slow"
    return [
        f"on cpu, {dtype}, {threads} thread{'s' * (threads > 1)}",
        *([slow] * (size >= LARGE)),
    ]


def num_parameters(model: PreTrainedModel) -> int:
    """Count the parameters of a model."""
    return sum(weight.numel() for weight in model.parameters())


def memory_of(device: str | torch.device) -> int:
    """Return a device's memory in bytes, for the CPU within container limits; 0 if unknown."""
    # Apple's GPUs share the CPU's memory
    if torch.device(device).type in (
        "cuda",
        "xpu",
    ):
        return int(
            torch.get_device_module(device).get_device_properties(device).total_memory
        )
    return min([_physical_bytes(), *(limit for limit, _ in _limits())])


def available_bytes() -> int:
    """Return the bytes that this process can allocate without swapping; 4 GiB if unknown."""
    free = 1024 * _numbers(PROC / "meminfo").get("MemAvailable", 0)
    machine = free or _physical_bytes() // 2 or UNKNOWN
    return min([machine, *(max(0, limit - used) for limit, used in _limits())])


def _physical_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def _limits() -> Iterator[tuple[int, int]]:
    """Yield limit and usage in bytes of each control group of this process."""
    try:
        groups = [
            line.split(":", 2)
            for line in (PROC / "self/cgroup").read_text().splitlines()
        ]
    except OSError:  # not Linux
        return
    for _, controllers, path in groups:
        if not controllers or "memory" in controllers.split(","):
            root, names = (
                (CGROUPS / "memory", OLDER_GROUP_FILES)
                if controllers
                else (CGROUPS, GROUP_FILES)
            )
            group = PurePosixPath(path.lstrip("/"))
            for folder in (root / part for part in (group, *group.parents)):
                limit, used = (_numbers(folder / name).get("") for name in names[:2])
                if limit is not None and used is not None:  # not "max"
                    yield (
                        limit,
                        used - _numbers(folder / "memory.stat").get(names[2], 0),
                    )


def _numbers(file: Path) -> dict[str, int]:
    """Parse the lines `name number` of a kernel file; a number without a name has the key ""."""
    try:
        found = re.findall(
            r"^(\S*?):?\s*(\d+)(?: kB)?$", file.read_text(), re.MULTILINE
        )
    except OSError:
        return {}
    return {name: int(number) for name, number in found}


def known_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Look up a floating-point dtype by name; None stays None."""
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (
        isinstance(kind, torch.dtype) and kind.is_floating_point
    ):
        raise RopepatchError(
            f"no dtype {dtype!r} of weights", hint="float32, bfloat16 or float16"
        )
    return kind


def check_device(device: str | torch.device) -> None:
    """Raise a `RopepatchError` with torch's reason if this machine lacks a device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        # It lists all that torch could have
        known = "device type at start" not in reason
        raise RopepatchError(
            f"no device {str(device)!r} here{f': {reason}' * known}",
            hint="use e.g. cpu, cuda, cuda:1 or mps",
        ) from error
