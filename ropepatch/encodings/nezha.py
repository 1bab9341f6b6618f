"""Relative positions as fixed sinusoids, for keys and for values (Wei et al. 2019).

The sinusoid of a difference is the one of the key's position, turned by the query's:

    sin((j-i)w) = sin(jw) cos(iw) - cos(jw) sin(iw),    cos((j-i)w) = cos(jw) cos(iw) + sin(jw) sin(iw)

so instead of a vector for every pair of tokens, keys and values get D more channels with the sinusoids of
their own positions, queries D more that are turned by theirs, and the output is turned back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ropepatch.encodings.absolute import sinusoid
from ropepatch.encodings.encoding import Attended, AttentionModule, Encoding, ModelShape, Places


@dataclass(frozen=True, kw_only=True)
class NEZHA(Encoding):
    """The sinusoid of j - i is added to keys and to values, in all layers and heads.

    The paper's numbers; the authors' code clips at 64 and shifts the phase by as much.
    """

    name = "nezha"
    family = "relative"
    formula = "q·(k + a_{j−i})/√D, v + a_{j−i}, a sinusoidal"
    paper = "arXiv:1909.00204"

    def build(self, shape: ModelShape) -> AttentionModule:
        self._require_even("head_dim", shape.head_dim, instead="shaw")
        return FixedSinusoids()


class FixedSinusoids(AttentionModule):
    """D more channels for queries, keys and values."""

    def forward(self, stock: Attended, layer: int, places: Places, scaling: float) -> Attended:
        query, key, value = stock.query, stock.key, stock.value
        width = query.shape[-1]
        of_queries, of_keys = (sinusoid(positions, width)[:, None] for positions in places)
        more = of_keys.to(key.dtype).expand_as(key)
        return Attended(
            torch.cat((query, _turned(query, of_queries)), -1),
            torch.cat((key, more), -1),
            torch.cat((value, more), -1),
            finish=lambda output: output[..., :width] + _turned_back(output[..., width:], of_queries),
        )


def _turned(query: Tensor, of_queries: Tensor) -> Tensor:
    """What gives with a key's sinusoid the product of the query with that of the difference."""
    (x, y), (sin, cos) = _pairs(query), _pairs(of_queries)
    return torch.stack((x * cos + y * sin, y * cos - x * sin), -1).flatten(-2).to(query.dtype)


def _turned_back(summed: Tensor, of_queries: Tensor) -> Tensor:
    """A weighted sum of the keys' sinusoids as that of the differences."""
    (x, y), (sin, cos) = _pairs(summed), _pairs(of_queries)
    return torch.stack((x * cos - y * sin, y * cos + x * sin), -1).flatten(-2).to(summed.dtype)


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., 0::2].float(), x[..., 1::2].float()
