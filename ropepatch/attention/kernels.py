"""Attention over pieces by stock kernels, whose parts are merged by their log-sum-exp; linear memory.

A row's softmax over all its keys is the mean of those over parts of them, weighted by exp(lse of the part).
In the backward pass each part is computed again, with the row's whole output and log-sum-exp, which gives
its share of the gradient exactly.

Shapes: S sequences, H heads, Q queries, T keys, D dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ropepatch.attention import tiles
from ropepatch.attention.bands import Piece

Layout = tuple[tuple[Piece, ...], ...]  # the pieces of every band
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
DEVICES = {"cpu"}  # where a stock kernel returns its log-sum-exp and takes it back


def banded(
    turned: list[tuple[Tensor, Tensor]],
    value: Tensor,
    layout: Layout,
    scaling: float,
    tables: tiles.Tables | None = None,
    starts: tuple[int, ...] | None = None,
) -> Tensor:
    """What queries read [S, H, Q, D], by the bands of a layout; zeros where a query sees nothing.

    Args:
        turned: For every band, the queries [S, H, Q, D] and the keys [S, H, T, D] at their places there.
        value: [S, H, T, D].
        layout: The pieces of every band, which share no pair.
        scaling: The factor of the scores.
        tables: Of tiles, what distances add.
        starts: Of every band, the column of the first key that is given; all are, where left out.
    """
    parts = tuple(zip(layout, starts or (0,) * len(layout), strict=True))
    more = tables or (None, None, None)
    output: Tensor = _Banded.apply(value, parts, scaling, *more, *(x for pair in turned for x in pair))  # type: ignore[no-untyped-call]
    return output


class _Banded(torch.autograd.Function):
    """As `banded`: pieces and first column of each band; three tables, then queries and keys in turn."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, layout: Any, scaling: float, *tensors: Any) -> Tensor:
        tables, turned = tensors[:3], tensors[3:]
        wide = torch.promote_types(value.dtype, torch.float32)
        rows = turned[0].shape[2]
        parts = list(_parts(layout, turned))
        read = ((piece, *_read(piece, q, k, value, scaling, tables)) for piece, q, k in parts)
        if all(part[0].last_row - part[0].first_row == rows for part in parts):  # as where there is one
            _, outputs, weights = zip(*read, strict=True)
            each = torch.stack(weights)
            lse = each.logsumexp(0)
            output = (torch.stack(outputs).to(wide) * (each - lse).exp()[..., None]).sum(0)
        else:
            output = torch.zeros_like(turned[0], dtype=wide)
            lse = torch.full(output.shape[:3], -torch.inf, dtype=wide, device=value.device)
            for piece, part, weight in read:
                before, total = lse[:, :, piece.rows], torch.logaddexp(lse[:, :, piece.rows], weight)
                output[:, :, piece.rows].mul_((before - total).exp()[..., None])
                output[:, :, piece.rows].addcmul_(part.to(wide), (weight - total).exp()[..., None])
                lse[:, :, piece.rows] = total
        output = output.to(value.dtype)
        ctx.layout, ctx.scaling = layout, scaling
        ctx.save_for_backward(value, output, lse, *tensors)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, output, lse, *tensors = ctx.saved_tensors
        tables, turned = tuple(tensors[:3]), tensors[3:]
        wide = torch.promote_types(value.dtype, torch.float32)
        grads = [torch.zeros_like(x, dtype=wide) for x in (value, *turned)]
        wanted = ctx.needs_input_grad[3:6]
        to_tables = tuple(
            torch.zeros_like(x) if want else None for x, want in zip(tables, wanted, strict=True)
        )
        pairs = list(_parts(ctx.layout, turned))
        sums = list(_parts(ctx.layout, tuple(grads[1:])))
        for (piece, query, key), (_, to_query, to_key) in zip(pairs, sums, strict=True):
            rows = (grad, output, lse)
            with torch.autocast(value.device.type, enabled=False):
                parts = _differentiated(piece, query, key, value, rows, ctx.scaling, tables, to_tables)
            to_query += parts[0]
            to_key += parts[1]
            grads[0][:, :, piece.keys] += parts[2]
        to_value, *others = (x.to(value.dtype) for x in grads)
        return to_value, None, None, *to_tables, *others


def _parts(layout: Any, turned: Any) -> Any:
    """Every piece with its queries and keys."""
    for (pieces, start), query, key in zip(layout, turned[::2], turned[1::2], strict=True):
        for piece in pieces:
            columns = slice(piece.first_key - start, piece.last_key - start)
            yield piece, query[:, :, piece.rows], key[:, :, columns]


def _read(
    piece: Piece, query: Tensor, key: Tensor, value: Tensor, scaling: float, tables: Any
) -> tuple[Tensor, Tensor]:
    """What the rows of a piece read of its columns, and the log-sum-exp of their scores."""
    value = value[:, :, piece.keys]
    if isinstance(piece, tiles.Tile):
        return tiles.read(piece, query, key, value, scaling, tables)
    tensors = _facing(piece, query, key, value)
    output, lse = _FORWARD(*tensors, 0.0, piece.kind != "all", scale=scaling)
    output, lse = _facing(piece, output, lse)
    return output, lse


def _differentiated(
    piece: Piece,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: tuple[Tensor, ...],
    scaling: float,
    tables: Any,
    to_tables: tuple[Tensor | None, ...],
) -> Sequence[Tensor]:
    """The gradients of the queries, keys and values of a piece; those of the tables are added up."""
    value = value[:, :, piece.keys]
    rows = tuple(x[:, :, piece.rows] for x in rows)
    if isinstance(piece, tiles.Tile):
        return tiles.differentiated(piece, query, key, value, rows, scaling, tables, to_tables)
    grad, output, lse = rows
    grad, query, key, value, output, lse = _facing(piece, grad, query, key, value, output, lse)
    causal = piece.kind != "all"
    found = _BACKWARD(grad, query, key, value, output, lse.contiguous(), 0.0, causal, scale=scaling)
    return _facing(piece, *found)


def _facing(piece: Piece, *tensors: Tensor) -> list[Tensor]:
    """Read backwards, an upper triangle is a lower one, which kernels call causal."""
    return [x.flip(2) for x in tensors] if piece.kind == "upper" else list(tensors)
