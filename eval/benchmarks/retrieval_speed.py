"""Speed of retrieval with each prompt processed once, against one whole prompt per question.

    python eval/benchmarks/retrieval_speed.py [--rounds N] [--haystacks N] [--json FILE]

Both ask the same questions on the same prompts: 5 lengths, and needles in all fifths of the depth. The
baseline processes one prompt per question, in a batch of one, without a cache, and computes only the logits
of the answer. The other side is `ropepatch.retrieve`, with its check of the first answers against whole
prompts. In every round both run once, in shuffled order; the ratio is the baseline's time over ours within a
round. Both must give the same answers, and their log-probs must agree to 1e-4 nats per token.

Tokens at 16,384 and 32,768 are counted, not processed: all tokens of 10 prompts with 8 and with 16 needles of
each of two kinds, at the 5 doubling lengths up to there, with questions, answers and the check.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from reporting import in_turn, ratio, run_benchmark, spread
from transformers import LlamaConfig, LlamaForCausalLM

import ropepatch
from ropepatch.data.haystack import Haystack, Haystacks
from ropepatch.evaluation.retrieval import Retrieval, ask

EACH, ONCE = "one prompt each", "read once"
TARGET = {"time: one prompt each / read once": 10.0, "tokens: one prompt each / read once": 30.0}
AGREEMENT = 1e-4  # nats per token
SEED, ROUNDS, HAYSTACKS = 0, 5, 10
FIFTHS = 5  # of the depth
METHOD, TARGET_LENGTH = "yarn", 2048
SHAPE: dict[str, Any] = {
    "vocab_size": 1024,  # of tiny, whose tokenizer encodes the haystacks
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 688,
}
DEFAULT: dict[str, Any] = {"keys": 8, "kinds": ("number", "sentence"), "seed": SEED}
TINY = Haystacks(lengths=(512, 768, 1024, 1536, 2048), count=10, **DEFAULT)
LONG = Haystacks(lengths=(512, 1024, 2048, 4096, 8192), count=3, **DEFAULT)
COUNTED = ((16_384, 8), (32_768, 8), (16_384, 16), (32_768, 16))  # length, keys of each kind


def tiny_model() -> Any:
    model, _ = ropepatch.load("tiny", device="cpu")
    ropepatch.patch(model, ropepatch.plan("tiny", to=TARGET_LENGTH, method=METHOD))
    return model


def random_model() -> Any:
    torch.manual_seed(SEED)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=LONG.lengths[-1])).eval()


def tokens_read(haystacks: Sequence[Haystack]) -> dict[str, dict[str, int]]:
    """The tokens that each procedure processes: of haystacks, and in total."""
    first, asked = haystacks[0], [pair for haystack in haystacks for pair in prompts(haystack)]
    ends = min(first.stops), max(first.stops)
    checked = [next(pair for pair in prompts(first) if pair[0] == first.stops[length]) for length in ends]
    questions = sum(question for _, question in asked)
    once = sum(len(haystack.ids) for haystack in haystacks)
    return {
        EACH: {
            "haystacks": sum(stop for stop, _ in asked),
            "all": sum(map(sum, asked)),
        },
        ONCE: {"haystacks": once, "all": once + questions + sum(map(sum, checked))},
    }


def prompts(haystack: Haystack) -> list[tuple[int, int]]:
    """The tokens of every prompt: those of the haystack, and of the question with its answer."""
    return [
        (haystack.stops[length], len(question))
        for length, asked in haystack.asked.items()
        for question in asked
    ]


def cells(retrieval: Retrieval) -> int:
    """The number of cells of length and fifth of the depth with answers."""
    return len({(answer.length, min(int(FIFTHS * answer.depth), FIFTHS - 1)) for answer in retrieval.answers})


def difference(first: Retrieval, second: Retrieval) -> float:
    """The largest difference in log-prob; infinite if other answers are correct."""
    pairs = list(zip(first.answers, second.answers, strict=True))
    if any(a._replace(log_prob=0) != b._replace(log_prob=0) for a, b in pairs):
        return float("inf")
    return max(abs(a.log_prob - b.log_prob) for a, b in pairs)


def measure(model: Any, haystacks: Sequence[Haystack], rounds: int) -> dict[str, Any]:
    """The seconds of both procedures over the rounds, and their ratio."""
    runs = {EACH: partial(ask, model, haystacks, read_once=False), ONCE: partial(ask, model, haystacks)}
    ask(model, haystacks[:1])  # warm up
    seconds, results = in_turn(runs, rounds, warm_up=0, seed=SEED)
    largest = max(map(difference, results[EACH], results[ONCE]))
    if not largest <= AGREEMENT:
        raise SystemExit(f"the two procedures differ by {largest:.2e} nats per token: not the same work")
    once = results[ONCE][-1]
    return {
        "answers": len(once.answers),
        "found": sum(answer.found for answer in once.answers),
        "cells with answers": cells(once),
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "one prompt each / read once": ratio(seconds, EACH, ONCE),
        "largest difference in nats per token": float(f"{largest:.3g}"),
        **compared(haystacks),
    }


def compared(haystacks: Sequence[Haystack]) -> dict[str, Any]:
    """The tokens of both procedures, and their ratio."""
    tokens = tokens_read(haystacks)
    fewer = {part: round(tokens[EACH][part] / tokens[ONCE][part], 2) for part in tokens[ONCE]}
    return {"tokens": tokens, "tokens: one prompt each / read once": fewer}


def described(plan: Haystacks) -> dict[str, Any]:
    return {
        "lengths": list(plan.lengths),
        "haystacks": plan.count,
        "keys": plan.keys,
        "kinds": list(plan.kinds),
    }


def counted(tokenizer: Any, longest: int, keys: int) -> dict[str, Any]:
    """The tokens of 10 haystacks at 5 doubling lengths."""
    lengths = [longest // 2**halvings for halvings in range(5)]
    plan = Haystacks(lengths=lengths, count=10, **DEFAULT | {"keys": keys})
    return {**described(plan), **compared(list(plan.make(tokenizer)))}


def benchmark(rounds: int, haystacks: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    _, tokenizer = ropepatch.load("tiny", device="cpu")
    timed = []
    for name, make, plan in (("tiny", tiny_model, TINY), ("random LLaMA", random_model, LONG)):
        made = list(plan.make(tokenizer))[:haystacks]
        measured = measure(make(), made, rounds)
        timed.append({"model": name, **described(plan), "haystacks": len(made), **measured})
    return {
        "target": TARGET,
        "agreement_nats": AGREEMENT,
        "scaling of tiny": {"method": METHOD, "to": TARGET_LENGTH},
        "shape of the random LLaMA": SHAPE,
        "rounds": rounds,
        "seed": SEED,
        "dtype": "float32",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "timed": timed,
        "counted": [counted(tokenizer, *grid) for grid in COUNTED],
    }


if __name__ == "__main__":
    run_benchmark(__doc__, benchmark, rounds=ROUNDS, haystacks=HAYSTACKS)
