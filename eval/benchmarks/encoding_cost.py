"""Cost of a training step and a forward pass with each position encoding, against stock RoPE.

    python eval/benchmarks/encoding_cost.py [--rounds N] [--tokens 2048 8192] [--json FILE]

The model is a random LLaMA on one sequence. `rope` is stock transformers with sdpa; every encoding is swapped
into the same model. In each round each runs once, in shuffled order; figures are medians of the ratios within
a round. Memory is the peak of a separate process over one training step, minus the loaded model. Float32,
with as many key-value heads as heads: repeating grouped ones costs nothing here, and does elsewhere.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from reporting import in_own_process, in_turn, ratio, resident_mib, run_benchmark, spread
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
    """The seconds of each encoding and, for each kind, the spread of its ratio to stock RoPE."""
    model = make_model()
    ids = torch.randint(SHAPE["vocab_size"], (1, tokens))

    found = {}
    for kind, run in KINDS.items():
        seconds, _ = in_turn(
            dict.fromkeys(NAMES, partial(run, model, ids)), rounds, within=partial(within, model), seed=SEED
        )
        found[kind] = {
            name: {
                "milliseconds": spread([1e3 * value for value in values]),
                "ratio": ratio(seconds, name, STOCK),
            }
            for name, values in seconds.items()
        }
    return found


def measure_memory(name: str, tokens: str) -> float:
    """The peak MiB of a training step, above the loaded model; in a separate process."""
    torch.set_num_threads(1)
    model = make_model()
    step(model, torch.zeros(1, 16, dtype=torch.long))
    with within(model, name):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
        held = resident_mib("VmRSS")
        step(model, torch.randint(SHAPE["vocab_size"], (1, int(tokens))))
        return resident_mib("VmHWM") - held


def benchmark(rounds: int, tokens: list[int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    cells = []
    for length in tokens:
        memory = {name: in_own_process(name, str(length)) for name in NAMES}
        times = measure_time(length, rounds)
        for name in NAMES:
            cells.append(
                {
                    "encoding": name,
                    "tokens": length,
                    **{kind: times[kind][name] for kind in KINDS},
                    "mib": round(memory[name], 1),
                    "memory_ratio": round(memory[name] / memory[STOCK], 3),
                }
            )
    return {
        "model": {"model_type": "llama", **SHAPE},
        "n": rounds,
        "seed": SEED,
        "dtype": "float32",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "cells": cells,
    }


if __name__ == "__main__":
    run_benchmark(__doc__, benchmark, measure_memory, rounds=ROUNDS, tokens=TOKENS)
