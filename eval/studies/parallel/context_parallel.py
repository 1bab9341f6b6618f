"""Context parallelism of packed rows: every process holds a part of a row, and gathers its keys and values.

A row is cut into 2n chunks; process r of n holds chunks r and 2n - 1 - r, so that all have as much to do
(Llama 3, arXiv:2407.21783, section 3.3.2). What a query sees is said by documents and explicit positions.
With activation checkpointing a process holds the gathered keys of one layer at a time, else those of all.

Shapes: T tokens of a row, S documents, n processes, K heads of keys, H of queries, D dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ropepatch.attention.interchange import OTHER_SCORES, SLOT, attending_by, uninterchangeable
from ropepatch.attention.mapping import MappedRope
from ropepatch.attention.modeling_attention_map import Sight, attend_by
from ropepatch.attention.plain import causal
from ropepatch.errors import RopepatchError
from ropepatch.model.rotary import base_model, find_substitute

NAME = "ropepatch_context_parallel"


@contextmanager
def context_parallel(model: nn.Module) -> Iterator[None]:
    """Switch a model, with or without an attention map, to rows whose parts are on several processes.

    Within the block it takes what `shard_row` returns; a backward pass belongs inside, too. Summed over the
    processes, losses and gradients are those of the row.

    Raises:
        RopepatchError: The model does more than attend causally through sdpa.
    """
    base = base_model(model)
    place = find_substitute(base, MappedRope)
    if place is None and (reason := uninterchangeable(base)):
        what = f"{base.config.model_type} cannot read a row on several processes: {reason}"
        raise RopepatchError(what, hint="take a LLaMA-like model")
    told = {} if place is None else place[1].__dict__
    told["attention"] = NAME  # a map refuses any that does not know it
    try:
        with attending_by(base, NAME):
            yield
    finally:
        del told["attention"]


def shard_row(row: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """The part of a packed row that this process passes to the model.

    Args:
        row: The same on every process: `input_ids` and `position_ids` [1, T], `labels` [1, T] of the tokens
            themselves, and `cu_seq_lens_q` [S + 1], where documents begin and the last ends.
        group: The processes; None for all, or for this one where nobody started others.

    Returns:
        `input_ids`, `position_ids` and, of the tokens that follow, `shift_labels` [1, T / n]; `row_shard`.

    Raises:
        RopepatchError: T is no multiple of 2n.
    """
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    positions, edges = row["position_ids"], row["cu_seq_lens_q"].tolist()
    size, left = divmod(positions.shape[1], 2 * ranks)
    if left:
        what = f"a row of {positions.shape[1]} tokens cannot be split over {ranks} processes"
        raise RopepatchError(what, hint=f"give rows of a multiple of {2 * ranks} tokens")
    several = (group or dist.group.WORLD) if ranks > 1 else None
    parts, begins = [], [size * chunk for chunk in (rank, 2 * ranks - 1 - rank)]
    for number, chunk in enumerate(begins):
        for first, end in pairwise(edges):
            begin, last = max(first, chunk), min(end, chunk + size)
            if begin < last:
                seen, shift = positions[:, first:last], number * size - chunk
                rows, columns = slice(begin + shift, last + shift), slice(first, last)
                sight = Sight(seen[:, begin - first :], seen, torch.ones_like(seen), begin - first)
                parts.append(_Part(sight, rows, columns, several))
    labels = nn.functional.pad(row["labels"], (0, 1), value=-100)[:, 1:]
    whole = {"input_ids": row["input_ids"], "position_ids": positions, "shift_labels": labels}
    own = {name: torch.cat([x[:, at : at + size] for at in begins], 1) for name, x in whole.items()}
    return own | {"row_shard": parts}


class _Part(NamedTuple):
    """Tokens of a document that follow each other: some rows of a shard, and the keys that end with them."""

    sight: Sight
    rows: slice
    columns: slice  # of the keys in the whole row
    group: dist.ProcessGroup | None  # None where this process holds all


def _gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What all processes hold [1, K, T / n, D], in the order of the row [1, K, T, D]."""
    name = "all_gather_single_autograd"  # since torch 2.13
    gather: Any = getattr(functional, name, None) or functional.all_gather_tensor_autograd
    first, second = gather(own.contiguous(), 0, group).chunk(2, 2)
    return torch.cat((*first, *second.flip(0)), 1)[None]


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    row_shard: Sequence[_Part] = (), scaling: float | None = None, dropout: float = 0.0, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What queries [1, H, T / n, D] read [1, T / n, H, D] from the keys and values of the whole row."""
    changed = any(others.get(name) is not None for name in OTHER_SCORES)
    held = {part.rows.stop for part in row_shard[-1:]}
    if attention_mask is None or attention_mask.numel() or changed or {query.shape[2], key.shape[2]} != held:
        what = "a row on several processes came without its shard, or with a mask, a cache or other scores"
        raise RopepatchError(what, hint="pass what shard_row returns, and use_cache=False")
    window, scaling = attention_mask.shape[-1] or None, scaling or query.shape[-1] ** -0.5
    both, group = torch.cat((key.to(value.dtype), value), -1), row_shard[0].group
    both = both if group is None else _gathered(both, group)
    key, value = torch.split(both, [key.shape[-1], value.shape[-1]], -1)
    outputs = []
    for part in row_shard:
        own = query[:, :, part.rows], key[:, :, part.columns], value[:, :, part.columns]
        if SLOT in module.__dict__:
            sight = part.sight._replace(window=window or 0)
            outputs.append(attend_by(module, *own, sight, scaling, dropout)[0])
        else:
            outputs.append(causal(module, *own, window, scaling, dropout))
    return torch.cat(outputs, 1), None


def _no_mask(*, attention_mask: Tensor | None = None, local_size: int | None = None, **_: Any) -> Tensor:
    """In the place of a mask, [1, 1, 0, window]; one of the user's is refused by `_attention`."""
    return torch.empty(1, 1, 0, local_size or 0) if attention_mask is None else attention_mask


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)
