"""Causal attention with stock sdpa, to all keys or within a sliding window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

QUERY_BLOCK = 1024  # queries per block, if a mask is needed


def causal(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    scaling: float,
    dropout: float = 0.0,
) -> Tensor:
    """Return attention [S, Q, H, D] of the last queries [S, H, Q, D] to all T tokens.

    Args:
        module: The attention module.
        query: Rotated queries.
        key: Rotated keys, of H or fewer heads.
        value: Values, of as many heads as the keys.
        window: The largest number of keys per query; None for all.
        scaling: The factor of the scores.
        dropout: The dropout probability of the weights.
    """
    queries, keys = query.shape[2], key.shape[2]
    window = keys if window is None else window
    stock: Any = sdpa_attention_forward
    given = {"dropout": dropout, "scaling": scaling}
    if queries == keys <= window:
        return stock(module, query, key, value, None, **given, is_causal=True)[0]  # type: ignore[no-any-return]
    columns = torch.arange(keys, device=query.device)
    blocks = []
    for start in range(keys - queries, keys, QUERY_BLOCK):
        end, first = min(start + QUERY_BLOCK, keys), max(0, start + 1 - window)
        age = columns[start:end, None] - columns[first:end]
        mask = ((age >= 0) & (age < window))[None, None]
        rows = slice(start - keys + queries, end - keys + queries)
        block = query[:, :, rows], key[:, :, first:end], value[:, :, first:end]
        blocks.append(stock(module, *block, mask, **given, is_causal=False)[0])
    return torch.cat(blocks, 1)
