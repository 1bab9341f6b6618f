"""Attention by a map, in place of the model's own.

Queries and keys come turned to where the map reads most keys, and so a cache has them: only the nearest ones
are turned once more when they are read. Stock kernels read the pieces of the map's bands. What they cannot
(holes in a row, a mask of the user's, dropout, weights that are wanted, a device without such kernels) is
written down for a block of queries at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import repeat_kv

from ropepatch.attention.attention_map import AttentionMap
from ropepatch.attention.bands import WHOLE, Band, Kept, Piece, Place, layout
from ropepatch.attention.interchange import OTHER_SCORES, SLOT
from ropepatch.attention.kernels import DEVICES, Layout, banded
from ropepatch.attention.places import Places
from ropepatch.attention.plain import causal
from ropepatch.attention.scored_bands import ScoredBands
from ropepatch.attention.sight import Run, Sight, sight_mask
from ropepatch.attention.turning import quickly_turned, turned
from ropepatch.attention.unrotated import UnrotatedLayers
from ropepatch.errors import RopepatchError

Shared = TypeVar("Shared")

NAME = "ropepatch_map"  # in the interfaces of transformers, which are one per process


class MappedRope(UnrotatedLayers):
    """Stands in the place of the rotary module, and holds the map by which attention turns.

    Args:
        stock: The rotary module; not registered.
        config: The configuration of the language model.
        distances: The map, with all its parameters.
        window: L, the tokens the model was built to read.
        layer_type: Where the rope differs by layer type, the one that is mapped.
    """

    state = "this model has an attention map"
    way_back = "call remove() on its map first"
    reason = "it has an attention map"
    attention, what, when = NAME, "attention map", "map"

    def __init__(
        self,
        stock: nn.Module,
        config: PreTrainedConfig,
        distances: AttentionMap,
        window: int,
        layer_type: str | None,
    ) -> None:
        super().__init__(stock, config, layer_type)
        self.distances, self.window = distances, window
        self.memo: dict[Any, Any] = {}  # what the layers of one step share

    def forward(self, x: Tensor, position_ids: Tensor, *layer_type: str) -> Any:
        """The model's cos and sin where keys are kept; to layers of another type the stock module's."""
        self.memo.clear()
        return super().forward(x, position_ids, *layer_type)

    def cos_sin(self, x: Tensor, position_ids: Tensor, *layer_type: str) -> tuple[Tensor, Tensor]:
        """cos and sin where keys are kept."""
        return self.rotation(x, self.distances.kept()(position_ids))

    def further(self, x: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of distances [B or 1, T] by which x is turned on, in float32 or wider."""
        wide = x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))
        cos, sin = self.rotation(wide, nn.functional.pad(distance, (1, 0)))
        return cos[:, 1:] / cos[:, :1], sin[:, 1:] / cos[:, :1]  # the model may multiply both

    def sight(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Sight:
        """What a step may see; the layers with one mask share it."""
        known = self.memo.get(("sight", id(mask), key.shape))
        if known is None or known[0] is not mask:  # the mask is held: nothing else has its id
            known = self.memo["sight", id(mask), key.shape] = mask, Sight.of(mask, query, key)
        told: Sight = known[1]
        return told

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"memo": {}}

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{self.distances.name}, {self.distances.described()}"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Sight | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What queries [B, H, Q, D] read from keys, as they are kept, and values [B, K, T, D]: [B, Q, H, D].

    Args:
        module: The attention; one that holds no map is given turned queries and keys, or never turns them.
        query: Of this step.
        key: Of all tokens.
        value: Of all tokens.
        attention_mask: What `sight_mask` gave, a mask of the user's own, or what is seen.
        scaling: The factor of the scores.
        dropout: The share of the weights that is dropped.
        position_ids: Of the queries.
        kwargs: Whatever else a model passes.

    Raises:
        RopepatchError: The model changes its scores itself, or the map has been taken out.
    """
    if changed := [name for name in OTHER_SCORES if kwargs.get(name) is not None]:
        raise RopepatchError(
            f"{type(module).__name__} changes its scores itself ({changed[0]})", hint="map a LLaMA-like model"
        )
    if SLOT not in module.__dict__:
        raise RopepatchError(
            "this attention needs an attention map, and there is none",
            hint="call ropepatch.attention.map_attention first",
        )
    rope: MappedRope | None = module.__dict__[SLOT]
    sight = attention_mask
    if not isinstance(sight, Sight):
        sight = Sight.of(sight, query, key) if rope is None else rope.sight(sight, query, key)
    if position_ids is None:
        position_ids = torch.arange(sight.column, sight.end, device=query.device)[None]
    step = _Step(module, rope, sight, position_ids, query.shape[-1] ** -0.5 if scaling is None else scaling)
    if rope is None and query.shape[2] == 1:
        stock: Any = sdpa_attention_forward
        mask = sight.mask(slice(None))
        return stock(module, query, key, value, mask, dropout, step.scaling, is_causal=False)  # type: ignore[no-any-return]
    wants_weights = rope is not None and rope.wants_weights
    if not wants_weights and not dropout:
        runs = step.runs()
        if runs is not None and (query.device.type in DEVICES or step.is_plain(runs)):
            return sight.read(runs, step.run, query, key, value).transpose(1, 2).contiguous(), None
    output, weights = step.written_down(query, key, value, dropout, wants_weights)
    return output.transpose(1, 2).contiguous(), weights


@dataclass(frozen=True, eq=False)
class _Step:
    """One step through one layer."""

    module: nn.Module
    rope: MappedRope | None
    sight: Sight
    position_ids: Tensor
    scaling: float

    @property
    def bands(self) -> tuple[Band, ...]:
        """The map's; of a layer that sees no farther than the window, or does not turn, the plain one."""
        narrow = self.sight.window is not None and self.rope and self.sight.window <= self.rope.window
        return WHOLE if self.rope is None or narrow else self.rope.distances.bands()

    @property
    def kept(self) -> Kept:
        """Where queries and keys stand as they come."""
        return cast(MappedRope, self.rope).distances.kept()

    def _shared(self, what: str, make: Callable[[], Shared]) -> Shared:
        """What follows from a step's sight and positions, which its layers share."""
        memo = {} if self.rope is None else self.rope.memo
        kind = what, id(self.sight), id(self.position_ids)  # both are held: nothing else has their ids
        known = memo.get(kind)  # another thread may empty it meanwhile
        if known is None:
            known = memo[kind] = make(), self.sight, self.position_ids
        told: Shared = known[0]
        return told

    def runs(self) -> list[Run] | None:
        """As `Sight.runs`."""
        return self._shared("runs", lambda: self.sight.runs(self.position_ids))

    def is_plain(self, runs: list[Run]) -> bool:
        """Whether all that is read is causal attention as it is, which any device has a kernel for."""
        return self.bands is WHOLE or all(self._plain(self._layout(run)) for run in runs)

    def _layout(self, run: Run) -> Layout:
        queries, keys = run.end - self.sight.column - run.first_row, run.end - run.first_key
        return layout(self.bands, queries, keys, run.position + queries - keys, self.sight.window)

    def _plain(self, pieces: Layout) -> bool:
        near, *others = pieces
        square = len(near) == 1 and near[0].kind == "lower" and near[0].first_key == near[0].first_row == 0
        return square and not any(others)  # every row reads itself: the square holds them all

    def run(self, run: Run, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What the queries of tokens that follow each other read."""
        pieces = self._layout(run)
        (sequences, heads, queries, _), shared = query.shape, key.shape[1]
        first = run.position + queries - key.shape[2]
        m = torch.arange(run.position, run.position + queries, device=query.device)[None]
        one, plain = queries == 1, queries > 1 and (self.bands is WHOLE or self._plain(pieces))
        pairs, parts = [], []
        for band, whole in zip(self.bands, pieces, strict=True):
            for part in self._apart(whole, first, heads // shared) if one else [whole] if whole else []:
                told = self._moved(query, band.query, run.position)
                told = self._scaled(told, m)
                told = told.reshape(sequences, shared, -1, told.shape[-1]) if one else told
                own = self._moved(key[:, :, _columns(part)], band.key, first + _columns(part).start)
                pairs.append((told.to(value.dtype), own.to(value.dtype)))
                parts.append(part)
        if plain:
            window = self.sight.window if self.bands is WHOLE else None
            return causal(self.module, *pairs[0], value, window, self.scaling).transpose(1, 2)
        if not one:
            pairs = [(told, repeat_kv(own, heads // shared)) for told, own in pairs]
            value = repeat_kv(value, heads // shared)
        starts = tuple(_columns(part).start for part in parts)
        output = banded(pairs, value, tuple(parts), self.scaling, starts=starts)
        return output.reshape(sequences, heads, queries, -1)

    def _apart(self, whole: tuple[Piece, ...], first: int, rows: int) -> Iterator[tuple[Piece, ...]]:
        """What one query reads, the keys that are kept as they are apart; heads that share keys are rows."""
        for piece in whole:
            border = min(max(self.kept.own - first, piece.first_key), piece.last_key)
            for begin, end in ((piece.first_key, border), (border, piece.last_key)):
                if begin < end:
                    yield (Piece("all", 0, rows, begin, end),)

    def _moved(self, x: Tensor, place: Place, first: int) -> Tensor:
        """Queries or keys [B, H, T, D] of the positions from `first` on, at a place."""
        end = first + x.shape[2]
        if self.rope is None or self.kept.at(place, first, end):
            return x
        inference = torch.is_inference_mode_enabled()  # such tensors are of no use to a backward pass
        kind = place, first, end, x.dtype, x.device, inference
        if (tables := self.rope.memo.get(kind)) is None:
            positions = torch.arange(first, end, device=x.device)[None]
            tables = self.rope.memo[kind] = self.rope.further(x, place(positions) - self.kept(positions))
        return self._by(x, tables)

    def written_down(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float, wants_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """What queries read, with their scores written down for a block of queries at a time."""
        places, spans = self._shared("places", lambda: self._placed(query, key))
        wide = torch.promote_types(query.dtype, torch.float32) if query.shape[2] == 1 else query.dtype
        queries, keys = [], []
        for band, columns in zip(self.bands, spans, strict=True):
            own = self._turned(query, band.query, places.queries)
            queries.append(self._scaled(own, places.queries).to(wide))
            keys.append(self._turned(key[:, :, columns], band.key, places.keys[:, columns]).to(wide))
        scored = ScoredBands(
            torch.cat(queries, -1), value, dropout, self.sight, sum(x.shape[2] for x in keys) + key.shape[2],
            keys, spans, self.bands, places, self.scaling,
        )  # fmt: skip
        return scored.output(wants_weights)

    def _placed(self, query: Tensor, key: Tensor) -> tuple[Places, list[slice]]:
        """Where queries and keys stand, and the columns of every band's keys."""
        places = self.sight.places(query, key, self.position_ids)
        if len(self.bands) == 1:
            return places, [slice(0, key.shape[2])]  # whatever the mask lets through
        return places, [band.span(*places) for band in self.bands]

    def _turned(self, x: Tensor, place: Place, positions: Tensor) -> Tensor:
        """Queries or keys [B, H, T, D] of these positions, at a place."""
        if self.rope is None or self.kept.at(place, 0, sys.maxsize):
            return x
        return self._by(x, self.rope.further(x, place(positions) - self.kept(positions)))

    def _by(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        turn = turned if self.sight.queries > 1 else quickly_turned
        return turn(self.module, x.to(tables[0].dtype), *tables).to(x.dtype)

    def _scaled(self, query: Tensor, positions: Tensor) -> Tensor:
        """The query, multiplied by what the map multiplies its scores by."""
        if self.rope is None or self.bands is WHOLE:
            return query
        factor = self.rope.distances.temperature(positions, self.rope.window)
        return query if factor is None else query * factor.to(query.dtype)[:, None, :, None]


def _columns(part: tuple[Piece, ...]) -> slice:
    """From the first to the last of all pieces."""
    return slice(min(piece.first_key for piece in part), max(piece.last_key for piece in part))


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sight_mask)
