"""The scores of a map's bands, written down."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ropepatch.attention.bands import Band
from ropepatch.attention.places import Places
from ropepatch.attention.scored import ScoredAttention, by_head, masked


@dataclass(frozen=True, eq=False)
class ScoredBands(ScoredAttention):
    """Attention by bands with its scores written down; its queries are those of all bands, side by side.

    Args:
        keys: For every band, [B, K, t, D]: those of its columns.
        columns: Of every band.
        bands: The bands.
        places: Where queries and keys stand.
        scaling: The factor of the scores.
    """

    keys: list[Tensor]
    columns: list[slice]
    bands: tuple[Band, ...]
    places: Places
    scaling: float

    def _scores(self, query: Tensor, rows: slice, end: int) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        if len(self.bands) == 1:  # whatever the mask lets through
            score = by_head(query, self.keys[0][:, :, :end].mT).to(wide) * self.scaling
            return masked(score, self.sight.mask(rows, end))
        queries, positions = self.places.queries[:, rows], self.places.keys[:, :end]
        total = query.new_full((*query.shape[:3], end), torch.finfo(wide).min, dtype=wide)
        own = query.chunk(len(self.keys), -1)
        for band, q, keys, whole in zip(self.bands, own, self.keys, self.columns, strict=True):
            columns = band.span(queries, positions)
            k = keys[:, :, columns.start - whole.start : columns.stop - whole.start]
            score = by_head(q, k.mT).to(wide) * self.scaling
            holds = band.holds(queries, positions[:, columns])[:, None]
            total[..., columns] = torch.where(holds, score, total[..., columns])
        return masked(total, self.sight.mask(rows, end))
