"""Attention by an encoding, in place of the model's own: linear memory, in training too.

Where nothing happens between scores and output, stock sdpa works on the changed queries, keys and values.
Otherwise scores are computed in float32 for a block of queries at a time; when gradients are wanted, each
block is computed again in the backward pass instead of being kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import repeat_kv

from ropepatch.encodings.encoding import Attended, Places
from ropepatch.errors import RopepatchError
from ropepatch.model.config import text_config

NAME = "ropepatch_encoding"  # in the interfaces of transformers, which are one per process
SLOT = "_ropepatch_positions"  # where an attention module finds its `SwappedPositions`
SCORES = 1 << 24  # at a time, over sequences, heads, queries and keys
_MASKED_LAYERS = {"full_attention", "sliding_attention"}  # layer types that differ in their mask alone
OTHER_SCORES = ("softcap", "s_aux", "position_bias")  # arguments by which a model changes its scores


def uninterchangeable(model: PreTrainedModel) -> str | None:
    """Why the attention of a model cannot be replaced by a function like sdpa's; None where it can."""
    config: Any = text_config(model.config)
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _MASKED_LAYERS)
    causal = [getattr(part, "is_causal", True) for part in (config, *model.modules())]
    reasons = {
        f"it has layers of the type {', '.join(others)}": others,
        "it carries a state from token to token": getattr(model, "_is_stateful", False),
        "it does not support sdpa": not model._supports_sdpa,
        "its attention is no interchangeable function": not model._can_set_attn_implementation(),
        "some of its attention is not causal": not all(causal),
        "it caps its attention scores": getattr(config, "attn_logit_softcapping", None),
        "its position encoding is swapped": any(SLOT in vars(module) for module in model.modules()),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


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
    attended = positions.attended(module.layer_idx, query, key, value, places, scaling)
    output, weights = _output(module, attended, attention_mask, scaling, dropout, positions.wants_weights)
    if attended.finish is not None:
        output = attended.finish(output)
    return output.transpose(1, 2).contiguous(), weights


def places_of(
    query: Tensor, key: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> Places:
    """The positions of the queries and of all keys; those of cached tokens are taken to be contiguous.

    Args:
        query: [B, H, Q, D].
        key: [B, K, T, D], in a static cache with empty columns at the end.
        attention_mask: None, or [B, 1, Q, T], boolean or added to the scores.
        position_ids: Of the queries, [B or 1, Q]; None where they end with the keys.
    """
    queries, keys = query.shape[2], key.shape[2]
    if position_ids is None:
        position_ids = torch.arange(keys - queries, keys, device=query.device)[None]
    if queries == keys:
        return Places(position_ids, position_ids)
    columns = torch.arange(keys, device=query.device)
    if attention_mask is None:  # one query sees all keys; several are aligned with the first ones
        last = keys - 1 if queries == 1 else queries - 1
        return Places(position_ids, position_ids[:, -1:] - (last - columns[None]))
    seen, rows = _visible(attention_mask[:, 0]), torch.arange(queries, device=query.device)
    reached = torch.where(seen, columns, -1).amax(-1)  # a query that is a token sees its own column last
    own = (reached - rows).amax() + rows
    tokens = seen.any(1)  # the others are padding, or empty columns of a static cache
    anchor = torch.where(tokens[:, own], rows, 0).amax(-1, keepdim=True)  # the last query that is a token
    count = tokens.long().cumsum(-1)
    behind = count.gather(1, own[anchor]) - count
    return Places(position_ids, position_ids.expand(len(anchor), -1).gather(1, anchor) - behind)


def _visible(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _output(
    module: nn.Module,
    attended: Attended,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
    wants_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """The output [B, H, Q, F], and the weights where they are wanted."""
    query, key, value = attended.query, attended.key, attended.value
    if not attended.needs_scores and not wants_weights:
        out = sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, is_causal=True)[0]
        return out.transpose(1, 2), None
    groups = query.shape[1] // key.shape[1]
    sequences, heads, queries, _ = query.shape
    reading = _Reading(
        attended,
        key=repeat_kv(key if attended.bias is None else key.float(), groups),
        value=repeat_kv(value, groups),
        mask=mask,
        scaling=scaling,
        dropout=dropout,
        causal=mask is None and queries > 1,
    )
    size = max(1, SCORES // (sequences * heads * max(key.shape[2], attended.width)))
    again = torch.is_grad_enabled() and queries > size
    outputs, weights = [], []
    for start in range(0, queries, size):
        rows = slice(start, min(start + size, queries))
        # The queries are an argument, by which `checkpoint` knows on which device to repeat dropout.
        block = query[:, :, rows]
        out, weight = checkpoint(reading, block, rows, use_reentrant=False) if again else reading(block, rows)
        outputs.append(out)
        if wants_weights:
            weights.append(weight)
    return torch.cat(outputs, 2), torch.cat(weights, 2) if wants_weights else None


@dataclass(frozen=True, eq=False)
class _Reading:
    """What blocks of queries read from keys and values of as many heads, [B, H, T, E] and [B, H, T, F].

    With a bias the keys are float32.
    """

    attended: Attended
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float
    dropout: float
    causal: bool

    def __call__(self, query: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """What the queries [B, H, q, E] of some rows read: [B, H, q, F], and their weights [B, H, q, T]."""
        with torch.autocast(query.device.type, enabled=False):
            weights = nn.functional.dropout(self._scores(query, rows).softmax(-1), self.dropout)
            out = weights.to(self.value.dtype) @ self.value
            if self.attended.values is not None:
                out = out + self.attended.values(rows, weights).to(out.dtype)
        return out, weights.to(self.value.dtype)

    def _scores(self, query: Tensor, rows: slice) -> Tensor:
        if self.attended.bias is None:  # as stock eager attention has them
            scores = (query @ self.key.transpose(-1, -2)).float() * self.scaling
        else:
            scores = query.float() @ self.key.transpose(-1, -2) * self.scaling
            scores = scores + self.attended.bias(rows)
        if self.causal:
            columns = torch.arange(self.key.shape[2], device=self.key.device)
            return scores.masked_fill(columns > columns[rows, None], -torch.inf)
        if self.mask is None:
            return scores
        if self.mask.dtype == torch.bool:
            return scores.masked_fill(~self.mask[:, :, rows], torch.finfo(torch.float32).min)
        return scores + self.mask[:, :, rows].float()


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
