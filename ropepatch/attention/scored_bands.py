"""The scores of a map's bands, written down: of several queries by all bands, of one by its distances.

R(d) q . k = q . (k cos d) + R(90 degrees) q . (k sin d): number by number, which is cheaper than to turn k.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ropepatch.attention.bands import Band
from ropepatch.attention.places import Places
from ropepatch.attention.scored import ScoredAttention, masked
from ropepatch.attention.sight import Sight

KEYS = {"cpu": 1 << 17}  # numbers of them that are multiplied at a time: they stay in a processor's cache
MORE_KEYS = 1 << 24  # on other devices


def turned(module: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys [B, H, T, D], turned by the model's own function in its own layout of pairs."""
    apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
    width = cos.shape[-1]
    out, _ = apply(x[..., :width], x[:, :0, :, :width], cos, sin)
    return out if width == x.shape[-1] else torch.cat((out, x[..., width:]), -1)


def laid_out(module: nn.Module, width: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R] in the layout of a key, number by number: [T, D]; 1 and 0 for what is not turned."""
    columns = torch.arange(cos.shape[-1], device=cos.device)
    told = columns[None, None].to(cos.dtype)
    own = turned(module, torch.ones_like(told)[None], told, torch.zeros_like(told))[0, 0, 0].long()
    if not torch.equal(own, columns):
        cos, sin = cos[:, own], sin[:, own]
    if missing := width - len(columns):
        cos, sin = nn.functional.pad(cos, (0, missing), value=1), nn.functional.pad(sin, (0, missing))
    return cos, sin


@dataclass(frozen=True, eq=False)
class ScoredBands(ScoredAttention):
    """Attention by bands with its scores written down; its queries are those of all bands, side by side.

    Args:
        keys: For every band, [B, H, T, D].
        bands: The bands.
        places: Where queries and keys stand.
        sight: What they may see.
        scaling: The factor of the scores.
    """

    keys: list[Tensor]
    bands: tuple[Band, ...]
    places: Places
    sight: Sight
    scaling: float

    def _scores(self, query: Tensor, rows: slice) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        own = query.chunk(len(self.keys), -1)
        scores = [(q @ k.mT).to(wide) * self.scaling for q, k in zip(own, self.keys, strict=True)]
        if len(self.bands) == 1:  # whatever the mask lets through
            return masked(scores[0], self.sight.mask(rows))
        queries = self.places.queries[:, rows]
        total = torch.full_like(scores[0], torch.finfo(wide).min)
        for band, score in zip(self.bands, scores, strict=True):
            total = torch.where(band.holds(queries, self.places.keys)[:, None], score, total)
        return masked(total, self.sight.mask(rows))


@dataclass(frozen=True, eq=False)
class ScoredQuery(ScoredAttention):
    """Attention of one query, whose heads that share keys are rows; each beside itself turned by 90 degrees.

    Args:
        key: [B, K, T, D], unturned.
        cos: Of every key's distance, as its numbers are laid out: [B or 1, 1, T, D], in float32 or wider.
        sin: The same.
        mask: [B or 1, 1, 1, T], or None where all keys are seen.
        scaling: The factor of the scores.
    """

    key: Tensor
    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    scaling: float

    def _scores(self, query: Tensor, rows: slice) -> Tensor:
        query, aside = (query * self.scaling).chunk(2, -1)
        size = max(1, KEYS.get(query.device.type, MORE_KEYS) * self.key.shape[2] // self.key.numel())
        parts = []
        for start in range(0, self.key.shape[2], size):
            key, cos, sin = (x[:, :, start : start + size] for x in (self.key, self.cos, self.sin))
            key = key.to(cos.dtype)
            parts.append(query @ (key * cos).mT + aside @ (key * sin).mT)
        scores = torch.cat(parts, -1)
        return scores if self.mask is None else masked(scores, self.mask)
