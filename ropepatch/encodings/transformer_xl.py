"""Relative positions as projected sinusoids of the distance, and two biases (Dai et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ropepatch.encodings.absolute import sinusoid
from ropepatch.encodings.encoding import Attended, AttentionModule, Encoding, ModelShape, Places, Relative


@dataclass(frozen=True, kw_only=True)
class TransformerXL(Encoding):
    """(q + u)·k + (q + v)·W R_(i-j): a projection W for each layer and head, u and v for each head."""

    name = "transformer-xl"
    family = "relative"
    formula = "((q+u)·k + (q+v)·W R_{i−j})/√D, R sinusoidal"
    paper = "arXiv:1901.02860"

    def build(self, shape: ModelShape) -> AttentionModule:
        self._require_even("hidden_size", shape.hidden_size, instead="shaw")
        return RelativeSinusoids(shape)


class RelativeSinusoids(AttentionModule):
    """W [layers, H, D, C], u and v [H, D] for all layers."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.projection = shape.parameter(shape.layers, shape.heads, shape.head_dim, shape.hidden_size)
        self.u = shape.parameter(shape.heads, shape.head_dim)
        self.v = shape.parameter(shape.heads, shape.head_dim)

    def forward(self, stock: Attended, layer: int, places: Places, scaling: float) -> Attended:
        query = stock.query
        distances = torch.arange(places.reach, device=query.device)
        projection, u, v = (x.to(query.device).float() for x in (self.projection[layer], self.u, self.v))
        with torch.autocast(query.device.type, enabled=False):
            vectors = projection * scaling @ sinusoid(distances, projection.shape[-1]).T  # [H, D, distances]
            numbers = ((v - u)[:, None] @ vectors)[:, 0]  # of a query that has u in it
        return replace(stock, query=query + u[:, None].to(query), relative=Relative(numbers, vectors))
