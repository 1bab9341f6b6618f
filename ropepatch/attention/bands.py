"""Bands: which keys a query sees from which place, and the plain pieces that such a region falls into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

Place = Callable[[Tensor], Tensor]  # of positions, elementwise; whole numbers or fractions


@dataclass(frozen=True)
class Band:
    """The keys from `begin` to before `end`, which a query sees as if both stood elsewhere.

    Args:
        begin: Of a query's position m, the position of the first key; one below 0 means the first token.
        end: Of m, the position behind the last key; at most m + 1.
        query: Of m, the place at which the query is turned.
        key: Of a key's position n, the place at which the key is turned.
    """

    begin: Place
    end: Place
    query: Place
    key: Place

    def holds(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether queries [..., Q] see keys [..., T] by this band: [..., Q, T]."""
        keys = keys[..., None, :]
        return (keys >= self.begin(queries)[..., None]) & (keys < self.end(queries)[..., None])

    def span(self, queries: Tensor, keys: Tensor) -> slice:
        """The columns from the first to the last key [B, T] that any query [B or 1, Q] sees."""
        first = self.begin(queries).amin(-1, keepdim=True)
        seen = (keys >= first) & (keys < self.end(queries).amax(-1, keepdim=True))
        columns = seen.any(0).nonzero()[:, 0].tolist()
        return slice(columns[0], columns[-1] + 1) if columns else slice(0, 0)

    def distances(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The distances [..., Q, T] between their places."""
        return self.query(queries)[..., None] - self.key(keys)[..., None, :]


def distances(bands: Iterable[Band], queries: Tensor, keys: Tensor) -> Tensor:
    """At which queries [..., Q] read keys [..., T], whatever their band: float64, NaN where unseen."""
    table = torch.tensor(torch.nan, dtype=torch.float64, device=keys.device)
    for band in bands:
        table = torch.where(band.holds(queries, keys), band.distances(queries, keys).double(), table)
    return table


def same(positions: Tensor) -> Tensor:
    """The position itself."""
    return positions


def behind(distance: int) -> Place:
    """The first position that is nearer to a query than a distance; for 0, the one after the query."""
    return lambda m: m - distance + 1


def start(positions: Tensor) -> Tensor:
    """The first token."""
    return torch.zeros_like(positions)


@dataclass(frozen=True)
class Kept:
    """Where queries and keys stand as attention is given them, and keys in a cache.

    Args:
        place: Of positions.
        own: The first positions, which stay: a text of no more tokens is read as without a map.
    """

    place: Place
    own: int = 0

    def __call__(self, positions: Tensor) -> Tensor:
        """Where these positions stand."""
        there = self.place(positions)
        return torch.where(positions < self.own, positions, there) if self.own else there

    def at(self, place: Place, first: int, end: int) -> bool:
        """Whether all positions from `first` to before `end` stand at this place already."""
        return (first >= self.own or place is same) and (end <= self.own or place is self.place)


# Everything before a query and itself, at their own places: attention as it is.
WHOLE = (Band(start, behind(0), same, same),)


@dataclass(frozen=True)
class Piece:
    """Rows from `first_row` to before `last_row`, by columns from `first_key` to before `last_key`.

    Args:
        kind: All pairs; or, of a square, those on its diagonal and below, or on it and above.
        first_row: Of the queries.
        last_row: Behind them.
        first_key: Of the keys.
        last_key: Behind them.
    """

    kind: Literal["all", "lower", "upper"]
    first_row: int
    last_row: int
    first_key: int
    last_key: int

    @property
    def rows(self) -> slice:
        """The rows."""
        return slice(self.first_row, self.last_row)

    @property
    def keys(self) -> slice:
        """The columns."""
        return slice(self.first_key, self.last_key)


@lru_cache(maxsize=256)
def layout(
    bands: tuple[Band, ...], queries: int, keys: int, first: int, window: int | None
) -> tuple[tuple[Piece, ...], ...]:
    """Every band as plain pieces, for contiguous positions: the last queries of all keys.

    Args:
        bands: The bands.
        queries: How many there are; the last one stands where the last key does.
        keys: How many there are.
        first: The position of the first key.
        window: Of a sliding layer, how many keys a query sees at most.
    """
    m = torch.arange(first + keys - queries, first + keys, device="cpu")
    oldest = m - m if window is None else m - window + 1
    found = []
    for band in bands:
        begin = torch.maximum(band.begin(m), oldest).clamp(min=first) - first
        found.append(tuple(_pieces(begin, band.end(m) - first)))
    return tuple(found)


def _pieces(begin: Tensor, end: Tensor) -> Iterator[Piece]:
    """Intervals of columns, one for each row, as plain pieces."""
    if len(begin) == 1:
        if begin < end:
            yield Piece("all", 0, 1, int(begin), int(end))
        return
    steps = torch.stack((begin.diff(), end.diff()))
    full = end > begin
    plain = ((steps == 0) | (steps == 1)).all(0) & full[1:] & full[:-1]
    kinds, counts = torch.unique_consecutive(
        torch.where(plain, 2 * steps[0] + steps[1], -1), return_counts=True
    )
    starts, ends, seen = begin.tolist(), end.tolist(), full.tolist()
    row = at = 0  # the first row that is in no piece; the row before the steps to come
    for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
        at += count
        if kind < 0:
            singles = range(row, at)
            row = max(row, at)
        else:
            singles = range(0)
            yield from _run(row, at + 1, starts[row], ends[row], *divmod(kind, 2))
            row = at + 1
        for single in singles:
            if seen[single]:
                yield Piece("all", single, single + 1, starts[single], ends[single])
    for single in range(row, len(starts)):
        if seen[single]:
            yield Piece("all", single, single + 1, starts[single], ends[single])


def _run(row: int, last: int, begin: int, end: int, begins: int, ends: int) -> Iterator[Piece]:
    """Rows whose intervals begin and end by 0 or 1 later from row to row."""
    height = last - row
    if height == 1 or not (begins or ends):
        yield Piece("all", row, last, begin, end)
    elif not begins:
        if end - 1 > begin:
            yield Piece("all", row, last, begin, end - 1)
        yield Piece("lower", row, last, end - 1, end - 1 + height)
    elif not ends:
        yield Piece("upper", row, last, begin, begin + height)
        if begin + height < end:
            yield Piece("all", row, last, begin + height, end)
    else:
        width = end - begin
        for top in range(row, last, width):
            bottom, left = min(top + width, last), begin + top - row
            yield Piece("upper", top, bottom, left, left + bottom - top)
            if bottom - top < width:
                yield Piece("all", top, bottom, left + bottom - top, left + width)
            if bottom - top > 1:
                yield Piece("lower", top + 1, bottom, left + width, left + width + bottom - top - 1)
