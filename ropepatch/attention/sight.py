"""Which keys a step may see, told in the length of a row, where a mask would be its square.

transformers asks for a mask once for all layers; it is given, in the mask's place, the tokens among the keys,
the column of the first query and the window of a sliding layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from ropepatch.attention.places import Places, places_of


def sight_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,  # a tensor of static caches
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: Any = "cpu",
    **others: Any,
) -> Tensor | None:
    """In the place of a mask, int64 [B, 1, 1, T + 2]: T tokens or none, the first query's column, the window.

    Patterns beyond padding, cached and sliding keys (packed rows, a user's functions) are sdpa's mask.
    """
    if use_vmap or not (allow_is_causal_skip or q_length == 1):
        mask: Tensor | None = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask=attention_mask,
            local_size=local_size, allow_is_causal_skip=False, use_vmap=use_vmap, device=device, **others,
        )  # fmt: skip
        return mask
    told = torch.ones(batch_size, kv_length + 2, dtype=torch.long, device=device)
    if attention_mask is not None:
        given = attention_mask[:, kv_offset : kv_offset + kv_length]
        told[:, :kv_length] = 0
        told[:, : given.shape[1]] = given
    told[:, kv_length] = q_offset - kv_offset
    told[:, kv_length + 1] = local_size or 0
    return told[:, None, None]


@dataclass(frozen=True)
class Run:
    """Sequences of a batch whose tokens follow each other, and begin alike.

    Args:
        sequences: Which ones.
        first_key: The column of their first token.
        first_row: Their first query that is a token.
        position: Where that query stands.
    """

    sequences: tuple[int, ...]
    first_key: int
    first_row: int
    position: int


@dataclass(frozen=True, eq=False)
class Sight:
    """What the queries of a step may see.

    Args:
        queries: Q.
        keys: T.
        given: A mask [B or 1, 1, Q, T], boolean or added to the scores, that says it all; or None.
        tokens: Without such a mask, whether columns [B, T] hold tokens.
        column: That of the first query.
        window: Of a sliding layer, how many keys a query sees at most.
    """

    queries: int
    keys: int
    given: Tensor | None
    tokens: Tensor
    column: int
    window: int | None

    @classmethod
    def of(cls, mask: Tensor | None, query: Tensor, key: Tensor) -> Sight:
        """What stands in the place of a mask; None is a causal one, whose queries end with the keys."""
        sequences, queries, keys = query.shape[0], query.shape[2], key.shape[2]
        tokens = torch.ones(sequences, keys, dtype=torch.bool, device=query.device)
        if mask is None:
            return cls(queries, keys, None, tokens, keys - queries, None)
        if mask.dtype != torch.long:
            return cls(queries, keys, mask, tokens, keys - queries, None)
        told = mask[:, 0, 0]
        column, window = told[0, keys:].tolist()
        return cls(queries, keys, None, told[:, :keys].bool().expand_as(tokens), column, window or None)

    @property
    def end(self) -> int:
        """The column behind the last query's."""
        return self.column + self.queries

    def mask(self, rows: slice) -> Tensor:
        """Whether the queries of some rows see the keys: [B, 1, q, T], boolean or added to the scores."""
        if self.given is not None:
            return self.given[:, :, rows]
        columns = torch.arange(self.keys, device=self.tokens.device)
        own = torch.arange(self.column, self.end, device=self.tokens.device)[rows, None]
        seen = columns <= own
        if self.window is not None:
            seen &= columns > own - self.window
        return (seen & self.tokens[:, None])[:, None]

    def places(self, query: Tensor, key: Tensor, position_ids: Tensor) -> Places:
        """Where queries and keys stand; cached tokens follow each other."""
        if self.given is not None or self.queries == self.keys:
            return places_of(query, key, self.given, position_ids)
        rows = torch.arange(self.queries, device=self.tokens.device)
        own = self.tokens[:, self.column : self.end]
        anchor = torch.where(own, rows, 0).amax(-1, keepdim=True)  # the last query that is a token
        count = self.tokens.long().cumsum(-1)
        behind = count.gather(1, self.column + anchor) - count
        positions = position_ids.expand(len(anchor), -1)
        return Places(position_ids, positions.gather(1, anchor) - behind)

    def runs(self, position_ids: Tensor) -> list[Run] | None:
        """The sequences, where tokens and positions of each follow each other; None where some do not."""
        if self.given is not None:
            return None
        tokens = self.tokens[:, : self.end]
        columns = torch.arange(self.end, device=tokens.device)
        first = tokens.long().argmax(-1)
        last = torch.where(tokens, columns, -1).amax(-1)  # behind it only queries that are padding
        row = (first - self.column).clamp(min=0)
        positions = position_ids.expand(len(tokens), -1)
        steps = positions.diff() == 1
        real = (columns[self.column : -1] >= (self.column + row)[:, None]) & (
            columns[self.column + 1 :] <= last[:, None]
        )
        whole = (tokens.sum(-1) == last - first + 1) & (last >= self.column) & (steps | ~real).all(-1)
        if not bool(whole.all()):
            return None
        start = positions.gather(1, row[:, None])[:, 0]
        alike: dict[tuple[int, int, int], list[int]] = {}
        for sequence, key in enumerate(zip(first.tolist(), row.tolist(), start.tolist(), strict=True)):
            alike.setdefault(key, []).append(sequence)
        return [Run(tuple(sequences), *key) for key, sequences in alike.items()]
