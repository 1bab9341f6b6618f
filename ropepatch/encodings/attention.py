"""Attention by an encoding, in place of the model's own: linear memory, in training too.

Where nothing happens between scores and output, stock sdpa works on the changed queries, keys and values.
Otherwise scores are computed in float32 for a block of queries at a time; when gradients are wanted, each
block is computed again in the backward pass instead of being kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
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
    stock = Attended(query, key, value)
    attended = positions.attended(stock, module.layer_idx, places, scaling)
    weights = None
    if attended.bias or attended.values or positions.wants_weights:
        groups = attended.query.shape[1] // attended.key.shape[1]
        key = attended.key if attended.bias is None else attended.key.float()
        attended = replace(attended, key=repeat_kv(key, groups), value=repeat_kv(attended.value, groups))
        scored = _ScoredAttention(attended, attention_mask, scaling, dropout)
        output, weights = scored.output(positions.wants_weights)
    else:
        tensors = attended.query, attended.key, attended.value
        output, _ = sdpa_attention_forward(module, *tensors, attention_mask, dropout, scaling, is_causal=True)
        output = output.transpose(1, 2)
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
    seen, rows = attention_mask[:, 0], torch.arange(queries, device=query.device)
    if seen.dtype != torch.bool:
        seen = seen > torch.finfo(seen.dtype).min / 2
    reached = torch.where(seen, columns, -1).amax(-1)  # a query that is a token sees its own column last
    own = (reached - rows).amax() + rows
    tokens = seen.any(1)  # the others are padding, or empty columns of a static cache
    anchor = torch.where(tokens[:, own], rows, 0).amax(-1, keepdim=True)  # the last query that is a token
    count = tokens.long().cumsum(-1)
    behind = count.gather(1, own[anchor]) - count
    return Places(position_ids, position_ids.expand(len(anchor), -1).gather(1, anchor) - behind)


@dataclass(frozen=True, eq=False)
class _ScoredAttention:
    """Attention with its scores written down, for a block of queries at a time.

    Args:
        attended: With as many heads of keys and values as of queries; with a bias, with float32 keys.
        mask: None for a causal one.
        scaling: The factor of the scores.
        dropout: The share of the weights that is dropped.
    """

    attended: Attended
    mask: Tensor | None
    scaling: float
    dropout: float

    def output(self, wants_weights: bool) -> tuple[Tensor, Tensor | None]:
        """The output [B, H, Q, F], and the weights [B, H, Q, T] where they are wanted."""
        query = self.attended.query
        sequences, heads, queries, _ = query.shape
        size = max(1, SCORES // (sequences * heads * max(self.attended.key.shape[2], self.attended.width)))
        run: Any = self._block
        if torch.is_grad_enabled() and queries > size:
            run = partial(checkpoint, run, use_reentrant=False)
        outputs, weights = [], []
        for start in range(0, queries, size):
            rows = slice(start, min(start + size, queries))
            # The queries are an argument, by which `checkpoint` knows on which device to repeat dropout.
            output, weight = run(query[:, :, rows], rows)
            outputs.append(output)
            if wants_weights:
                weights.append(weight)
        return torch.cat(outputs, 2), torch.cat(weights, 2) if wants_weights else None

    def _block(self, query: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """What the queries [B, H, q, E] of some rows read: [B, H, q, F], and their weights [B, H, q, T]."""
        value = self.attended.value
        with torch.autocast(query.device.type, enabled=False):
            weights = nn.functional.dropout(self._scores(query, rows).softmax(-1), self.dropout)
            output = weights.to(value.dtype) @ value
            if self.attended.values is not None:
                output = output + self.attended.values(rows, weights).to(output.dtype)
        return output, weights.to(value.dtype)

    def _scores(self, query: Tensor, rows: slice) -> Tensor:
        key = self.attended.key
        if self.attended.bias is None:  # as stock eager attention has them
            scores = (query @ key.mT).float() * self.scaling
        else:
            scores = query.float() @ key.mT * self.scaling + self.attended.bias(rows)
        if self.mask is None and self.attended.query.shape[2] > 1:
            columns = torch.arange(key.shape[2], device=key.device)
            return scores.masked_fill(columns > columns[rows, None], -torch.inf)
        if self.mask is None:
            return scores
        if self.mask.dtype == torch.bool:
            return scores.masked_fill(~self.mask[:, :, rows], torch.finfo(torch.float32).min)
        return scores + self.mask[:, :, rows].float()


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
