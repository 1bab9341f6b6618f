"""Attention with its scores written down, for a block of queries at a time: linear memory, in training too.

When gradients are wanted, each block is computed again in the backward pass instead of being kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ropepatch.attention.sight import Sight

SCORES = 1 << 24  # at a time, over sequences, heads, queries and keys
BLOCKS = (
    16  # at least, where there are several: each ends where its last query does, and saves what is behind
)


@dataclass(frozen=True, eq=False)
class ScoredAttention(ABC):
    """Attention whose scores a subclass computes.

    Args:
        query: [B, H, Q, E].
        value: [B, H, T, F], or of fewer heads, which others share.
        dropout: The share of the weights that is dropped.
        sight: What queries may see.
        width: The columns that the scores of one query take, where they are more than T.
    """

    query: Tensor
    value: Tensor
    dropout: float
    sight: Sight
    width: int

    @abstractmethod
    def _scores(self, query: Tensor, rows: slice, end: int) -> Tensor:
        """The masked scores [B, H, q, end] of queries [B, H, q, E] of some rows, in float32 or wider."""

    def _more(self, rows: slice, weights: Tensor) -> Tensor | None:
        """The addition of the weights [B, H, q, end] of some rows to the output [B, H, q, F], if any."""
        return None

    def output(self, wants_weights: bool) -> tuple[Tensor, Tensor | None]:
        """The output [B, H, Q, F], and the weights [B, H, Q, T] where they are wanted."""
        (sequences, heads, queries, _), keys = self.query.shape, self.value.shape[2]
        size = max(1, SCORES // (sequences * heads * max(keys, self.width)))
        run: Any = self._block
        if queries > size:
            size = min(size, -(-queries // BLOCKS))
            if torch.is_grad_enabled():
                run = partial(checkpoint, run, use_reentrant=False)
        outputs, weights = [], []
        for start in range(0, queries, size):
            rows = slice(start, min(start + size, queries))
            # The queries are an argument, by which `checkpoint` knows on which device to repeat dropout.
            output, weight = run(self.query[:, :, rows], rows)
            outputs.append(output)
            if wants_weights:
                weights.append(nn.functional.pad(weight, (0, keys - weight.shape[-1])))
        return torch.cat(outputs, 2), torch.cat(weights, 2) if wants_weights else None

    def _block(self, query: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """The output [B, H, q, F] and the weights [B, H, q, end] of the queries [B, H, q, E] of some rows."""
        dtype, end = self.value.dtype, self.sight.end_of(rows)
        with torch.autocast(query.device.type, enabled=False):
            weights = nn.functional.dropout(self._scores(query, rows, end).softmax(-1), self.dropout)
            output = by_head(weights.to(dtype), self.value[:, :, :end])
            if (more := self._more(rows, weights)) is not None:
                output = output + more.to(output.dtype)
        return output, weights.to(dtype)


def by_head(one: Tensor, shared: Tensor) -> Tensor:
    """[B, H, q, X] @ [B, K, X, Y]: [B, H, q, Y]; the heads that share one are rows of one product."""
    rows = one.reshape(len(one), shared.shape[1], -1, one.shape[-1]) @ shared
    return rows.view(*one.shape[:3], -1)


def masked(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores [B, H, q, T] under a mask [B, 1, q, T], which is True where a query may look, or is added.

    Where a query, of padding, may look nowhere, it reads the mean of all values: never NaN.
    """
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask.to(scores.dtype)
