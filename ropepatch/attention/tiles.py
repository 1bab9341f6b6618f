"""Attention by distance, with the scores of one tile of pairs at a time written down, forward and backward.

The rows of a tile are read backwards: pairs at one distance then stand on its antidiagonals, and what
distances add, in falling order, is a view of memory no longer than two sides of the tile.

Shapes: S sequences, H heads, b rows and n columns of a tile, L = b + n - 1 distances, E dimensions of a head,
R distances of a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ropepatch.attention.bands import Piece

ROWS = 128  # of a tile
SCORES = 1 << 18  # of a tile: a few of this size stay in a core's cache

# What is added to scores [H, R], with a query's product [H, E, R], and to values [E, R]; see `table`.
Tables = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Tile(Piece):
    """A piece with scores of its own.

    Args:
        start: Where in a table the distance of its last row from its first column stands.
    """

    start: int

    @property
    def span(self) -> slice:
        """The part of a table that it reads."""
        rows, columns = self.last_row - self.first_row, self.last_key - self.first_key
        return slice(self.start, self.start + rows + columns - 1)


def tiles(queries: int, keys: int, reach: int, heads: int) -> Iterator[Tile]:
    """The tiles that hold all pairs nearer than a reach; the last query stands where the last key does.

    Every row sees its own column in the first tile that has it.

    Args:
        queries: How many there are.
        keys: How many there are.
        reach: In tokens, above 0.
        heads: H for every sequence.
    """
    width = min(max(SCORES // (ROWS * heads), ROWS), 4 * ROWS)
    for first in range(0, queries, ROWS):
        last = min(first + ROWS, queries)
        begin, end = max(0, first + keys - queries - reach + 1), last + keys - queries
        while end > begin:
            column = max(end - width, begin)
            farthest = last - 1 + keys - queries - column
            yield Tile("all", first, last, column, end, reach + ROWS - 1 - farthest)
            end = column


def table(added: Tensor, otherwise: float = 0.0) -> Tensor:
    """What distances [..., R] add, in falling order and with room for those that no pair may have."""
    return pad(added, (ROWS, ROWS), value=otherwise).flip(-1)


def read(
    tile: Tile, query: Tensor, key: Tensor, value: Tensor, scaling: float, tables: Tables
) -> tuple[Tensor, Tensor]:
    """What the rows of a tile read of its columns [S, H, b, E], and the log-sum-exp of their scores."""
    wide = tables[0].dtype
    query, key, value = query.flip(2).to(wide), key.to(wide), value.to(wide)
    scores = _scores(tile, query, key, scaling, tables)
    most = scores.amax(-1, keepdim=True)
    weights = _exp(scores.sub_(most))
    total = weights.sum(-1, keepdim=True)
    output = weights @ value
    if (values := tables[2]) is not None:
        output += _spread(weights) @ values[:, tile.span].mT
    return output.div_(total).flip(2), (most + total.log())[..., 0].flip(2)


def differentiated(
    tile: Tile,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: tuple[Tensor, ...],
    scaling: float,
    tables: Tables,
    sums: tuple[Tensor | None, ...],
) -> tuple[Tensor, ...]:
    """The gradients of the queries, keys and values of a tile; those of the tables are added to `sums`.

    Args:
        tile: The tile.
        query: Its queries.
        key: Its keys.
        value: Its values.
        rows: The gradient of the output, the output and the log-sum-exp of its queries over all their keys.
        scaling: The factor of the scores.
        tables: What distances add.
        sums: Of the same shapes; None where no gradient is wanted.
    """
    _, vectors, values = tables
    wide = tables[0].dtype
    query, key, value = query.flip(2).to(wide), key.to(wide), value.to(wide)
    grad, output, lse = (x.flip(2).to(wide) for x in rows)
    weights = _exp(_scores(tile, query, key, scaling, tables).sub_(lse[..., None]))
    to_value = weights.mT @ grad
    to_scores = grad @ value.mT
    if values is not None:
        to_scores += _skewed(grad @ values[:, tile.span], key.shape[2])
        if sums[2] is not None:
            sums[2][:, tile.span] += (grad.mT @ _spread(weights)).sum((0, 1))
    to_scores.sub_((grad * output).sum(-1, keepdim=True)).mul_(weights)
    to_query = (to_scores @ key).mul_(scaling)
    to_key = (to_scores.mT @ query).mul_(scaling)
    if sums[0] is not None or vectors is not None:
        spread = _spread(to_scores)
        if sums[0] is not None:
            sums[0][:, tile.span] += spread.sum((0, 2))
        if vectors is not None:
            to_query += spread @ vectors[:, :, tile.span].mT
        if sums[1] is not None:
            sums[1][:, :, tile.span] += (query.mT @ spread).sum(0)
    return to_query.flip(2), to_key, to_value


def _scores(tile: Tile, query: Tensor, key: Tensor, scaling: float, tables: Tables) -> Tensor:
    """The scores [S, H, b, n], the rows backwards."""
    numbers, vectors, _ = tables
    columns = key.shape[2]
    scores = (query * scaling) @ key.mT
    if vectors is None:
        return scores.add_(numbers[:, tile.span].unfold(-1, columns, 1))
    more = query @ vectors[:, :, tile.span]
    return scores.add_(_skewed(more.add_(numbers[:, None, tile.span]), columns))


def _exp(scores: Tensor) -> Tensor:
    """The exponentials, in place; 0 for those below 1e-26: the tiniest numbers make processors slow."""
    return torch.threshold_(scores, -60.0, -torch.inf).exp_()


def _skewed(x: Tensor, columns: int) -> Tensor:
    """Of rows [S, H, b, L] by distance, those by column, [S, H, b, n]: row i from its i-th on."""
    *outer, _, _ = x.stride()
    return x.as_strided((*x.shape[:-1], columns), (*outer, x.shape[-1] + 1, 1))


def _spread(x: Tensor) -> Tensor:
    """Of rows [S, H, b, n] by column, those by distance, [S, H, b, L], with zeros elsewhere."""
    rows, columns = x.shape[-2:]
    out = x.new_zeros(*x.shape[:-1], rows + columns - 1)
    _skewed(out, columns).copy_(x)
    return out
