"""Attention by a map, in place of the model's own: keys are cached unturned, and turned when they are read.

Several queries are read by stock kernels over the pieces of the map's bands. What they cannot (holes in
a row, a mask of the user's, dropout, weights that are wanted, a device without such kernels) is written down
for a block of queries at a time; the scores of one query always are, for a block of keys at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import repeat_kv

from ropepatch.attention.attention_map import AttentionMap
from ropepatch.attention.bands import WHOLE, Band, distances, layout
from ropepatch.attention.interchange import OTHER_SCORES, SLOT
from ropepatch.attention.kernels import DEVICES, banded
from ropepatch.attention.plain import causal
from ropepatch.attention.scored import masked
from ropepatch.attention.scored_bands import ScoredBands, ScoredQuery, laid_out, turned
from ropepatch.attention.sight import Run, Sight, sight_mask
from ropepatch.attention.unrotated import UnrotatedLayers
from ropepatch.errors import RopepatchError

NAME = "ropepatch_map"  # in the interfaces of transformers, which are one per process


class MappedRope(UnrotatedLayers):
    """Stands in the place of the rotary module, and holds the map by which attention turns.

    Args:
        stock: The rotary module; not registered.
        config: The configuration of the language model.
        distances: The map, with all its parameters.
        window: L, the tokens the model was built to read.
        layer_type: Where the rope differs by layer type, the one that is mapped.

    Attributes:
        before: The configuration's max_position_embeddings.
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
        self.before = config.max_position_embeddings
        self.memo: dict[Any, Any] = {}  # what the layers of one step share

    def forward(self, x: Tensor, position_ids: Tensor, *layer_type: str) -> Any:
        """Ones and zeros, but to layers of another type the stock module's cos and sin."""
        self.memo.clear()
        return super().forward(x, position_ids, *layer_type)

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
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What unturned queries [B, H, Q, D] read from unturned keys and values [B, K, T, D]: [B, Q, H, D].

    Args:
        module: The attention; one that holds no map is given turned queries and keys, or never turns them.
        query: Of this step.
        key: Of all tokens.
        value: Of all tokens.
        attention_mask: What `sight_mask` gave, or a mask of the user's own.
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
    sight = Sight.of(attention_mask, query, key) if rope is None else rope.sight(attention_mask, query, key)
    if position_ids is None:
        position_ids = torch.arange(sight.column, sight.end, device=query.device)[None]
    step = _Step(module, rope, sight, position_ids, query.shape[-1] ** -0.5 if scaling is None else scaling)
    wants_weights = rope is not None and rope.wants_weights
    if query.shape[2] == 1:
        output, weights = step.one(query, key, value, dropout, wants_weights)
        return output.transpose(1, 2).contiguous(), weights
    if not wants_weights and not dropout:
        runs = sight.runs(position_ids)
        if runs is not None and (query.device.type in DEVICES or step.is_plain(runs)):
            return step.running(query, key, value, runs).transpose(1, 2).contiguous(), None
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

    def one(self, query: Tensor, key: Tensor, value: Tensor, dropout: float, wants_weights: bool) -> Any:
        """What one query reads, and its weights: all its keys stand at a distance, whatever their band."""
        if self.rope is None:
            stock: Any = sdpa_attention_forward
            mask = self.sight.mask(slice(None))
            output, _ = stock(self.module, query, key, value, mask, dropout, self.scaling, is_causal=False)
            return output.transpose(1, 2), None
        heads, (sequences, shared, keys, _) = query.shape[1], key.shape
        cos, sin, origin, mask = self._apart(query, key)
        query = self._scaled(query.to(cos.dtype), self.position_ids)
        sides = turned(self.module, query, *origin), turned(self.module, query, *reversed(origin))
        rows = torch.cat(sides, -1).view(sequences, shared, heads // shared, -1)
        read = ScoredQuery(rows, value, dropout, keys, key, cos, sin, mask, self.scaling)
        output, weights = read.output(wants_weights)
        output = output.reshape(sequences, heads, 1, -1)
        return output, None if weights is None else weights.reshape(sequences, heads, 1, keys)

    def _apart(self, query: Tensor, key: Tensor) -> tuple[Any, ...]:
        """By what each key is multiplied at its distance, by what the query at none, and the mask.

        The layers of a step share them.
        """
        rope = cast(MappedRope, self.rope)
        asked = self.sight, self.position_ids  # the same objects in all layers of a step
        kind = "apart", self.sight.window, key.dtype, key.device, torch.is_inference_mode_enabled()
        known = rope.memo.get(kind)
        if known is not None and all(one is other for one, other in zip(known[0], asked, strict=True)):
            told: tuple[Any, ...] = known[1]
            return told
        mask = self.sight.mask(slice(None))
        places = self.sight.places(query, key, self.position_ids)
        distance = distances(self.bands, *places)
        unseen = distance.isnan()
        distance = distance.masked_fill(unseen, 0)
        wide = key.new_empty(0, dtype=torch.promote_types(key.dtype, torch.float32))
        apart, which = torch.unique(distance, return_inverse=True)
        few = 2 * len(apart) < distance.numel()  # as of most maps
        cos, sin = rope.rotation(wide, (apart if few else distance.flatten())[None])
        tables = laid_out(self.module, key.shape[-1], cos[0], sin[0])
        cos, sin = (
            nn.functional.embedding(which, table) if few else table.view(*distance.shape, -1)
            for table in tables
        )
        at_none, _ = rope.rotation(wide, torch.zeros_like(apart[None, :1]))
        seen = ~unseen[:, None]
        whole = mask & seen if mask.dtype == torch.bool else masked(mask, seen)
        clear = whole.dtype == torch.bool and bool(whole.all())
        told = cos, sin, (at_none, torch.zeros_like(at_none)), None if clear else whole
        rope.memo[kind] = asked, told
        return told

    def is_plain(self, runs: list[Run]) -> bool:
        """Whether all that is read is causal attention as it is, which any device has a kernel for."""
        return self.bands is WHOLE or all(self._plain(self._layout(run)) for run in runs)

    def _layout(self, run: Run) -> Any:
        first = run.position - (self.sight.column + run.first_row - run.first_key)
        queries, keys = run.end - self.sight.column - run.first_row, run.end - run.first_key
        return layout(self.bands, queries, keys, first, self.sight.window)

    def _plain(self, pieces: Any) -> bool:
        near, *others = pieces
        square = len(near) == 1 and near[0].kind == "lower" and near[0].first_key == near[0].first_row == 0
        return square and not any(others)  # every row reads itself: the square holds them all

    def running(self, query: Tensor, key: Tensor, value: Tensor, runs: list[Run]) -> Tensor:
        """What the queries of sequences without holes read."""
        return self.sight.read(runs, self._run, query, key, value)

    def _run(self, run: Run, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pieces = self._layout(run)
        used = [index for index, own in enumerate(pieces) if own]
        n = torch.arange(key.shape[2], device=key.device)[None]
        n = n + run.position + query.shape[2] - key.shape[2]
        m = n[:, -query.shape[2] :]
        pairs = []
        for index in used:
            pair, band = (query, key), self.bands[index]
            if self.rope is not None:
                cos_sin = self._shared(query, ("queries", index, run), band.query(m))
                turned_query = self._scaled(self._turned(query, *cos_sin), m)
                cos_sin = self._shared(key, ("keys", index, run), band.key(n))
                pair = turned_query, self._turned(key, *cos_sin)
            pairs.append((pair[0].to(value.dtype), pair[1].to(value.dtype)))
        if self.bands is WHOLE or self._plain(pieces):
            window = self.sight.window if self.bands is WHOLE else None
            return causal(self.module, *pairs[0], value, window, self.scaling).transpose(1, 2)
        groups = query.shape[1] // key.shape[1]
        pairs = [(query, repeat_kv(key, groups)) for query, key in pairs]
        return banded(pairs, repeat_kv(value, groups), tuple(pieces[index] for index in used), self.scaling)

    def _shared(self, x: Tensor, what: Any, places: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at places that follow from `what` and the step's shape; the layers share them."""
        rope = cast(MappedRope, self.rope)
        inference = torch.is_inference_mode_enabled()  # such tensors are of no use to a backward pass
        shape = self.sight.queries, self.sight.end, self.sight.column
        key = (self.bands, shape, x.dtype, x.device, inference, *what)
        tables: tuple[Tensor, Tensor] | None = rope.memo.get(key)  # another thread may empty it meanwhile
        if tables is None:
            tables = rope.memo[key] = rope.rotation(x, places)
        return tables

    def written_down(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float, wants_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """What queries read, with their scores written down for a block of queries at a time."""
        places = self.sight.places(query, key, self.position_ids)
        groups = query.shape[1] // key.shape[1]
        queries, keys = [query], [key]
        if self.rope is not None:
            tables = [self.rope.rotation(query, band.query(places.queries)) for band in self.bands]
            queries = [self._scaled(self._turned(query, *table), places.queries) for table in tables]
            tables = [self.rope.rotation(key, band.key(places.keys)) for band in self.bands]
            keys = [self._turned(key, *table) for table in tables]
        keys = [repeat_kv(one, groups) for one in keys]
        scored = ScoredBands(
            torch.cat(queries, -1), repeat_kv(value, groups), dropout, len(keys) * key.shape[2],
            keys, self.bands, places, self.sight, self.scaling,
        )  # fmt: skip
        return scored.output(wants_weights)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return turned(self.module, x, cos, sin)

    def _scaled(self, query: Tensor, positions: Tensor) -> Tensor:
        """The query, multiplied by what the map multiplies its scores by."""
        if self.rope is None or self.bands is WHOLE:
            return query
        factor = self.rope.distances.temperature(positions, self.rope.window)
        return query if factor is None else query * factor.to(query.dtype)[:, None, :, None]


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sight_mask)
