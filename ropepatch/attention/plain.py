"""Causal attention as it is, by stock kernels: of all keys, or of those within a sliding window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import repeat_kv

from ropepatch.attention.bands import WHOLE, layout
from ropepatch.attention.kernels import DEVICES, banded

BLOCK = 1024  # queries that are read at a time, where no kernel returns its log-sum-exp


def causal(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    scaling: float,
    dropout: float = 0.0,
) -> Tensor:
    """What the last queries [S, H, Q, D] of all T tokens read [S, Q, H, D].

    Args:
        module: The attention.
        query: Turned.
        key: Of H heads or fewer, turned.
        value: As many.
        window: How many keys a query sees at most.
        scaling: The factor of the scores.
        dropout: The share of the weights that is dropped.
    """
    queries, keys = query.shape[2], key.shape[2]
    window = keys if window is None else window
    stock: Any = sdpa_attention_forward
    given = {"dropout": dropout, "scaling": scaling}
    if queries == keys <= window:
        return stock(module, query, key, value, None, **given, is_causal=True)[0]  # type: ignore[no-any-return]
    if query.device.type in DEVICES and not dropout and query.shape[-1] == value.shape[-1]:
        groups = query.shape[1] // key.shape[1]
        pairs = [
            (query.to(value.dtype), repeat_kv(key.to(value.dtype), groups))
        ]  # under autocast they differ
        pieces = layout(WHOLE, queries, keys, 0, window)
        return banded(pairs, repeat_kv(value, groups), pieces, scaling).transpose(1, 2)
    columns = torch.arange(keys, device=query.device)
    blocks = []
    for start in range(keys - queries, keys, BLOCK):
        end, first = min(start + BLOCK, keys), max(0, start + 1 - window)
        age = columns[start:end, None] - columns[first:end]
        mask = ((age >= 0) & (age < window))[None, None]
        rows = slice(start - keys + queries, end - keys + queries)
        block = query[:, :, rows], key[:, :, first:end], value[:, :, first:end]
        blocks.append(stock(module, *block, mask, **given, is_causal=False)[0])
    return torch.cat(blocks, 1)
