"""The precision of a device's computations: bfloat16 with hardware support, else float32.

The choice depends on the hardware, not on a benchmark. AVX512_BF16 suffices, as measured on an AMD EPYC
without AMX (one thread, torch 2.13). Time of bfloat16 over that of float32, for `tiny` and for a LLaMA of 75M
parameters: forward pass over 256 and 512 tokens 0.55 and 0.31; training step on 256 tokens in mixed precision
0.69 and 0.40; one token at a time 1.47 and 0.71.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from ropepatch.errors import RopepatchError

FLOAT32, BFLOAT16 = "float32", "bfloat16"
AMPERE = 8, 0  # the first compute capability with units for bfloat16
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Of torch.cpu: whether it has AMX, or AVX512_BF16
UNITS = "_is_amx_tile_supported", "_is_avx512_bf16_supported"


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


def fastest(device: str | torch.device | None = None) -> str:
    """Return the name of a device's fastest dtype; None means `best_device`."""
    on = torch.device(device or best_device())
    has_units = False
    if on.type == "cuda":
        has_units = torch.cuda.get_device_capability(on) >= AMPERE
    elif on.type == "cpu":
        has_units = any(getattr(torch.cpu, name, bool)() for name in UNITS)
    return BFLOAT16 if has_units else FLOAT32


def prefers_float32(model: PreTrainedModel, device: str | torch.device) -> bool:
    """Return whether a bfloat16 model runs faster in float32, as on a CPU without bfloat16 units.

    False if float32 would need more than half of the machine's memory.
    """
    on_cpu = torch.device(device).type == "cpu"
    is_quantised = getattr(model, "hf_quantizer", None) is not None
    if not on_cpu or model.dtype != torch.bfloat16 or is_quantised:
        return False
    fits = 8 * model.num_parameters() <= memory_of(device)
    return fits and fastest(device) == FLOAT32


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
    moved: Any = model
    if prefers_float32(model, on) if float32 is None else float32:
        moved = moved.float()
    there: PreTrainedModel = moved.to(on)
    return there


def describe_placement(model: PreTrainedModel) -> str:
    """Describe a model's device and dtype."""
    dtype = str(model.dtype).removeprefix("torch.")
    devices = getattr(model, "hf_device_map", None) or {"": model.device}
    places = ", ".join(dict.fromkeys(map(str, devices.values())))
    return f"on {places}, {dtype}"


def memory_of(device: str | torch.device) -> int:
    """Return a device's memory in bytes, for the CPU within container limits."""
    # Apple's GPUs share the CPU's memory
    if torch.device(device).type in ("cuda", "xpu"):
        properties = torch.get_device_module(device).get_device_properties(device)
        return int(properties.total_memory)
    total: int = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in _limits())])


def available_bytes() -> int:
    """Return the bytes that this process can allocate without swapping."""
    machine: int = psutil.virtual_memory().available
    return min([machine, *(max(0, limit - used) for limit, used in _limits())])


def _limits() -> Iterator[tuple[int, int]]:
    """Yield limit and usage in bytes of each control group (v2) of this process."""
    try:
        groups = (PROC / "self/cgroup").read_text()
    except OSError:  # not Linux
        return
    group = PurePosixPath(groups.rpartition("0::")[2].strip().lstrip("/"))
    for folder in (CGROUPS / part for part in (group, *group.parents)):
        limit = _numbers(folder / "memory.max").get("")
        used = _numbers(folder / "memory.current").get("")
        if limit is not None and used is not None:  # not "max"
            cached = _numbers(folder / "memory.stat").get("inactive_file", 0)
            yield limit, used - cached


def _numbers(file: Path) -> dict[str, int]:
    """Parse the lines `name number` of a kernel file; a number without a name has the key ""."""
    if not file.exists():
        return {}
    found = re.findall(r"^(\S*?)\s*(\d+)$", file.read_text(), re.MULTILINE)
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
        raise RopepatchError(
            f"no device {str(device)!r} here: {str(error).splitlines()[0]}",
            hint="use e.g. cpu, cuda, cuda:1 or mps",
        ) from error
