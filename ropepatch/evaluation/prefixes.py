"""Reading prompts of one length whose beginnings are alike: what they share is read once.

A key-value cache holds one of the prompts, the trunk, once per row of a batch. A batch overwrites what comes
after the prefix that its rows share with the trunk; batches go from the longest prefix to the shortest, so
that nothing is overwritten that is needed again. The trunk is read in one call, as the rest of every other
prompt is: each call reaches position N - 1, so that a rope that depends on the length, such as dynamic NTK,
rotates prefix and rest alike.

Shapes: R prompts of N tokens, the answers among the last A; B rows of a batch, H heads of D dimensions, V
vocabulary. Memory: the keys and values of B * N tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ropepatch.errors import RopepatchError
from ropepatch.model.head import gives_positions

logger = logging.getLogger(__name__)

Read = tuple[list[int], Tensor]  # which prompts, and their logits [B, A, V]


def read_in_batches(
    model: PreTrainedModel, ids: Tensor, answers: int, *, rows: int, share: bool
) -> Iterator[Read]:
    """The logits that predict the last ``answers`` tokens of all prompts [R, N], at most ``rows`` at once.

    Raises:
        RopepatchError: Logits that are no numbers.
    """
    whole = list(range(len(ids)))
    if share:
        whole = yield from _read_sharing(model, ids, answers, rows)
    for batch in _batches(whole, rows):
        yield batch, read_answers(model, ids[batch], answers)


def _read_sharing(
    model: PreTrainedModel, ids: Tensor, answers: int, rows: int
) -> Generator[Read, None, list[int]]:
    """Read what is read faster so; the others are returned."""
    trunk, length = len(ids) - 1, ids.shape[1]  # the last prompt, whose needle stands deepest
    alike = (ids == ids[trunk]).cumprod(dim=1).sum(dim=1).clamp(max=length - answers - 1).tolist()
    least = _least_prefix(model, length)
    sharing = sorted((row for row in range(trunk) if alike[row] >= least), key=lambda row: -alike[row])
    # The trunk is read for its own verdict, into the cache, and a part of it from there, to compare.
    if sum(alike[row] for row in sharing) <= 2 * length or not (layers := _layers(model, ids[:1, :1])):
        return list(range(len(ids)))
    expected = read_answers(model, ids[trunk:], answers)
    yield [trunk], expected
    cache = _SharedCache(layers, min(rows, len(sharing)), length)
    read_answers(model, ids[trunk:], answers, cache)
    cache.cut(shortest := alike[sharing[-1]])
    if not _same(read_answers(model, ids[trunk:, shortest:], answers, cache), expected):
        logger.warning(
            "%s: a prompt of %d tokens has other logits with a key-value cache than without; "
            "all prompts of this length are read in full",
            type(model).__name__,
            length,
        )
        return list(range(trunk))
    cache.spread()
    for batch in _batches(sharing, rows):
        cache.cut(begin := alike[batch[-1]])
        yield batch, read_answers(model, ids[batch, begin:], answers, cache)
    return sorted(set(range(trunk)).difference(sharing))


def read_answers(
    model: PreTrainedModel, ids: Tensor, answers: int, cache: _SharedCache | None = None
) -> Tensor:
    """The logits [B, A, V] that predict the last A tokens of the rows.

    Raises:
        RopepatchError: Logits that are no numbers.
    """
    takes_some = any(map(gives_positions, model.modules()))  # any: wrappers such as PEFT's pass keywords on
    options: dict[str, Any] = {"logits_to_keep": answers + 1} if takes_some else {}
    options |= {"use_cache": False} if cache is None else {"use_cache": True, "past_key_values": cache}
    logits: Tensor = model(input_ids=ids, **options).logits[:, -answers - 1 : -1]
    if logits.isnan().any():
        raise RopepatchError(
            f"{type(model).__name__} gave logits that are no numbers",
            hint="load the model in float32 or bfloat16; check its weights and its rope scaling",
        )
    return logits


def _least_prefix(model: PreTrainedModel, length: int) -> float:
    """From how many shared tokens on a prompt is read faster with the cache than at once.

    Attention skips what comes later at once, but not from a cache: N - P tokens that see N each, instead of N
    that see N / 2 on average.
    """
    return length * length / (2 * (length + _beside_attention(model)))


def seen(model: PreTrainedModel, length: int) -> float:
    """What reading a row costs, in tokens that its tokens see."""
    return length * (_beside_attention(model) + length / 2)


def _beside_attention(model: PreTrainedModel) -> int:
    """What a token costs beside attention, in tokens seen: 6 * width."""
    embedding: Any = model.get_input_embeddings().weight  # [V, width]
    width: int = embedding.shape[1]
    return 6 * width


def _batches(rows: list[int], size: int) -> Iterator[list[int]]:
    return (rows[begin : begin + size] for begin in range(0, len(rows), size))


def _same(logits: Tensor, expected: Tensor) -> bool:
    """Whether the two greatest logits of every token differ by rounding alone.

    Products of other shapes round differently, in TF32 most of all; a wrong position is off by far more. The
    others are left out, as a model may forbid tokens with logits as low as the dtype allows.
    """
    greatest, tokens = expected.topk(2)
    tolerance = max(4 * torch.finfo(expected.dtype).eps, 1e-3) * greatest.abs().max()
    return bool((logits.gather(-1, tokens) - greatest).abs().max() <= tolerance)


def _layers(model: PreTrainedModel, ids: Tensor) -> int:
    """Of the cache that the model makes for the ids; 0 if it makes none, or one that forgets or does more."""
    if not any("past_key_values" in signature(module.forward).parameters for module in model.modules()):
        return 0
    cache = getattr(model(input_ids=ids, use_cache=True), "past_key_values", None)
    layers = cache.layers if type(cache) is DynamicCache else []
    return len(layers) if all(type(layer) is DynamicLayer for layer in layers) else 0


class _SharedCache(DynamicCache):
    """Room for the keys and values of B rows of N tokens, of which the first ones are filled."""

    def __init__(self, layers: int, rows: int, length: int) -> None:
        super().__init__()
        self.shared = [_SharedLayer(rows, length) for _ in range(layers)]
        self.layers = list(self.shared)

    def cut(self, tokens: int) -> None:
        """Forget all but the first tokens."""
        for layer in self.shared:
            layer.filled = tokens

    def spread(self) -> None:
        """Copy the first row to all others."""
        for layer in self.shared:
            layer.spread()


class _SharedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values [B, H, N, D] of one layer, written in place."""

    def __init__(self, rows: int, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self.length, self.filled = rows, length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.room = [
            states.new_empty(self.rows, states.shape[1], self.length, states.shape[3])
            for states in (key_states, value_states)
        ]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, begin, self.filled = len(key_states), self.filled, self.filled + key_states.shape[2]
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room[:rows, :, begin : self.filled] = states
        self.keys, self.values = (room[:rows, :, : self.filled] for room in self.room)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.filled

    def spread(self) -> None:
        """Copy the first row to all others."""
        for room in self.room:
            room[1:] = room[:1]
