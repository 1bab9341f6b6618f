"""Training-free attention maps, for measuring: ReRoPE, Leaky ReRoPE and Self-Extend on one LLaMA model.

    with mapped(model, self_extend(window=128, group=4)):
        curve = ropepatch.perplexity(model, tokenizer, texts)

A map replaces the distance m - n of a query at m and a key at n by an effective one, and the model rotates as
if they were that far apart. No table of frequencies says the same, so none exports; all positions are read
at once, without a cache.

Shapes: B sequences, H heads, T tokens, D head width, Q queries of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import repeat_kv, rotate_half

NAME = "ropepatch_attention_map"  # in the interfaces of transformers, which are one per process
Places = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class DistanceMap:
    """The distance itself while it is below a window, and beyond it that of two other positions.

    Args:
        name: For tables.
        window: In tokens; distances below it are kept.
        far_query: The position, perhaps fractional, at which a query at m is rotated for keys farther away.
        far_key: That of a key at n.
    """

    name: str
    window: float
    far_query: Places
    far_key: Places

    def distances(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The effective distances [Q, T] of queries at positions [Q] to keys at positions [T]."""
        queries, keys = queries[:, None], keys[None]
        far = self.far_query(queries) - self.far_key(keys)
        return torch.where(queries - keys < self.window, queries - keys, far)


def identity() -> DistanceMap:
    """The model as it is."""
    return DistanceMap("identity", math.inf, lambda m: m, lambda n: n)


def rerope(window: int) -> DistanceMap:
    """No distance above the window (bojone/rerope), without the authors' factor ln n / ln L."""
    return DistanceMap("rerope", window, lambda m: torch.full_like(m, window), torch.zeros_like)


def leaky_rerope(window: int, divisor: float) -> DistanceMap:
    """Distances grow 1/divisor as fast from the window on (bojone/rerope)."""
    start = window - window / divisor
    return DistanceMap("leaky-rerope", window, lambda m: start + m / divisor, lambda n: n / divisor)


def self_extend(window: int, group: int) -> DistanceMap:
    """From the window on, positions count in groups (Jin et al. 2024, 2401.01325).

    Whole numbers throughout, as in the paper; the authors' code shifts by the fraction W - W / G.
    """
    shift = window - window // group
    return DistanceMap("self-extend", window, lambda m: m // group + shift, lambda n: n // group)


class Unrotated(nn.Module):
    """Stands for the rotary module: cos 1 and sin 0, so that queries and keys arrive as they are."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.__dict__["stock"] = stock

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ones and zeros in the shape of the stock module's cos and sin."""
        cos, _ = self.stock(x, position_ids)
        return torch.ones_like(cos), torch.zeros_like(cos)


@dataclass(frozen=True, eq=False)
class _State:
    """What the attention of one model needs."""

    rotary: nn.Module
    map: DistanceMap
    block: int

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, H, T, D] at positions [B or 1, T]."""
        cos, sin = (table[:, None] for table in self.rotary(x, positions))
        return x * cos + rotate_half(x) * sin


@contextmanager
def mapped(model: PreTrainedModel, distance_map: DistanceMap, *, block: int = 64) -> Iterator[None]:
    """Attention by effective distances within the block; afterwards the model is as it was.

    Scores are computed for so many queries at a time: memory grows with T, not with its square.

    Args:
        model: Of the type `llama`; may be patched.
        distance_map: What becomes of distances.
        block: Queries at a time.

    Raises:
        ValueError: Another type of model, or one that has a map.
    """
    decoder = model.get_decoder()
    if model.config.model_type != "llama" or isinstance(decoder.rotary_emb, Unrotated):
        raise ValueError(f"need a llama without an attention map, got {model.config.model_type}")
    rotary, before = decoder.rotary_emb, model.config._attn_implementation
    attentions = [layer.self_attn for layer in decoder.layers]
    try:
        for attention in attentions:
            attention.attention_map = _State(rotary, distance_map, block)
        decoder.rotary_emb = Unrotated(rotary)
        model.set_attn_implementation(NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        decoder.rotary_emb = rotary
        for attention in attentions:
            del attention.attention_map


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    position_ids: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention of unrotated queries [B, H, T, D] to keys and values of as many tokens.

    Every key has two places, near and far, and so has every query; which score counts is the distance's to
    say. `attention_mask` is True where a query may look, [B, 1, T, T], or None for all before it.

    Raises:
        ValueError: More keys than queries: a cache.
    """
    tokens = query.shape[2]
    if key.shape[2] != tokens:
        raise ValueError(f"an attention map reads all tokens at once: got {tokens} of {key.shape[2]}")
    state: _State = module.attention_map  # type: ignore[assignment]
    columns = torch.arange(tokens, device=query.device)
    positions = columns[None] if position_ids is None else position_ids
    key, value = (repeat_kv(x, query.shape[1] // key.shape[1]) for x in (key, value))
    near_query, near_key = state.rotated(query, positions), state.rotated(key, positions)
    far_query = state.rotated(query, state.map.far_query(positions))
    far_key = state.rotated(key, state.map.far_key(positions))
    output = torch.empty_like(query)
    for begin in range(0, tokens, state.block):
        end = min(begin + state.block, tokens)
        rows = slice(begin, end)
        close = positions[:, rows, None] - positions[:, None, :end] < state.map.window  # [B or 1, Q, end]
        first = int(close.any(1).any(0).nonzero()[0])  # no query is near a key before it
        scores = far_query[:, :, rows] @ far_key[:, :, :end].transpose(-1, -2)  # [B, H, Q, end]
        near = near_query[:, :, rows] @ near_key[:, :, first:end].transpose(-1, -2)
        scores[..., first:] = torch.where(close[:, None, :, first:], near, scores[..., first:])
        seen = columns[rows, None] >= columns[:end]
        if attention_mask is not None:
            seen = seen & attention_mask[:, :, rows, :end]
        # The least number, not minus infinity: a query that sees nothing, of padding, must not make NaN.
        scores = scores.mul_(scaling).masked_fill_(~seen, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        output[:, :, rows] = weights @ value[:, :, :end]
    return output.transpose(1, 2), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)  # without it no mask arrives, and padding is read
