"""In which precision a machine computes a model fastest: bfloat16 is for GPUs and for processors with AMX."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

FLOAT32, BFLOAT16 = "float32", "bfloat16"
LARGEST = 512  # tokens of a measured pass, and rows and columns of its matrices: more rank no differently
LARGE = 10**9  # parameters, from which on a CPU takes long
CLEARLY = 0.9  # of the time of float32 at most, or float32 is taken, which rounds less
Shapes = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Precision:
    """A precision, and what was measured to choose it.

    Args:
        dtype: `float32`, `bfloat16` or `float16`.
        seconds: Of a forward and backward pass through one layer's matrices, by dtype; None where the
            precision was not chosen by a measurement.
        threads: Of the processor that was measured.
        flops: Floating-point operations of what was measured.
    """

    dtype: str
    seconds: dict[str, float] | None = None
    threads: int | None = None
    flops: float = field(default=0.0, repr=False)

    def rate(self, dtype: str) -> float | None:
        """Floating-point operations per second, in products of matrices; None where not measured."""
        return self.flops / self.seconds[dtype] if self.seconds and dtype in self.seconds else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data, of what is known."""
        known = {"dtype": self.dtype, "seconds": self.seconds, "threads": self.threads}
        return {key: value for key, value in known.items() if value is not None}

    def __str__(self) -> str:
        if self.seconds is None:
            return self.dtype
        times = ", ".join(f"{dtype} {1000 * took:.1f} ms" for dtype, took in self.seconds.items())
        return f"{self.dtype}, the faster on this CPU ({times}, for one layer's matrices)"


def fastest(model: nn.Module, device: str | torch.device | None = None) -> Precision:
    """The precision to train a model in: of a GPU bfloat16 if it has it, of a CPU what is measured as faster.

    The model may be on the meta device. It takes some tenths of a second, once for each shape of a model.

    Args:
        model: The model.
        device: Where it is to be; None for the GPU, if there is one.
    """
    if torch.cuda.is_available() and (device is None or torch.device(device).type == "cuda"):
        return Precision(BFLOAT16 if torch.cuda.is_bf16_supported() else FLOAT32)
    shapes, threads = _matrices(model), torch.get_num_threads()
    seconds = dict(_measured(shapes, threads))
    dtype = BFLOAT16 if seconds[BFLOAT16] < CLEARLY * seconds[FLOAT32] else FLOAT32
    flops = sum(6.0 * LARGEST * rows * columns for rows, columns in shapes)
    return Precision(dtype, seconds, threads, flops)


def reads_faster_whole(model: PreTrainedModel, device: str | torch.device) -> bool:
    """Whether a model of bfloat16 is to be read in float32: on a CPU that is slower in bfloat16.

    Never the other way round, as that would round its weights; and never where float32 would take more than
    half of the memory.
    """
    on_cpu = torch.device(device).type == "cpu"
    if not on_cpu or model.dtype != torch.bfloat16 or getattr(model, "hf_quantizer", None) is not None:
        return False
    needed = 4 * sum(weight.numel() for weight in model.parameters())
    return 2 * needed <= _memory() and fastest(model, device).dtype == FLOAT32


def put(model: Any, device: str | torch.device, *, whole: bool) -> Any:
    """A model on its device, in float32 if that is how it is to be read."""
    return (model.float() if whole else model).to(device)


def whereabouts(model: PreTrainedModel) -> list[str]:
    """On what a model is read and in which precision, in words; and a warning where that will take long."""
    device, dtype = model.device, str(model.dtype).removeprefix("torch.")
    places = dict.fromkeys(str(place) for place in (getattr(model, "hf_device_map", None) or {}).values())
    if len(places) > 1:
        return [f"on {', '.join(places)}, {dtype}"]
    if device.type != "cpu":
        name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
        return [f"on {device}{name}, {dtype}"]
    threads = torch.get_num_threads()
    lines = [f"on cpu, {dtype}, {threads} thread{'s' * (threads > 1)}"]
    size = sum(weight.numel() for weight in model.parameters())
    if size >= LARGE:
        rate = fastest(model).rate(dtype)
        basis = f": {2000 * size / rate:.0f} s or more per 1,000 tokens, by its matrices" if rate else ""
        lines.append(f"warning: {size / 1e9:.1f} billion parameters are read on the CPU{basis}")
    return lines


def _memory() -> int:
    """Of this machine, in bytes; 0 where it does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def _matrices(model: nn.Module) -> Shapes:
    """Outputs and inputs of the linear layers, without that of the head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    layers = (layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not head)
    sizes = ((layer.out_features, layer.in_features) for layer in layers)
    return frozenset((min(rows, LARGEST), min(columns, LARGEST)) for rows, columns in sizes)


@cache
def _measured(shapes: Shapes, threads: int) -> tuple[tuple[str, float], ...]:
    """Seconds of a pass in either precision; the fastest of three, after one that does not count."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"):
        weights = [torch.rand(shape, dtype=torch.float32, requires_grad=True) for shape in sorted(shapes)]
        inputs = [torch.rand(LARGEST, weight.shape[1], dtype=torch.float32) for weight in weights]

        def run(mixed: bool) -> float:
            began = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                for weight, tokens in zip(weights, inputs, strict=True):
                    out = nn.functional.linear(tokens.requires_grad_(), weight)
                    torch.autograd.grad(out.sum(), [tokens, weight])
            return time.perf_counter() - began

        return tuple(
            (dtype, min([run(mixed) for _ in range(4)][1:]))
            for dtype, mixed in ((FLOAT32, False), (BFLOAT16, True))
        )
