"""Cost of prefill, decoding and a training step with each position remapping, relative to stock SDPA.

    python eval/benchmarks/attention_cost.py [--tokens 2048 4096] [--rounds N]

The model is a random LLaMA with SmolLM2-135M's heads, on one sequence of four times its original length.
`stock` is the same model without remapping. A decode step is the median of 48 after the prefill; a training
step is forward and backward. In each round stock and remapping run once, in shuffled order. Figures are
medians of the ratios of time within a round, with their range. Memory is the peak of a separate process over
a training step, minus the loaded model. CPU: float32, one thread, CPU time. GPU: bfloat16, seconds between
synchronisations, memory of the GPU, stock with flash attention. The target there is at most 1.5 times stock.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import ropepatch
from ropepatch.attention import REMAPPINGS

sys.path.insert(0, str(Path(__file__).parents[1] / "studies"))

from reporting import in_own_process, in_turn, resident_mib, spread
from study import Row, Study

SEED, ROUNDS, STEPS = 0, 3, 48
STOCK = "stock"
BEYOND = {
    "string": 1.4
}  # times L, because this remapping supports less than four times L
SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 576,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
}
NAMES = (STOCK, *REMAPPINGS)
GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
TOKENS = {"cpu": (2048, 4096), "cuda": (8192, 32768, 16384, 65536, 131072)}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    return (
        LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="sdpa"))
        .eval()
        .to(DEVICE, DTYPE)
    )


def make_ids(tokens: int) -> Tensor:
    return torch.randint(SHAPE["vocab_size"], (1, tokens), device=DEVICE)


def seconds() -> float:
    """The CPU time; on a GPU, the wall time after its work is finished."""
    if not GPU:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def within(
    model: LlamaForCausalLM, tokens: int, name: str
) -> AbstractContextManager[Any]:
    if name == STOCK:
        return nullcontext()
    model.config.max_position_embeddings = int(tokens / BEYOND.get(name, 4))
    return ropepatch.patch(model, name, to=tokens)


def times(model: LlamaForCausalLM, ids: Tensor) -> dict[str, float]:
    """The seconds of a prefill, of a decode step and of a training step."""
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
    return {
        "prefill": prefill,
        "decode": statistics.median(steps),
        "training": training,
    }


def train(model: LlamaForCausalLM, ids: Tensor) -> None:
    model(ids, labels=ids, use_cache=False).loss.backward()


def measure_memory(name: str, tokens: str | int) -> float:
    """The MiB of a training step in this process; on a CPU, a separate process."""
    torch.set_num_threads(1)
    model = make_model()
    ids = make_ids(int(tokens))
    with within(model, int(tokens), name):
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        loaded = torch.cuda.memory_allocated() / 2**20 if GPU else resident_mib("VmRSS")
        train(model, ids)
    return (
        torch.cuda.max_memory_allocated() / 2**20 if GPU else resident_mib("VmHWM")
    ) - loaded


def cases(given: Namespace) -> Iterator[Row]:
    for tokens in given.tokens or TOKENS[given.device]:
        yield from (
            {"device": given.device, "tokens": tokens, "map": name} for name in NAMES
        )


def measure(case: Row, given: Namespace) -> Row:
    name, tokens = case["map"], case["tokens"]
    if case["device"] != DEVICE:
        raise SystemExit(
            f"error: this process computes on {DEVICE}, expected {case['device']}"
        )
    try:
        found = timed(name, tokens, given.rounds)
        memory = (
            measure_memory(name, tokens) if GPU else in_own_process(name, str(tokens))
        )
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    row: Row = {"rounds": given.rounds, "training_mib": memory}
    for kind in found[name][0]:
        pairs = [
            (one[kind], stock[kind])
            for one, stock in zip(found[name], found[STOCK], strict=True)
        ]
        row[kind] = {
            "milliseconds": spread([1e3 * one for one, _ in pairs]),
            "ratio": spread([one / stock for one, stock in pairs]),
        }
    return row


def timed(name: str, tokens: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """The times of stock and of a remapping, by round."""
    model = make_model()
    runs = dict.fromkeys(
        dict.fromkeys((STOCK, name)), partial(times, model, make_ids(tokens))
    )
    return in_turn(runs, rounds, within=partial(within, model, tokens), seed=SEED)[1]


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=TOKENS, default=DEVICE, help="a GPU, if there is one"
    )
    parser.add_argument("--tokens", type=int, nargs="+", help="tokens of the sequence")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.set_defaults(threads=1)


STUDY = Study(
    name="attention_cost",
    about=__doc__,
    cases=cases,
    measure=measure,
    options=add_options,
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:  # in a separate process
        print(json.dumps(measure_memory(*sys.argv[2:])))
    else:
        STUDY.main()
