"""What the distance of a query from a key adds to its score, and to the value that it weighs.

Shapes: B sequences, H heads, Q queries, T keys, q queries of a block, R distances, E dimensions of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ropepatch.attention.bands import Band, Piece, behind, layout, same, start
from ropepatch.attention.kernels import banded
from ropepatch.attention.tiles import table, tiles


@dataclass(frozen=True, eq=False)
class Relative:
    """What distances of 0 to R - 1 tokens add; farther ones add what the last does.

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
        """What queries [B, H, q, E] have added to scores at distances [B or 1, q, T]: [B or 1, H, q, T]."""
        index = distances.clamp(0, self.reach - 1)
        if self.vectors is None:
            return self.numbers[:, index].transpose(0, 1)
        products = query.to(self.vectors) @ self.vectors + self.numbers[:, None]
        return products.gather(-1, index[:, None].expand(*products.shape[:3], -1))

    def read(self, weights: Tensor, distances: Tensor) -> Tensor | None:
        """What weights [B, H, q, T] at distances [B or 1, q, T] add to the output: [B, H, q, E]."""
        if self.values is None:
            return None
        index = distances.clamp(0, self.reach - 1)[:, None].expand_as(weights)
        summed = weights.new_zeros(*weights.shape[:3], self.reach)
        return summed.scatter_add(-1, index, weights) @ self.values.mT


def attended(
    query: Tensor, key: Tensor, value: Tensor, relative: Relative, scaling: float, window: int | None = None
) -> Tensor:
    """What the last queries [B, H, Q, E] read of keys and values [B, H, T, E] that follow each other.

    What the last distance adds is taken off all of them: for scores it is one number in each row, which a
    softmax ignores; to the output it is added again. Keys that far are then read by a stock kernel.

    Args:
        query: [B, H, Q, E].
        key: [B, H, T, E].
        value: [B, H, T, E].
        relative: What distances add.
        scaling: The factor of the scores.
        window: Of a sliding layer, how many keys a query sees at most.
    """
    (sequences, heads, queries, _), keys = query.shape, key.shape[2]
    seen = keys if window is None else min(window, keys)
    near = seen
    far: tuple[Piece, ...] = ()
    if seen > relative.reach:
        near = relative.reach - 1
        far = layout((Band(start, behind(near), same, same),), queries, keys, 0, window)[0]
    wide = torch.promote_types(value.dtype, torch.float32)
    hidden = torch.finfo(wide).min / 2  # to which a score can be added

    def told(added: Tensor, otherwise: float = 0.0) -> Tensor:
        added = added.to(wide)
        return table((added - added[..., -1:] if far else added)[..., :near], otherwise)

    tables = (
        told(relative.numbers, hidden).expand(heads, -1),
        None if relative.vectors is None else told(relative.vectors).expand(heads, -1, -1),
        None if relative.values is None else told(relative.values),
    )
    pieces = (*tiles(queries, keys, near, sequences * heads), *far)
    with torch.autocast(query.device.type, enabled=False):
        output = banded([(query.to(value.dtype), key.to(value.dtype))], value, (pieces,), scaling, tables)
    if far and relative.values is not None:
        output = output + relative.values[:, -1].to(output.dtype)
    return output
