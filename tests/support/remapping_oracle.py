"""Effective distances pair by pair, from the papers' formulas; shares no code with ropepatch.

Every function takes the parameters of a remapping and returns a function of a pair (m, n), which returns the
distance, or None where key n is masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

Distance = Callable[[int, int], "Fraction | int | None"]


def rerope(window):
    return lambda m, n: min(m - n, window)


def leaky_rerope(window, divisor):
    k = Fraction(divisor)
    return lambda m, n: m - n if m - n < window else window + (m - n - window) / k


def self_extend(window, group):
    def distance(m, n):
        if m - n < window:
            return m - n
        return (
            math.floor(m / group)
            - math.floor(n / group)
            + window
            - math.floor(window / group)
        )

    return distance


def dca(clip, chunk):
    def distance(m, n):
        chunks = m // chunk - n // chunk
        if chunks == 0:
            return m - n
        if chunks == 1:
            return min(m % chunk + chunk, clip) - n % chunk
        return min(2 * chunk - 1, clip) - n % chunk

    return distance


def lampe(length, mapped, head, tail):
    def u(p):
        return math.floor(Fraction(mapped * p, length - 1))

    r = tail
    while r + 1 < length and u(r) == u(r + 1):
        r += 1
    b1 = head - (u(head) + 1)
    b2 = (length - 1 - r) - u(length - 1 - r) - b1

    def distance(m, n):
        if m - n <= head:
            return m - n
        return u(m) + b1 - u(n) if m - n < length - r else m - n - b2

    return distance


def lambda_(window, sinks):
    def distance(m, n):
        if m - n < window:
            return m - n
        return window if n < sinks else None

    return distance


def string(shift, window):
    return lambda m, n: m - n if m - n < shift else m - n - shift + window


ORACLE = {
    "rerope": rerope,
    "leaky-rerope": leaky_rerope,
    "self-extend": self_extend,
    "dca": dca,
    "lampe": lampe,
    "lambda": lambda_,
    "string": string,
}

# Parameters with which 64 tokens have pairs in every band.
SMALL = {
    "rerope": {"window": 8},
    "leaky-rerope": {"window": 8, "divisor": 4.0},
    "self-extend": {"window": 8, "group": 4},
    "dca": {"clip": 12, "chunk": 10},
    "lampe": {"length": 65, "mapped": 24, "head": 8, "tail": 4},
    "lambda": {"window": 8, "sinks": 2},
    "string": {"shift": 20, "window": 8},
}


def distances(distance, length):
    """All pairs [length, length], float64; NaN where the key is masked or later than the query."""
    table = np.full((length, length), np.nan)
    for m in range(length):
        for n in range(m + 1):
            value = distance(m, n)
            table[m, n] = np.nan if value is None else float(value)
    return table


def attention(query, key, value, table, inv_freq, scaling):
    """The outputs of queries [B, H, T, D], with each key rotated relative to its query by the distance."""
    half = key.shape[-1] // 2
    heads = query.shape[1] // key.shape[1]
    key, value = key.repeat(heads, 1), value.repeat(heads, 1)
    out = np.zeros_like(query)
    for m in range(table.shape[0]):
        seen = ~np.isnan(table[m])
        if not seen.any():
            continue
        angle = -table[m][seen][:, None] * inv_freq  # R(-D) k
        first, second = key[:, :, seen, :half], key[:, :, seen, half:]
        rotated = np.concatenate(
            (
                first * np.cos(angle) - second * np.sin(angle),
                second * np.cos(angle) + first * np.sin(angle),
            ),
            -1,
        )
        scores = (rotated @ query[:, :, m, :, None])[..., 0] * scaling
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[:, :, m] = (weights[..., None] * value[:, :, seen]).sum(2)
    return out


@contextmanager
def attending_by(model, attend):
    """Run a model with unrotated queries and keys in a float64 attention function within the block."""
    rotary = model.model.rotary_emb

    class Still(nn.Module):
        def forward(self, x, position_ids):
            cos, sin = rotary(x, position_ids)
            return torch.ones_like(cos), torch.zeros_like(sin)

    def attention(module, query, key, value, attention_mask, scaling=None, **_):
        q, k, v = (x.double().numpy() for x in (query, key, value))
        output = torch.from_numpy(attend(module, q, k, v, scaling))
        return output.to(query.dtype).transpose(1, 2), None

    AttentionInterface.register("test_oracle", attention)
    AttentionMaskInterface.register("test_oracle", lambda **_: None)
    before = model.config._attn_implementation
    model.model.rotary_emb = Still()
    model.set_attn_implementation("test_oracle")
    try:
        yield
    finally:
        model.model.rotary_emb = rotary
        model.set_attn_implementation(before)


def by_oracle(model, table, scales=1.0):
    """Run a model with attention by a table of distances, pair by pair, within the block.

    The scores of each query are multiplied by its scale.
    """
    inv_freq = model.model.rotary_emb.inv_freq.double().numpy()
    return attending_by(
        model,
        lambda module, q, k, v, scaling: attention(
            q * scales, k, v, table, inv_freq, scaling
        ),
    )
