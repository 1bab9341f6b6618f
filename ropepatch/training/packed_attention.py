"""Attention within the segments of a packed sequence, for any position ids, without a [T, T] mask.

Stock sdpa interprets jumps of positions as document boundaries, and builds a [T, T] mask for documents.
Here `cu_seq_lens_q` gives the segments, and stock kernels run on each as on a separate sequence.

Shapes: H heads, T tokens of all segments, D dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ropepatch.attention.interchange import (
    OTHER_SCORES,
    attending_by,
    uninterchangeable,
)
from ropepatch.errors import RopepatchError
from ropepatch.model.rotary import base_model

NAME = "ropepatch_packed"
QUERY_BLOCK = 1024  # queries per block, if a window needs a mask


@contextmanager
def packed_attention(model: nn.Module) -> Iterator[None]:
    """Switch one model to attention within segments, for the forward and backward passes of training.

    A forward pass then takes one sequence: `input_ids` and `position_ids` [1, T] with `cu_seq_lens_q` from 0
    to T, no mask and no KV cache. Any other raises `RopepatchError`: evaluate outside.

    Run the backward pass inside: gradient checkpointing repeats the forward pass in it.
    """
    base = base_model(model)
    if reason := uninterchangeable(base):
        raise RopepatchError(
            f"{base.config.model_type} cannot be trained on packed rows: {reason}",
            hint="use a LLaMA-like model",
        )
    with attending_by(base, NAME):
        yield


def segments(
    lengths: Sequence[int], device: torch.device | None = None
) -> dict[str, Tensor | int]:
    """Return the bounds and the longest length of segments, by the names of the arguments of a forward pass."""
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _no_mask(
    *,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: Any = None,
    **_: Any,
) -> Tensor:
    """Return a mask [1, 1, 0, window], on which stock attention fails instead of crossing segments."""
    if attention_mask is not None:
        raise _misuse("an attention mask")
    return torch.empty(1, 1, 0, local_size or 0, dtype=torch.bool, device=device)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with queries [1, H, T, D] to keys and values of H heads or fewer; returns [1, T, H, D]."""
    if cu_seq_lens_q is None or attention_mask is None or attention_mask.numel():
        raise _misuse("a mask that the model made, or no cu_seq_lens_q")
    if changed := [name for name in OTHER_SCORES if kwargs.get(name) is not None]:
        raise _misuse(f"{changed[0]} from {type(module).__name__}")
    lengths = cu_seq_lens_q.diff().tolist()
    attend = partial(
        causal,
        module,
        window=attention_mask.shape[-1] or None,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout=dropout,
    )
    tensors = (query, key, value)
    if len(set(lengths)) == 1:
        stacked = [
            torch.unflatten(x[0], 1, (-1, lengths[0])).transpose(0, 1) for x in tensors
        ]
        return attend(*stacked).flatten(0, 1)[None], None
    split = [torch.split(x, lengths, dim=2) for x in tensors]
    return torch.cat([attend(*one) for one in zip(*split, strict=True)], 1), None


def causal(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    scaling: float,
    dropout: float = 0.0,
) -> Tensor:
    """Return attention [S, T, H, D] of queries [S, H, T, D] to the tokens up to each.

    Args:
        module: The attention module.
        query: Rotated queries.
        key: Rotated keys, of H or fewer heads.
        value: Values, of as many heads as the keys.
        window: The largest number of keys per query; None for all.
        scaling: The factor of the scores.
        dropout: The dropout probability of the weights.
    """
    tokens = key.shape[2]
    stock: Any = sdpa_attention_forward
    given = {"dropout": dropout, "scaling": scaling}
    if window is None or tokens <= window:
        return stock(module, query, key, value, None, **given, is_causal=True)[0]  # type: ignore[no-any-return]
    columns = torch.arange(tokens, device=query.device)
    blocks = []
    for start in range(0, tokens, QUERY_BLOCK):
        end, first = min(start + QUERY_BLOCK, tokens), max(0, start + 1 - window)
        age = columns[start:end, None] - columns[first:end]
        mask = ((age >= 0) & (age < window))[None, None]
        block = query[:, :, start:end], key[:, :, first:end], value[:, :, first:end]
        blocks.append(stock(module, *block, mask, **given, is_causal=False)[0])
    return torch.cat(blocks, 1)


def _misuse(what: str) -> RopepatchError:
    return RopepatchError(
        f"packed attention got {what}",
        hint="pass cu_seq_lens_q, no mask and no cache; evaluate outside of packed_attention",
    )


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)
