"""Attention within the segments of a packed row, whatever their position ids say, without a [T, T] mask.

Stock sdpa takes positions that jump for packed documents, and builds a [T, T] mask for packed ones. Here the
segments are given (`cu_seq_lens_q`), and stock kernels run on each as on a sequence of its own.

Shapes: H heads, T tokens of all segments, D dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ropepatch.attention.interchange import OTHER_SCORES, attending_by, uninterchangeable
from ropepatch.attention.plain import causal
from ropepatch.errors import RopepatchError
from ropepatch.model.rotary import base_model

NAME = "ropepatch_packed"


@contextmanager
def packed_attention(model: nn.Module) -> Iterator[None]:
    """Switch one model to attention within segments, for the forward and backward passes of training.

    A forward pass then takes one row: `input_ids` and `position_ids` [1, T] with `cu_seq_lens_q` from 0 to T,
    no mask and no cached past. Any other is refused: evaluate outside.

    A backward pass belongs inside: activation checkpointing runs the forward pass again in it.
    """
    base = base_model(model)
    if reason := uninterchangeable(base):
        raise RopepatchError(
            f"{base.config.model_type} cannot be trained on packed rows: {reason}",
            hint="use a LLaMA-like model",
        )
    with attending_by(base, NAME):
        yield


def _no_mask(
    *, attention_mask: Tensor | None = None, local_size: int | None = None, device: Any = None, **_: Any
) -> Tensor:
    """Replaces a mask, [1, 1, 0, window]: stock attention fails on it rather than leave a segment."""
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
    """What queries [1, H, T, D] read [1, T, H, D] from keys and values, of H heads or fewer."""
    if attention_mask is None or attention_mask.numel():
        raise _misuse("a mask of the model's own")
    if cu_seq_lens_q is None:
        raise _misuse("no cu_seq_lens_q")
    if changed := [name for name in OTHER_SCORES if kwargs.get(name) is not None]:
        raise _misuse(f"{changed[0]} from {type(module).__name__}")
    edges, (rows, _, tokens, _) = cu_seq_lens_q.tolist(), query.shape
    if rows > 1 or key.shape[2] != tokens or edges != sorted({0, *edges[1:-1], tokens}):
        raise _misuse(f"segments {short(edges)} for {rows} x {tokens} queries and {key.shape[2]} keys")
    lengths = [end - start for start, end in pairwise(edges)]
    read = partial(
        causal,
        module,
        window=attention_mask.shape[-1] or None,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout=dropout,
    )
    tensors = (query, key, value)
    if len(set(lengths)) == 1:
        stacked = [torch.unflatten(x[0], 1, (-1, lengths[0])).transpose(0, 1) for x in tensors]
        return read(*stacked).flatten(0, 1)[None], None
    split = [torch.split(x, lengths, dim=2) for x in tensors]
    return torch.cat([read(*one) for one in zip(*split, strict=True)], 1), None


def _misuse(what: str) -> RopepatchError:
    return RopepatchError(
        f"packed attention got {what}",
        hint="pass cu_seq_lens_q, no mask and no cache; evaluate outside of packed_attention",
    )


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)
