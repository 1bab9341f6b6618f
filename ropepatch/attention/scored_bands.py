"""The scores of a map's bands, written down."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ropepatch.attention.bands import Band
from ropepatch.attention.places import Places
from ropepatch.attention.scored import ScoredAttention, by_head, masked
from ropepatch.attention.sight import Sight


@dataclass(frozen=True, eq=False)
class ScoredBands(ScoredAttention):
    """Attention by bands with its scores written down; its queries are those of all bands, side by side.

    Args:
        keys: For every band, [B, K, t, D]: those of its columns.
        columns: Of every band.
        bands: The bands.
        places: Where queries and keys stand.
        sight: What they may see.
        scaling: The factor of the scores.
    """

    keys: list[Tensor]
    columns: list[slice]
    bands: tuple[Band, ...]
    places: Places
    sight: Sight
    scaling: float

    def _scores(self, query: Tensor, rows: slice) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        own = query.chunk(len(self.keys), -1)
        scores = [by_head(q, k.mT).to(wide) * self.scaling for q, k in zip(own, self.keys, strict=True)]
        if len(self.bands) == 1:  # whatever the mask lets through
            return masked(scores[0], self.sight.mask(rows))
        queries = self.places.queries[:, rows]
        shape = *scores[0].shape[:3], self.value.shape[2]
        total = scores[0].new_full(shape, torch.finfo(wide).min)
        for band, score, columns in zip(self.bands, scores, self.columns, strict=True):
            holds = band.holds(queries, self.places.keys[:, columns])[:, None]
            total[..., columns] = torch.where(holds, score, total[..., columns])
        return masked(total, self.sight.mask(rows))
