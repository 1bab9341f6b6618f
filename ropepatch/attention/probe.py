"""Detect by running a model which layers rotate their queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ropepatch.attention.interchange import OTHER_SCORES, OWN_MASK, attending_by
from ropepatch.attention.modeling_position_remapping import rotate
from ropepatch.errors import RopepatchError
from ropepatch.model.config import RotarySite
from ropepatch.model.head import check_finite, evaluating, shadowed

PROBE_ATTENTION = "ropepatch_probe"
TOKENS = 4  # in the probed sequence


class _Call(NamedTuple):
    """The arguments of one call of an attention function."""

    module: nn.Module
    query: Tensor
    key: Tensor
    mask: Tensor | None
    others: dict[str, Any]


_CALLS: ContextVar[list[_Call]] = ContextVar("calls")


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Record a call and return zeros, so that later layers do not depend on this one's rotation."""
    _CALLS.get().append(_Call(module, query, key, attention_mask, others))
    batch, heads, queries, _ = query.shape
    return value.new_zeros(batch, queries, heads, value.shape[-1]), None


AttentionInterface.register(PROBE_ATTENTION, _record)
AttentionMaskInterface.register(PROBE_ATTENTION, lambda **_: None)


def rotating_layers(
    base: PreTrainedModel, site: RotarySite, refuse: Callable[[str], RopepatchError]
) -> dict[nn.Module, bool]:
    """Return every attention module of a model, and whether it rotates its queries and keys.

    The model runs on a few tokens with and without its rotation.

    Args:
        base: The model, its weights in memory.
        site: Its rotary module.
        refuse: Returns the error for a reason why attention is not only rotation and a causal softmax.
    """
    if any(parameter.is_meta for parameter in base.parameters()):
        raise refuse("its weights are on the meta device")
    stock = base.get_submodule(site.path)
    rotation = stock.forward
    tables: list[Tensor] = []

    def unrotated(x: Tensor, position_ids: Tensor, *layer_type: str) -> Any:
        cos, sin = rotation(x, position_ids, *layer_type)
        if layer_type != (() if site.layer_type is None else (site.layer_type,)):
            return cos, sin
        tables[:] = cos, sin
        return torch.ones_like(cos), torch.zeros_like(sin)

    try:
        with evaluating(base), attending_by(base, PROBE_ATTENTION):
            with_rotation = _calls(base)
            with shadowed(stock, unrotated):
                without = _calls(base)
    except RopepatchError:
        raise
    except Exception as error:
        raise refuse(
            f"it does not run with attention of another kind ({type(error).__name__})"
        ) from error
    layers = {}
    for rotated, plain in zip(with_rotation, without, strict=True):
        if reason := _more_than_attention(plain):
            raise refuse(reason)
        rotates = _rotates(rotated, plain, tables)
        if rotates is None:
            check_finite(base, Path(str(base.name_or_path or type(base).__name__)).name)
            name = type(plain.module).__name__
            raise refuse(
                f"its {name} does not rotate queries and keys last, by apply_rotary_pos_emb"
            )
        layers[plain.module] = rotates
    if not any(layers.values()):
        raise refuse("its attention is no interchangeable function, or rotates nothing")
    return layers


@torch.no_grad()
def _calls(base: PreTrainedModel) -> list[_Call]:
    token = _CALLS.set([])
    try:
        base.base_model(
            input_ids=torch.arange(TOKENS, device=base.device)[None], use_cache=False
        )
        return _CALLS.get()
    finally:
        _CALLS.reset(token)


def _more_than_attention(call: _Call) -> str | None:
    for argument in OTHER_SCORES:
        if call.others.get(argument) is not None:
            return f"it changes its scores itself ({argument})"
    if call.mask is not None:  # none was passed in
        return OWN_MASK
    if call.others.get("position_ids") is None:
        return f"its {type(call.module).__name__} is not given the positions of its queries (position_ids)"
    return None


def _rotates(rotated: _Call, plain: _Call, tables: list[Tensor]) -> bool | None:
    """Return whether the rotation of `tables`, cos and sin, was applied; None for any other difference."""
    pairs = [(rotated.query, plain.query), (rotated.key, plain.key)]
    if tables:
        try:
            own = [rotate(plain.module, x, *tables) for _, x in pairs]
        except (AttributeError, TypeError, ValueError, RuntimeError):
            own = []
        if own and all(_alike(x, y) for x, (y, _) in zip(own, pairs, strict=True)):
            return True
    return False if all(_alike(x, y) for x, y in pairs) else None


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    tolerance = 1e-4 if one.dtype in (torch.float32, torch.float64) else 2e-2
    scale = float(other.abs().max())
    return bool(
        (one.float() - other.float()).abs().max() <= tolerance * max(scale, 1e-6)
    )
