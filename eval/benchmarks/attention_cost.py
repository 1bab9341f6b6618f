"""What reading, decoding and a training step cost with each attention map, against stock sdpa.

    python eval/benchmarks/attention_cost.py [--rounds N] [--tokens 2048 4096] [--json FILE]

A random LLaMA with SmolLM2-135M's heads reads one row, four times its window. `stock` is the same model with
no map. Prefill fills a cache; a decode step is the median of 48 behind it; a training step is forward
and backward. In each round every one runs once, in shuffled order; figures are medians of the ratios of CPU
time within a round, with their range. Memory is the peak of a process of its own over a training step, less
what it holds when the model is loaded. Float32, one thread.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from reporting import environment, resident_mib, spread, table, write
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


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="sdpa")).eval()


def within(model: LlamaForCausalLM, name: str, tokens: int) -> AbstractContextManager[Any]:
    if name == STOCK:
        return nullcontext()
    model.config.max_position_embeddings = int(tokens / BEYOND.get(name, 4))
    return map_attention(model, name, to=tokens)


def read(model: LlamaForCausalLM, ids: Tensor) -> dict[str, float]:
    """Seconds of CPU time of a prefill, of a decode step and of a training step."""
    cache = DynamicCache(config=model.config)
    steps = []
    with torch.inference_mode():
        begin = time.process_time()
        model(ids, past_key_values=cache, logits_to_keep=1)
        prefill = time.process_time() - begin
        for _ in range(STEPS):
            begin = time.process_time()
            model(ids[:, :1], past_key_values=cache)
            steps.append(time.process_time() - begin)
    begin = time.process_time()
    train(model, ids)
    training = time.process_time() - begin
    model.zero_grad(set_to_none=True)
    return {"prefill": prefill, "decode": statistics.median(steps), "training": training}


def train(model: LlamaForCausalLM, ids: Tensor) -> None:
    model(ids, labels=ids, use_cache=False).loss.backward()


def measure_memory(name: str, tokens: int) -> float:
    """MiB of a training step in this process, which does nothing else."""
    model = make_model()
    ids = torch.randint(SHAPE["vocab_size"], (1, tokens))
    with within(model, name, tokens):
        loaded = resident_mib("VmRSS")
        train(model, ids)
    return resident_mib("VmHWM") - loaded


def memory_of(name: str, tokens: int) -> float:
    command = [sys.executable, __file__, "--measure", name, "--tokens", str(tokens)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def measure(tokens: int, rounds: int) -> list[dict[str, Any]]:
    model = make_model()
    ids = torch.randint(SHAPE["vocab_size"], (1, tokens))
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    order = random.Random(SEED)
    for index in range(rounds + 1):
        for name in order.sample(NAMES, len(NAMES)):
            with within(model, name, tokens):
                found = read(model, ids)
            if index:  # the first round warms up
                seconds[name].append(found)
        print(f"{tokens} tokens: round {index} of {rounds}", file=sys.stderr, flush=True)
    cells = []
    for name, mine in seconds.items():
        cell: dict[str, Any] = {"map": name, "tokens": tokens, "training_mib": memory_of(name, tokens)}
        for kind in mine[0]:
            pairs = [(one[kind], stock[kind]) for one, stock in zip(mine, seconds[STOCK], strict=True)]
            cell[kind] = {
                "milliseconds": spread([1e3 * one for one, _ in pairs]),
                "ratio": spread([one / stock for one, stock in pairs]),
            }
        cells.append(cell)
    return cells


def benchmark(lengths: list[int], rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        "benchmark": "attention_cost",
        "model": {"model_type": "llama", **SHAPE},
        "n": rounds,
        "seed": SEED,
        "dtype": "float32",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "cells": [cell for tokens in lengths for cell in measure(tokens, rounds)],
        "environment": environment(),
    }


def render(result: dict[str, Any]) -> str:
    rows = [
        (
            "map",
            "tokens",
            "prefill ms",
            "of stock",
            "decode ms",
            "of stock",
            "training ms",
            "of stock",
            "MiB",
        ),
    ]
    for cell in result["cells"]:
        row = [cell["map"], str(cell["tokens"])]
        for kind in ("prefill", "decode", "training"):
            ratio = cell[kind]["ratio"]
            row.append(f"{cell[kind]['milliseconds']['median']:.1f}")
            row.append(f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})")
        rows.append((*row, f"{cell['training_mib']:.0f}"))
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--measure", choices=NAMES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        torch.set_num_threads(1)
        print(measure_memory(arguments.measure, *arguments.tokens))
        return
    result = benchmark(arguments.tokens, arguments.rounds)
    print(render(result))
    if arguments.json:
        write(arguments.json, result)


if __name__ == "__main__":
    main()
