"""Attention by an encoding, in place of the model's own: linear memory, in training too.

Where distances add nothing, stock sdpa works on the changed queries, keys and values. Where they do, tokens
that follow each other are read by tiles and stock kernels. Anything else (padding, holes, dropout, weights
that are wanted) is written down in float32, for a block of queries at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import repeat_kv

from ropepatch.attention.interchange import OTHER_SCORES, SLOT
from ropepatch.attention.kernels import DEVICES
from ropepatch.attention.places import Places, places_of
from ropepatch.attention.relative import Relative
from ropepatch.attention.relative import attended as by_distance
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
    weights, relative = None, attended.relative
    if relative is not None or positions.wants_weights:
        groups = attended.query.shape[1] // attended.key.shape[1]
        tensors = attended.query, repeat_kv(attended.key, groups), repeat_kv(attended.value, groups)
        plain = not (positions.wants_weights or dropout) and attention_mask is None
        if relative is not None and plain and _is_text(query, key, places):
            output = by_distance(*tensors, relative, scaling)
        else:
            query, key, value = tensors
            key = key if relative is None else key.float()
            scored = _ScoredAttention(
                query,
                value,
                dropout,
                0 if relative is None else relative.reach,
                key,
                relative,
                attention_mask,
                scaling,
                places,
            )
            output, weights = scored.output(positions.wants_weights)
    else:
        tensors = attended.query, attended.key, attended.value
        output, _ = sdpa_attention_forward(module, *tensors, attention_mask, dropout, scaling, is_causal=True)
        output = output.transpose(1, 2)
    if attended.finish is not None:
        output = attended.finish(output)
    return output.transpose(1, 2).contiguous(), weights


def _is_text(query: Tensor, key: Tensor, places: Places) -> bool:
    """Whether tokens that follow each other are read at once, on a device that can."""
    told = query.device.type in DEVICES and 1 < query.shape[2] == key.shape[2]
    return told and bool((places.queries.diff() == 1).all())


@dataclass(frozen=True, eq=False)
class _ScoredAttention(ScoredAttention):
    """Attention by an encoding that writes its scores down.

    Args:
        key: [B, H, T, E].
        relative: What distances add.
        mask: None for a causal one.
        scaling: The factor of the scores.
        places: Where queries and keys stand.
    """

    key: Tensor
    relative: Relative | None
    mask: Tensor | None
    scaling: float
    places: Places

    def _more(self, rows: slice, weights: Tensor) -> Tensor | None:
        return None if self.relative is None else self.relative.read(weights, -self.places.offsets(rows))

    def _scores(self, query: Tensor, rows: slice) -> Tensor:
        key = self.key
        if self.relative is None:  # as stock eager attention has them
            scores = (query @ key.mT).float() * self.scaling
        else:
            scores = query.float() @ key.mT * self.scaling
            scores = scores + self.relative.bias(query, -self.places.offsets(rows))
        if self.mask is None and self.query.shape[2] > 1:
            columns = torch.arange(key.shape[2], device=key.device)
            return scores.masked_fill(columns > columns[rows, None], -torch.inf)
        return scores if self.mask is None else masked(scores, self.mask[:, :, rows])


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
