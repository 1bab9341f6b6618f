"""Additions of distances to scores, and to the values that they weigh.

Shapes: B sequences, H heads, Q queries, T keys, q queries of a block, R distances, E dimensions of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Relative:
    """Additions of distances of 0 to R - 1 tokens; farther ones add what the last does.

    Args:
        numbers: Added to the scaled scores: [H or 1, R] float32.
        vectors: Whose products with a query are added to its scaled scores: [H or 1, E, R] float32.
        values: Added to the values: [E, R] float32.
    """

    numbers: Tensor
    vectors: Tensor | None = None
    values: Tensor | None = None

    @property
    def reach(self) -> int:
        """R."""
        return self.numbers.shape[-1]

    def bias(self, query: Tensor, distances: Tensor) -> Tensor:
        """The additions [B or 1, H, q, T] to scores of queries [B, H, q, E] at distances [B or 1, q, T]."""
        index = distances.clamp(0, self.reach - 1)
        if self.vectors is None:
            return self.numbers[:, index].transpose(0, 1)
        products = query.to(self.vectors) @ self.vectors + self.numbers[:, None]
        return products.gather(-1, index[:, None].expand(*products.shape[:3], -1))

    def read(self, weights: Tensor, distances: Tensor) -> Tensor | None:
        """The addition [B, H, q, E] to the output by weights [B, H, q, T] at distances [B or 1, q, T]."""
        if self.values is None:
            return None
        index = distances.clamp(0, self.reach - 1)[:, None].expand_as(weights)
        summed = weights.new_zeros(*weights.shape[:3], self.reach)
        return summed.scatter_add(-1, index, weights) @ self.values.mT
