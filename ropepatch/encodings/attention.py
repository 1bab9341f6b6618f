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

from ropepatch.attention.interchange import OTHER_SCORES, POSITIONS_SLOT
from ropepatch.attention.modeling_position_remapping import (
    Sight,
    by_head,
    in_blocks,
    short_mask,
)
from ropepatch.encodings.encoding import AttentionInputs
from ropepatch.errors import RopepatchError

# Registered in transformers for the whole process
ENCODING_ATTENTION = "ropepatch_encoding"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return attention [B, Q, H, D] of queries [B, H, Q, D] to keys and values [B, K, T, D], not yet encoded.

    It returns the weights [B, H, Q, T] too if the model was set to eager attention.
    """
    if changed := [name for name in OTHER_SCORES if kwargs.get(name) is not None]:
        raise RopepatchError(
            f"{type(module).__name__} changes its scores itself ({changed[0]})",
            hint="swap the encoding of a LLaMA-like model",
        )
    if (positions := module.__dict__.get(POSITIONS_SLOT)) is None:
        raise RopepatchError(
            "this attention needs a swapped encoding, and there is none",
            hint="call ropepatch.swap first",
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    sight = Sight.of(attention_mask, query, key, position_ids)
    layer: Any = module.layer_idx
    attended: AttentionInputs = positions.encoded(
        AttentionInputs(query, key, value, sight.queries, sight.keys, layer, scaling)
    )
    query, key, value = attended.query, attended.key, attended.value
    relative, weights = attended.relative, None
    if relative is None and not positions.wants_weights:
        every = slice(0, query.shape[2]), slice(0, key.shape[2])
        mask = None if sight.causal else sight.mask(*every)
        output, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout, scaling, is_causal=True
        )
        output = output.transpose(1, 2)
    else:
        wide = torch.promote_types(query.dtype, torch.float32)

        def distances(rows: slice, columns: slice) -> Tensor:
            return sight.queries[:, rows, None] - sight.keys[:, None, columns]

        def score(own: Tensor, rows: slice, columns: slice) -> Tensor:
            keys = key[:, :, columns].mT
            if relative is None:  # as in stock eager attention
                return by_head(own, keys).to(wide) * scaling
            scores = by_head(own.to(wide), keys.to(wide)) * scaling
            return scores.add_(relative.bias(own, distances(rows, columns)))

        def added(weights: Tensor, rows: slice, columns: slice) -> Tensor | None:
            if relative is None:
                return None
            return relative.read(weights, distances(rows, columns))

        output, weights = in_blocks(
            score,
            query,
            value,
            sight,
            dropout,
            wants_weights=positions.wants_weights,
            width=0 if relative is None else relative.reach,
            added=added,
        )
    if attended.finish is not None:
        output = attended.finish(output)
    return output.transpose(1, 2).contiguous(), weights


AttentionInterface.register(ENCODING_ATTENTION, attend)
AttentionMaskInterface.register(ENCODING_ATTENTION, short_mask)
