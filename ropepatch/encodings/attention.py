"""Attention by an encoding, in place of the model's own: linear memory, in training too.

Where distances add nothing, stock sdpa works on the changed queries, keys and values. Where they do, tokens
that follow each other are read by tiles and stock kernels, document by document. Anything else (one query,
holes, dropout, weights that are wanted) is written down in float32, for a block of queries at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import repeat_kv

from ropepatch.attention.interchange import OTHER_SCORES, SLOT
from ropepatch.attention.kernels import DEVICES
from ropepatch.attention.places import Places
from ropepatch.attention.relative import Relative
from ropepatch.attention.relative import attended as by_distance
from ropepatch.attention.scored import ScoredAttention, masked
from ropepatch.attention.sight import Run, Sight, sight_mask
from ropepatch.encodings.encoding import AttentionInputs
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
    sight = Sight.of(attention_mask, query, key)
    if position_ids is None:
        position_ids = torch.arange(sight.column, sight.end, device=query.device)[None]
    places = sight.places(query, key, position_ids)
    layer: Any = module.layer_idx
    attended = positions.encoded(AttentionInputs(query, key, value, *places, layer, scaling))
    weights, relative = None, attended.relative
    if relative is not None or positions.wants_weights:
        groups = attended.query.shape[1] // attended.key.shape[1]
        tensors = attended.query, repeat_kv(attended.key, groups), repeat_kv(attended.value, groups)
        quick = relative is not None and not (positions.wants_weights or dropout) and query.shape[2] > 1
        runs = sight.runs(position_ids) if quick and query.device.type in DEVICES else None
        if runs is not None and relative is not None:
            output = sight.read(runs, _reading(relative, sight, scaling), *tensors)
        else:
            width = 0 if relative is None else relative.reach
            query, key, value = tensors
            parts = query, value, dropout, sight, width, key, relative, scaling, places
            scored = _ScoredAttention(*parts)
            output, weights = scored.output(positions.wants_weights)
    else:
        tensors = attended.query, attended.key, attended.value
        mask = None if _is_causal(sight) else sight.mask(slice(None))
        output, _ = sdpa_attention_forward(module, *tensors, mask, dropout, scaling, is_causal=True)
        output = output.transpose(1, 2)
    if attended.finish is not None:
        output = attended.finish(output)
    return output.transpose(1, 2).contiguous(), weights


def _is_causal(sight: Sight) -> bool:
    """Whether a step needs no mask: one query sees all keys, or every query those up to its own."""
    whole = sight.given is None and sight.window is None and sight.end == sight.keys
    return whole and (sight.queries == 1 or sight.column == 0) and bool((sight.documents == 1).all())


def _reading(relative: Relative, sight: Sight, scaling: float) -> Callable[..., Tensor]:
    """What the queries of one document read."""

    def read(run: Run, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return by_distance(query, key, value, relative, scaling, sight.window)

    return read


@dataclass(frozen=True, eq=False)
class _ScoredAttention(ScoredAttention):
    """Attention by an encoding that writes its scores down.

    Args:
        key: [B, H, T, E].
        relative: What distances add.
        scaling: The factor of the scores.
        places: Where queries and keys stand.
    """

    key: Tensor
    relative: Relative | None
    scaling: float
    places: Places

    def _more(self, rows: slice, weights: Tensor) -> Tensor | None:
        if self.relative is None:
            return None
        return self.relative.read(weights, -self.places.offsets(rows, weights.shape[-1]))

    def _scores(self, query: Tensor, rows: slice, end: int) -> Tensor:
        key = self.key[:, :, :end]
        if self.relative is None:  # as stock eager attention has them
            scores = (query @ key.mT).float() * self.scaling
        else:
            scores = query.float() @ key.float().mT * self.scaling
            scores = scores + self.relative.bias(query, -self.places.offsets(rows, end))
        return masked(scores, self.sight.mask(rows, end))


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sight_mask)
