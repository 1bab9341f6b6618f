"""The bundled checkpoint for an explorer page: int8 weights, a story, and prompts with passkeys."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ropepatch.data.haystack import Haystacks, Writer
from ropepatch.data.tiny.passkey import PASSKEY
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.encodings.loading import load

TOKENS = 1024  # of the story
STRETCH = 32  # tokens over which losses are averaged
LENGTHS, DEPTHS = (256, 512, 1024), (0.1, 0.5, 0.9)  # of the prompts
DRAWN = 20  # haystacks, from which the one with its key nearest to a depth is used


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix [R, C] to int8 times a scale per row [R, 1], with its largest value at 127."""
    scales = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scales).round().to(torch.int8), scales


@cache
def reading() -> dict[str, Any]:
    """Return the JSON data to run tiny: shape, weights, story, prompts, vocabulary."""
    model, tokenizer = load("tiny", device="cpu")
    config: Any = model.config
    layout, weights = _packed(model.state_dict())
    (tale,) = held_out_tales(tokenizer, length=TOKENS, count=1)
    floor = -tale.log_probs()
    shape = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
        "num_key_value_heads",
        "rms_norm_eps",
    )
    return {
        "shape": {name: getattr(config, name) for name in shape},
        "tied": config.tie_word_embeddings,
        "stretch": STRETCH,
        "layout": layout,
        "weights": weights,
        "tale": tale.ids.tolist(),
        "floor": [
            round(float(floor[max(1, begin) : begin + STRETCH].mean()), 4)
            for begin in range(0, TOKENS, STRETCH)
        ],
        "prompts": list(_prompts(tokenizer)),
        "words": [tokenizer.decode([token]) for token in range(config.vocab_size)],
    }


def _packed(state: dict[str, Tensor]) -> tuple[list[tuple[str, int, int]], str]:
    """Return names and shapes, and in base64 the scales of all matrices, vectors, then int8 values."""
    scales, vectors, values, layout = [], [], [], []
    for name, weight in state.items():
        if name == "lm_head.weight":  # tied
            continue
        if weight.dim() == 1:
            vectors.append(weight.float())
            layout.append((name, len(weight), 0))
        else:
            matrix, of_rows = quantised(weight.float())
            scales.append(of_rows.flatten())
            values.append(matrix.flatten())
            layout.append((name, *weight.shape))
    parts = [
        torch.cat([*scales, *vectors]).numpy().tobytes(),
        torch.cat(values).numpy().tobytes(),
    ]
    return layout, base64.b64encode(b"".join(parts)).decode()


def _prompts(tokenizer: Any) -> Iterator[dict[str, Any]]:
    writer = Writer(tokenizer)
    drawn = list(
        Haystacks(lengths=LENGTHS, count=DRAWN, keys=1, kinds=("passkey",)).make(
            tokenizer
        )
    )
    for length, depth in product(LENGTHS, DEPTHS):
        haystack = min(
            (one for one in drawn if length in one.stops),
            key=lambda one: abs(one.asked[length][0].end / one.stops[length] - depth),
        )
        stop, (question,) = haystack.stops[length], haystack.asked[length]
        key = tokenizer.decode(question.answer).strip()
        needle = writer.follow(f" {PASSKEY.needle.replace('{key}', key)}")
        yield {
            "length": length,
            "depth": depth,
            "key": key,
            "ids": torch.cat(
                [haystack.ids[:stop], question.ids, question.answer]
            ).tolist(),
            "answer": len(question.answer),
            "needle": [question.end - len(needle), question.end],
            "question": stop,
        }
