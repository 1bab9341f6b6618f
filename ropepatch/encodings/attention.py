"""Attention with a swapped position encoding, in memory linear in the length, also in training.

Without additions per distance, stock sdpa runs on the encoded queries, keys and values. With them, or if
attention weights are returned, scores are computed in float32, one block of queries at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ropepatch.attention.modeling_position_remapping import (
    POSITIONS_SLOT,
    Sight,
    by_head,
    in_blocks,
    short_mask,
)
from ropepatch.encodings.encoding import AttentionInputs

# Registered in transformers for the whole process
ENCODING_ATTENTION = "ropepatch_encoding"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    scaling: float,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention [B, Q, H, D] of unencoded queries [B, H, Q, D], keys and values [B, K, T, D]."""
    positions = module.__dict__[POSITIONS_SLOT]
    sight = Sight.of(attention_mask, query, key, position_ids)
    layer: Any = module.layer_idx
    attended: AttentionInputs = positions.encoded(
        AttentionInputs(query, key, value, sight.queries, sight.keys, layer, scaling)
    )
    query, key, value = attended.query, attended.key, attended.value
    relative = attended.relative
    if relative is None:
        every = slice(0, query.shape[2]), slice(0, key.shape[2])
        mask = None if sight.causal else sight.mask(*every)
        output, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout, scaling, is_causal=True
        )
    else:
        wide = torch.promote_types(query.dtype, torch.float32)

        def distances(rows: slice, columns: slice) -> Tensor:
            return sight.queries[:, rows, None] - sight.keys[:, None, columns]

        def score(own: Tensor, rows: slice, columns: slice) -> Tensor:
            keys = key[:, :, columns].mT
            scores = by_head(own.to(wide), keys.to(wide)) * scaling
            return scores.add_(relative.bias(own, distances(rows, columns)))

        def added(weights: Tensor, rows: slice, columns: slice) -> Tensor | None:
            return relative.read(weights, distances(rows, columns))

        output = in_blocks(
            score, query, value, sight, dropout, width=relative.reach, added=added
        )
    if attended.finish is not None:
        output = attended.finish(output)
    return output, None


AttentionInterface.register(ENCODING_ATTENTION, attend)
AttentionMaskInterface.register(ENCODING_ATTENTION, short_mask)
