"""What reading, decoding and a training step cost with each attention map, against stock sdpa.

    python eval/benchmarks/attention_cost.py [--rounds N] [--tokens 2048 4096] [--json FILE]

A random LLaMA with SmolLM2-135M's heads reads one row, four times its window. `stock` is the same model with
no map. Prefill fills a cache; a decode step is the median of 48 behind it; a training step is forward
and backward. In each round every one runs once, in shuffled order; figures are medians of the ratios of
time within a round, with their range. Memory is the peak of a process of its own over a training step, less
what it holds when the model is loaded. On a CPU: float32, one thread, CPU time. On a GPU, if there is one:
bfloat16, seconds between synchronisations, memory of the GPU.
"""

from __future__ import annotations

import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from reporting import in_own_process, in_turn, resident_mib, run_benchmark, spread
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from ropepatch.attention import MAPS, map_attention

SEED, ROUNDS, TOKENS, STEPS = 0, 3, (2048, 4096), 48
STOCK = "stock"
BEYOND = {"string": 1.4}  # of the window, where a map reaches no farther than 4
SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 576,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
}
NAMES = (STOCK, *MAPS)
GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="sdpa")).eval().to(DEVICE, DTYPE)


def make_ids(tokens: int) -> Tensor:
    return torch.randint(SHAPE["vocab_size"], (1, tokens), device=DEVICE)


def seconds() -> float:
    """CPU time; on a GPU, wall time once its work is done."""
    if not GPU:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def within(model: LlamaForCausalLM, tokens: int, name: str) -> AbstractContextManager[Any]:
    if name == STOCK:
        return nullcontext()
    model.config.max_position_embeddings = int(tokens / BEYOND.get(name, 4))
    return map_attention(model, name, to=tokens)


def read(model: LlamaForCausalLM, ids: Tensor) -> dict[str, float]:
    """Seconds of a prefill, of a decode step and of a training step."""
    cache = DynamicCache(config=model.config)
    steps = []
    with torch.inference_mode():
        begin = seconds()
        model(ids, past_key_values=cache, logits_to_keep=1)
        prefill = seconds() - begin
        for _ in range(STEPS):
            begin = seconds()
            model(ids[:, :1], past_key_values=cache)
            steps.append(seconds() - begin)
    begin = seconds()
    train(model, ids)
    training = seconds() - begin
    model.zero_grad(set_to_none=True)
    return {"prefill": prefill, "decode": statistics.median(steps), "training": training}


def train(model: LlamaForCausalLM, ids: Tensor) -> None:
    model(ids, labels=ids, use_cache=False).loss.backward()


def measure_memory(name: str, tokens: str) -> float:
    """MiB of a training step in this process, which does nothing else."""
    torch.set_num_threads(1)
    model = make_model()
    ids = make_ids(int(tokens))
    with within(model, int(tokens), name):
        loaded = torch.cuda.memory_allocated() / 2**20 if GPU else resident_mib("VmRSS")
        train(model, ids)
    return (torch.cuda.max_memory_allocated() / 2**20 if GPU else resident_mib("VmHWM")) - loaded


def measure(tokens: int, rounds: int) -> list[dict[str, Any]]:
    model = make_model()
    ids = make_ids(tokens)
    runs = dict.fromkeys(NAMES, partial(read, model, ids))
    _, found = in_turn(runs, rounds, within=partial(within, model, tokens), seed=SEED)
    cells = []
    for name, mine in found.items():
        cell: dict[str, Any] = {"map": name, "tokens": tokens}
        cell["training_mib"] = in_own_process(name, str(tokens))
        for kind in mine[0]:
            pairs = [(one[kind], stock[kind]) for one, stock in zip(mine, found[STOCK], strict=True)]
            cell[kind] = {
                "milliseconds": spread([1e3 * one for one, _ in pairs]),
                "ratio": spread([one / stock for one, stock in pairs]),
            }
        cells.append(cell)
    return cells


def benchmark(rounds: int, tokens: list[int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        "model": {"model_type": "llama", **SHAPE},
        "n": rounds,
        "seed": SEED,
        "dtype": str(DTYPE).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if GPU else DEVICE,
        "threads": torch.get_num_threads(),
        "cells": [cell for length in tokens for cell in measure(length, rounds)],
    }


if __name__ == "__main__":
    run_benchmark(__doc__, benchmark, measure_memory, rounds=ROUNDS, tokens=TOKENS)
