"""Which keys a step may see, told in the length of a row, where a mask would be its square.

transformers asks for a mask once for all layers; it is given, in the mask's place, the tokens among the keys,
the column of the first query and the window of a sliding layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn
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
    """In the place of a mask, int64 [B, 1, 1, T + 2]: T documents, the first query's column, the window.

    The documents of a row count from 1, and 0 is padding. Patterns beyond documents, padding, cached and
    sliding keys (a user's functions) are sdpa's mask.
    """
    told = torch.ones(batch_size, kv_length + 2, dtype=torch.long, device=device)
    if use_vmap or not (allow_is_causal_skip or q_length == 1):
        packed = not use_vmap and attention_mask is None and q_length == kv_length
        documents = _documents(others["mask_function"], told[:, :-2]) if packed else None
        if documents is None:
            mask: Tensor | None = sdpa_mask(
                batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask=attention_mask,
                local_size=local_size, allow_is_causal_skip=False, use_vmap=use_vmap, device=device, **others,
            )  # fmt: skip
            return mask
        told[:, :kv_length] = documents
    if attention_mask is not None:
        given = attention_mask[:, kv_offset : kv_offset + kv_length]
        told[:, :kv_length] = 0
        told[:, : given.shape[1]] = given
    told[:, kv_length] = q_offset - kv_offset
    told[:, kv_length + 1] = local_size or 0
    return told[:, None, None]


def _documents(mask_function: Any, ones: Tensor) -> Tensor | None:
    """Those of packed rows, told from whether tokens see their neighbours; None where one sees the next."""
    rows = torch.arange(len(ones), device=ones.device)[:, None]
    columns = torch.arange(ones.shape[1], device=ones.device)[None]
    if mask_function(rows, 0, columns[:, :-1], columns[:, 1:]).any():
        return None
    starts = torch.zeros_like(ones)
    starts[:, 1:] = ~mask_function(rows, 0, columns[:, 1:], columns[:, :-1])
    return ones + starts.cumsum(-1)


@dataclass(frozen=True)
class Run:
    """Sequences of a batch, or the same document of several, whose tokens follow each other and begin alike.

    Args:
        sequences: Which ones.
        first_key: The column of their first token.
        end: The column behind their last query's.
        first_row: Their first query that is a token.
        position: Where that query stands.
    """

    sequences: tuple[int, ...]
    first_key: int
    end: int
    first_row: int
    position: int


@dataclass(frozen=True, eq=False)
class Sight:
    """What the queries of a step may see.

    Args:
        queries: Q.
        keys: T.
        given: A mask [B or 1, 1, Q, T], boolean or added to the scores, that says it all; or None.
        documents: Without such a mask, those of the columns [B, T], from 1; 0 is padding.
        column: That of the first query.
        window: Of a sliding layer, how many keys a query sees at most.
    """

    queries: int
    keys: int
    given: Tensor | None
    documents: Tensor
    column: int
    window: int | None

    @classmethod
    def of(cls, mask: Tensor | None, query: Tensor, key: Tensor) -> Sight:
        """What stands in the place of a mask; None is a causal one, whose queries end with the keys."""
        sequences, queries, keys = query.shape[0], query.shape[2], key.shape[2]
        if mask is None or mask.dtype != torch.long:
            one = torch.ones(sequences, keys, dtype=torch.long, device=query.device)
            return cls(queries, keys, mask, one, keys - queries, None)
        told = mask[:, 0, 0]
        column, window = told[0, keys:].tolist()
        return cls(queries, keys, None, told[:, :keys].expand(sequences, -1), column, window or None)

    @property
    def tokens(self) -> Tensor:
        """Whether columns [B, T] hold tokens."""
        return self.documents > 0

    @property
    def end(self) -> int:
        """The column behind the last query's."""
        return self.column + self.queries

    def end_of(self, rows: slice) -> int:
        """The column behind the last one that the queries of some rows may see."""
        return self.keys if self.given is not None else min(self.column + rows.stop, self.keys)

    def mask(self, rows: slice, end: int | None = None) -> Tensor:
        """Whether the queries of some rows see the keys: [B, 1, q, T], boolean or added to the scores.

        Args:
            rows: The rows.
            end: The column behind the last one; None for T.
        """
        if self.given is not None:
            return self.given[:, :, rows, :end]
        device, documents = self.documents.device, self.documents[:, :end]
        columns = torch.arange(documents.shape[1], device=device)
        own = torch.arange(self.column, self.end, device=device)[rows, None]
        seen = columns <= own
        if self.window is not None:
            seen &= columns > own - self.window
        mine = self.documents[:, own]  # [B, q, 1]
        return (seen & (documents > 0)[:, None] & ((mine == 0) | (mine == documents[:, None])))[:, None]

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
        """The documents, where tokens and positions of each follow each other; None where some do not.

        Those of the same sequences stand together, in their order.
        """
        if self.given is not None:
            return None
        documents = self.documents[:, : self.end]
        positions = position_ids.expand(len(documents), -1)
        own = documents[:, self.column :]
        joined = (own.diff() == 0) & (own[:, 1:] > 0)
        if bool((joined & (positions.diff() != 1)).any()):
            return None
        alike: dict[tuple[tuple[int, int, int, int], ...], list[int]] = {}
        for sequence, row in enumerate(documents):
            kinds, counts = (x.tolist() for x in torch.unique_consecutive(row, return_counts=True))
            ends = zip(kinds, counts, accumulate(counts), strict=True)
            spans = [(end - count, end) for kind, count, end in ends if kind]
            if 0 in kinds[1:-1] or not spans or spans[0][1] <= self.column:
                return None  # there is a hole, or no query
            spans[-1] = spans[-1][0], self.end  # behind it only queries that are padding
            rows = [max(0, first - self.column) for first, _ in spans]
            begins = positions[sequence, rows].tolist()
            told = tuple((*span, row, begin) for span, row, begin in zip(spans, rows, begins, strict=True))
            alike.setdefault(told, []).append(sequence)
        return [Run(tuple(sequences), *one) for told, sequences in alike.items() for one in told]

    def read(
        self,
        runs: list[Run],
        one: Callable[[Run, Tensor, Tensor, Tensor], Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """What queries [B, H, Q, D] read, document by document; those of padding read nothing.

        Args:
            runs: As `runs` gave them.
            one: What the queries of one of them read from its keys and values.
            query: [B, H, Q, D].
            key: [B, K, T, D].
            value: [B, K, T, D].
        """
        outputs = []
        order: list[int] = []
        for sequences, documents in groupby(runs, lambda run: run.sequences):
            order += sequences
            own: Any = slice(sequences[0], sequences[-1] + 1)  # no copy
            own = own if len(sequences) == own.stop - own.start else list(sequences)
            q, k, v = (x[own] for x in (query, key, value))
            parts = []
            for run in documents:
                rows, keys = slice(run.first_row, run.end - self.column), slice(run.first_key, run.end)
                parts.append(one(run, q[:, :, rows], k[:, :, keys], v[:, :, keys]))
            output = torch.cat(parts, 2)
            outputs.append(nn.functional.pad(output, (0, 0, query.shape[2] - output.shape[2], 0)))
        output = torch.cat(outputs)
        return output[torch.tensor(order).argsort().to(output.device)] if len(outputs) > 1 else output
