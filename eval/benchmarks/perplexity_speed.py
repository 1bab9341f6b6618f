"""Time and memory of a perplexity, against the procedures behind published tables.

    python eval/benchmarks/perplexity_speed.py [--rounds N] [--json FILE]

The published procedure, as in the scripts of the papers and the guide of Hugging Face, takes one forward pass
per document and length, or per sliding window, with ``labels``, batch 1 and the logits of all positions. Its
passes keep no cache here, which favours it. Both process the same documents with the same model, in rounds of
shuffled order. Figures are medians of the ratios within a round, and both must agree to 1e-4 nats per token.
The floor is the decoder without head and loss. Memory is the peak of a separate process, minus the loaded
model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from reporting import in_own_process, in_turn, ratio, resident_mib, run_benchmark, spread
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import ropepatch
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.evaluation.perplexity import windows

TARGET = {"curve: published / ours": 10.0, "memory: ours / published": 0.25, "sliding: published / ours": 1.0}
AGREEMENT = 1e-4  # nats per token
SEED, ROUNDS, DOCUMENTS = 0, 5, 2
TRAINED, TIMES, NUM_LENGTHS = 256, 16, 32
LENGTHS = [TRAINED * TIMES * step // NUM_LENGTHS for step in range(1, NUM_LENGTHS + 1)]
SLIDING = {"window": 1024, "stride": 256}

SHAPE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
}
WINDOW = 32_768
MEMORY: dict[str, tuple[dict[str, int], int]] = {
    "one-pass": ({}, WINDOW),
    "sliding": ({"window": WINDOW, "stride": 8192}, WINDOW + 8192),
}


def label(sliding: dict[str, int]) -> str:
    """The name of a protocol in the result."""
    return "sliding window={window} stride={stride}".format(**sliding) if sliding else "one-pass"


def published_loss(model: Any, ids: Tensor, scored: int) -> tuple[float, int]:
    """The nats of the last ``scored`` tokens of a window, and their number."""
    labels = ids.clone()
    labels[: len(ids) - scored] = -100
    count = int((labels[1:] != -100).sum())
    return model(ids[None], labels=labels[None], use_cache=False).loss.item() * count, count


def published_one_pass(model: Any, documents: list[Tensor], lengths: list[int]) -> list[float]:
    """The nats per token at each length."""
    means = []
    for length in lengths:
        sums = [published_loss(model, ids[:length], length) for ids in documents]
        means.append(sum(nats for nats, _ in sums) / sum(count for _, count in sums))
    return means


def published_sliding(model: Any, documents: list[Tensor], window: int, stride: int) -> list[float]:
    """The nats per token over all documents."""
    sums = []
    for ids in documents:
        read = 0
        for begin in range(0, len(ids), stride):
            end = min(begin + window, len(ids))
            sums.append(published_loss(model, ids[begin:end], end - read))
            read = end
            if end == len(ids):
                break
    return [sum(nats for nats, _ in sums) / sum(count for _, count in sums)]


def our_one_pass(model: Any, documents: list[Tensor], lengths: list[int]) -> list[float]:
    curve = ropepatch.perplexity(model, None, documents)
    return [curve.at(length).value for length in lengths]


def our_sliding(model: Any, documents: list[Tensor], window: int, stride: int) -> list[float]:
    curve = ropepatch.perplexity(model, None, documents, window=window, stride=stride)
    return [curve.between(0, max(map(len, documents))).value]


def one_pass_floor(model: Any, documents: list[Tensor]) -> None:
    for ids in documents:
        model.model(ids[None], use_cache=False)


def sliding_floor(model: Any, documents: list[Tensor], window: int, stride: int) -> None:
    for index, ids in enumerate(documents):
        for one in windows(index, ids, window, stride):
            model.model(one.ids[None], use_cache=False)


def compare(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    """The seconds and ratios of "published", "ours" and "floor" over the rounds."""
    seconds, results = in_turn(runs, rounds, warm_up=0, seed=SEED)
    pairs = zip(results["published"][-1], results["ours"][-1], strict=True)
    difference = max(abs(published - ours) for published, ours in pairs)
    if not difference <= AGREEMENT:
        raise SystemExit(f"the two procedures differ by {difference:.2e} nats per token: not the same work")

    return {
        "rounds": rounds,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "published / ours": ratio(seconds, "published", "ours"),
        "ours / floor": ratio(seconds, "ours", "floor"),
        "largest difference in nats per token": float(f"{difference:.3g}"),
    }


def time_both(rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, tokenizer = ropepatch.load("tiny", device="cpu")
    documents = [tale.ids for tale in held_out_tales(tokenizer, length=LENGTHS[-1], count=DOCUMENTS)]
    one_pass_floor(model, documents)  # warm-up
    curve = compare(
        {
            "published": lambda: published_one_pass(model, documents, LENGTHS),
            "ours": lambda: our_one_pass(model, documents, LENGTHS),
            "floor": lambda: one_pass_floor(model, documents),
        },
        rounds,
    )
    sliding = compare(
        {
            "published": lambda: published_sliding(model, documents, **SLIDING),
            "ours": lambda: our_sliding(model, documents, **SLIDING),
            "floor": lambda: sliding_floor(model, documents, **SLIDING),
        },
        rounds,
    )
    shape = {"documents": DOCUMENTS, "tokens": LENGTHS[-1]}
    return {
        "model": "tiny",
        "vocabulary": model.config.vocab_size,
        "curve": {**shape, "lengths": LENGTHS, **curve},
        "sliding": {**shape, "protocol": label(SLIDING), **sliding},
    }


@torch.inference_mode()
def measure_memory(procedure: str, name: str) -> dict[str, float]:
    """The memory of one procedure; in a separate process."""
    torch.manual_seed(SEED)
    sliding, length = MEMORY[name]
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=length)).eval()
    documents = [torch.randint(SHAPE["vocab_size"], (length,))]
    model.model(documents[0][None, :16], use_cache=False)
    loaded = resident_mib("VmRSS")
    if sliding:
        slide = published_sliding if procedure == "published" else our_sliding
        (mean,) = slide(model, documents, **sliding)
    else:
        run = published_one_pass if procedure == "published" else our_one_pass
        (mean,) = run(model, documents, [length])
    peak = resident_mib("VmHWM")
    return {"loaded_mib": loaded, "peak_mib": peak, "net_mib": peak - loaded, "nats": mean}


def compare_memory() -> dict[str, Any]:
    found: dict[str, Any] = {"model": SHAPE, "dtype": "float32"}
    for name, (sliding, length) in MEMORY.items():
        both = {procedure: in_own_process(procedure, name) for procedure in ("published", "ours")}
        difference = abs(both["published"]["nats"] - both["ours"]["nats"])
        if not difference <= AGREEMENT:
            raise SystemExit(f"{name}: the two differ by {difference:.2e} nats per token: not the same work")
        net = both["ours"]["net_mib"] / both["published"]["net_mib"]
        shape = {"protocol": label(sliding), "tokens": length}
        found[name] = {**shape, **both, "ours / published": float(f"{net:.4g}")}
    return found


def benchmark(rounds: int) -> dict[str, Any]:
    memory = compare_memory()
    with torch.inference_mode():
        times = time_both(rounds)
    return {
        "target": TARGET,
        "agreement_nats": AGREEMENT,
        "seed": SEED,
        "dtype": "float32",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        **times,
        "memory": memory,
    }


if __name__ == "__main__":
    run_benchmark(__doc__, benchmark, measure_memory, rounds=ROUNDS)
