"""What a training step and a forward pass cost with each position encoding, against the stock rope.

    python eval/benchmarks/encoding_cost.py [--rounds N] [--tokens 2048 8192] [--json FILE]

A random LLaMA reads one row. `rope` is stock transformers with sdpa; every encoding is swapped into the same
model. In each round every one runs once, in shuffled order; figures are medians of the ratios within a round.
Memory is the peak of a process of its own over one training step, less what it holds with the model loaded.
Float32, with as many key-value heads as heads: repeating grouped ones costs nothing here, and does elsewhere.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from reporting import environment, resident_mib, spread, table, write
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import ropepatch

SEED, ROUNDS, TOKENS = 0, 3, (2048, 8192)
MOST = 1 << 15  # tokens that can be measured
STOCK = "stock rope"
PARAMETERS: dict[str, dict[str, Any]] = {
    "normalised": {"length": MOST},
    "learned": {"rows": MOST},
    "nope-layers": {"every": 2},
}
SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 344,
}
NAMES = (STOCK, *ropepatch.ENCODINGS)


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    config = LlamaConfig(**SHAPE, max_position_embeddings=MOST, attn_implementation="sdpa")
    return LlamaForCausalLM(config).train()


def within(model: LlamaForCausalLM, name: str) -> AbstractContextManager[Any]:
    if name == STOCK:
        return nullcontext()
    return ropepatch.swap(model, name, **PARAMETERS.get(name, {}))


def step(model: LlamaForCausalLM, ids: Tensor) -> None:
    model(ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)


def forward(model: LlamaForCausalLM, ids: Tensor) -> None:
    with torch.inference_mode():
        model.model(ids, use_cache=False)


KINDS = {"step": step, "forward": forward}


def measure_time(tokens: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of each encoding and, for each kind, the spread of its ratio to the stock rope."""
    model = make_model()
    ids = torch.randint(SHAPE["vocab_size"], (1, tokens))
    seconds = {kind: {name: list[float]() for name in NAMES} for kind in KINDS}
    order = random.Random(SEED)
    for index in range(rounds + 1):
        for name in order.sample(NAMES, len(NAMES)):
            with within(model, name):
                for kind, run in KINDS.items():
                    begin = time.perf_counter()
                    run(model, ids)
                    if index:  # the first round warms up
                        seconds[kind][name].append(time.perf_counter() - begin)
        print(f"{tokens} tokens: round {index} of {rounds}", file=sys.stderr, flush=True)
    return {
        kind: {
            name: {
                "milliseconds": spread([1e3 * value for value in values]),
                "ratio": spread([a / b for a, b in zip(values, found[STOCK], strict=True)]),
            }
            for name, values in found.items()
        }
        for kind, found in seconds.items()
    }


def measure_memory(name: str, tokens: int) -> float:
    """MiB at the peak of a training step, above the loaded model; in a process of its own."""
    torch.set_num_threads(1)
    model = make_model()
    step(model, torch.zeros(1, 16, dtype=torch.long))
    with within(model, name):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak so far is forgotten
        held = resident_mib("VmRSS")
        step(model, torch.randint(SHAPE["vocab_size"], (1, tokens)))
        return resident_mib("VmHWM") - held


def memory_of(name: str, tokens: int) -> float:
    command = [sys.executable, __file__, "--measure", name, "--tokens", str(tokens)]
    return float(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))


def benchmark(lengths: list[int], rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    cells = []
    for tokens in lengths:
        memory = {name: memory_of(name, tokens) for name in NAMES}
        times = measure_time(tokens, rounds)
        for name in NAMES:
            cells.append(
                {
                    "encoding": name,
                    "tokens": tokens,
                    **{kind: times[kind][name] for kind in KINDS},
                    "mib": round(memory[name], 1),
                    "memory_ratio": round(memory[name] / memory[STOCK], 3),
                }
            )
    return {
        "benchmark": "encoding_cost",
        "model": {"model_type": "llama", **SHAPE},
        "n": rounds,
        "seed": SEED,
        "dtype": "float32",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "cells": cells,
        "environment": environment(),
    }


def render(result: dict[str, Any]) -> str:
    rows = [("encoding", "tokens", "step ms", "of stock", "forward ms", "of stock", "MiB", "of stock")]
    for cell in result["cells"]:
        times = []
        for kind in KINDS:
            ratio = cell[kind]["ratio"]
            times.append(f"{cell[kind]['milliseconds']['median']:.0f}")
            times.append(f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})")
        memory = f"{cell['mib']:.0f}", f"{cell['memory_ratio']:.2f}"
        rows.append((cell["encoding"], str(cell["tokens"]), *times, *memory))
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--measure", metavar="ENCODING", help="print the memory of one encoding alone")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure_memory(arguments.measure, arguments.tokens[0])))
        return
    result = benchmark(arguments.tokens, arguments.rounds)
    print(render(result))
    if arguments.json:
        write(arguments.json, result)


if __name__ == "__main__":
    main()
