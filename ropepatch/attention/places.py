"""Where queries and keys stand: packed, padded, in a dynamic or a static cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Places(NamedTuple):
    """Where queries [B or 1, Q] and keys [B or 1, T] stand, in tokens; explicit, never counted."""

    queries: Tensor
    keys: Tensor

    def offsets(self, rows: slice, end: int | None = None) -> Tensor:
        """j - i [B or 1, q, T], of keys j from the queries i of these rows; at most 0 where i sees j.

        Args:
            rows: The rows.
            end: The column behind the last one; None for T.
        """
        return self.keys[:, None, :end] - self.queries[:, rows, None]

    @property
    def reach(self) -> int:
        """One more than the greatest distance of a query from a key behind it."""
        return int((self.queries.max() - self.keys.min()).clamp(min=0)) + 1


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
