"""Attention by an encoding, in place of the model's own: linear memory, in training too.

Where nothing happens between scores and output, stock sdpa works on the changed queries, keys and values.
Otherwise scores are written down in float32, for a block of queries at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import repeat_kv

from ropepatch.attention.interchange import OTHER_SCORES, SLOT
from ropepatch.attention.places import places_of
from ropepatch.attention.scored import ScoredAttention, masked
from ropepatch.encodings.encoding import Attended
from ropepatch.errors import RopepatchError

NAME = "ropepatch_encoding"  # in the interfaces of transformers, which are one per process


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
    """What queries [B, H, Q, D] read from keys and values [B, K, T, D]: [B, Q, H, D].

    The weights [B, H, Q, T] are returned where the model was set to eager attention.

    Raises:
        RopepatchError: The model changes its scores itself, or its positions have been taken out.
    """
    if changed := [name for name in OTHER_SCORES if kwargs.get(name) is not None]:
        raise RopepatchError(
            f"{type(module).__name__} changes its scores itself ({changed[0]})",
            hint="swap the encoding of a LLaMA-like model",
        )
    if (positions := module.__dict__.get(SLOT)) is None:
        raise RopepatchError(
            "this attention needs a swapped encoding, and there is none", hint="call ropepatch.swap first"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    places = places_of(query, key, attention_mask, position_ids)
    stock = Attended(query, key, value)
    attended = positions.attended(stock, module.layer_idx, places, scaling)
    weights = None
    if attended.bias or attended.values or positions.wants_weights:
        groups = attended.query.shape[1] // attended.key.shape[1]
        key = attended.key if attended.bias is None else attended.key.float()
        attended = replace(attended, key=repeat_kv(key, groups), value=repeat_kv(attended.value, groups))
        parts = attended.query, attended.value, dropout, attended.width
        scored = _ScoredAttention(*parts, attended, attention_mask, scaling)
        output, weights = scored.output(positions.wants_weights)
    else:
        tensors = attended.query, attended.key, attended.value
        output, _ = sdpa_attention_forward(module, *tensors, attention_mask, dropout, scaling, is_causal=True)
        output = output.transpose(1, 2)
    if attended.finish is not None:
        output = attended.finish(output)
    return output.transpose(1, 2).contiguous(), weights


@dataclass(frozen=True, eq=False)
class _ScoredAttention(ScoredAttention):
    """Attention by an encoding that writes its scores down.

    Args:
        attended: With as many heads of keys and values as of queries; with a bias, with float32 keys.
        mask: None for a causal one.
        scaling: The factor of the scores.
    """

    attended: Attended
    mask: Tensor | None
    scaling: float

    def _more(self, rows: slice, weights: Tensor) -> Tensor | None:
        return None if self.attended.values is None else self.attended.values(rows, weights)

    def _scores(self, query: Tensor, rows: slice) -> Tensor:
        key = self.attended.key
        if self.attended.bias is None:  # as stock eager attention has them
            scores = (query @ key.mT).float() * self.scaling
        else:
            scores = query.float() @ key.mT * self.scaling + self.attended.bias(rows)
        if self.mask is None and self.attended.query.shape[2] > 1:
            columns = torch.arange(key.shape[2], device=key.device)
            return scores.masked_fill(columns > columns[rows, None], -torch.inf)
        return scores if self.mask is None else masked(scores, self.mask[:, :, rows])


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
