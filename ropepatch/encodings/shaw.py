"""Relative positions as vectors for keys and for values (Shaw et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ropepatch.encodings.encoding import Attended, AttentionModule, Encoding, ModelShape, Places, Relative


@dataclass(frozen=True, kw_only=True)
class Shaw(Encoding):
    """Trained vectors for distances up to k, for each layer and all its heads; farther ones share the last.

    Of the 2k + 1 vectors of the paper a decoder reads k + 1, those of keys behind the query.

    Args:
        clip: k, in tokens.
    """

    name = "shaw"
    family = "relative"
    formula = "q·(k + w^K_t)/√D, v + w^V_t, t = min(i−j, k)"
    paper = "arXiv:1803.02155"
    domains = (("clip", "at least 1", lambda one: one.clip >= 1),)

    clip: int = 16

    def build(self, shape: ModelShape) -> AttentionModule:
        return RelativeVectors(shape, self.clip)


class RelativeVectors(AttentionModule):
    """Row t of a layer's tables is for keys t tokens behind the query."""

    def __init__(self, shape: ModelShape, clip: int) -> None:
        super().__init__()
        self.keys = shape.parameter(shape.layers, clip + 1, shape.head_dim)
        self.values = shape.parameter(shape.layers, clip + 1, shape.head_dim)

    def forward(self, stock: Attended, layer: int, places: Places, scaling: float) -> Attended:
        keys, values = (x[layer].to(stock.query.device).float().T for x in (self.keys, self.values))
        return replace(
            stock, relative=Relative(keys.new_zeros(1, len(self.keys[layer])), keys[None] * scaling, values)
        )
