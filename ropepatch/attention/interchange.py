"""Replace the attention function of a model, if its architecture allows it.

Running a model on a few tokens shows which layers rotate their queries and keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from ropepatch.attention.modeling_position_remapping import (
    POSITIONS_SLOT as POSITIONS_SLOT,
)
from ropepatch.attention.modeling_position_remapping import Unrotated, rotate
from ropepatch.errors import RopepatchError
from ropepatch.model.architectures import GLOBAL_LAYERS, SLIDING_LAYERS
from ropepatch.model.config import RotarySite, text_config
from ropepatch.model.head import check_finite, evaluating, shadowed
from ropepatch.model.rotary import (
    OwnConfigs,
    RotarySubstitute,
    find_substitute,
)

# Attribute of a configuration with the name of its attention
ATTENTION = ("_attn_implementation_internal",)
# Arguments with which a model changes its scores
OTHER_SCORES = ("softcap", "s_aux", "position_bias")


class PositionsInAttention(Unrotated, RotarySubstitute):
    """Replaces the rotary module by one that returns cos 1 and sin 0; attention encodes positions instead.

    Args:
        stock: The original rotary module; not registered.
        config: The configuration of the language model.
    """

    def __init__(self, stock: nn.Module, config: PreTrainedConfig) -> None:
        super().__init__(stock)
        self.config = config

    def put(
        self,
        model: PreTrainedModel,
        path: str,
        layers: Mapping[nn.Module, bool],
        configs: OwnConfigs,
    ) -> None:
        """Replace the rotary module of a model, and the attention that gives positions to it.

        Args:
            model: The model.
            path: The path of its rotary module.
            layers: Its attention modules, and whether each gets positions.
            configs: The model's own configurations.
        """
        self.configs, self.layers = configs, layers
        self.train(self.stock.training)
        model.set_submodule(path, self)
        self.fill_slots()
        set_attention(model, self.attention)

    def fill_slots(self) -> None:
        """Make attention find these positions."""
        for module, has_positions in self.layers.items():
            module.__dict__[POSITIONS_SLOT] = self if has_positions else None

    def empty_slots(self) -> None:
        """Undo `fill_slots`."""
        for module in self.layers:
            del module.__dict__[POSITIONS_SLOT]


def refusal(model: PreTrainedModel, reason: str) -> RopepatchError:
    """Return the error for a model whose attention cannot be replaced."""
    return RopepatchError(
        f"the attention of {text_config(model.config).model_type} cannot be replaced: {reason}",
        hint="use a LLaMA-like model, or a method of frequencies: `ropepatch methods` lists them",
    )


def uninterchangeable(model: PreTrainedModel) -> str | None:
    """Return why a model's attention cannot be replaced by a function like sdpa's; None if it can."""
    config: Any = text_config(model.config)
    if within := find_substitute(model, PositionsInAttention):
        return within[1].state
    # Those of these two types differ only in their mask
    types = set(getattr(config, "layer_types", None) or ())
    others = sorted(types - {GLOBAL_LAYERS, SLIDING_LAYERS})
    causal = [getattr(part, "is_causal", True) for part in (config, *model.modules())]
    reasons = {
        f"it has layers of the type {', '.join(others)}": others,
        "it carries a state from token to token": getattr(model, "_is_stateful", False),
        "it does not support sdpa": not model._supports_sdpa,
        "its attention is no interchangeable function": not model._can_set_attn_implementation(),
        "some of its attention is not causal": not all(causal),
        "it caps its attention scores": getattr(config, "attn_logit_softcapping", None),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def set_attention(base: nn.Module, name: str) -> None:
    """Set the attention of all parts of a model, without the checks of transformers."""
    for module in base.modules():
        if isinstance(module, PreTrainedModel):
            # The setter also changes submodels
            module.config._attn_implementation_internal = name


@contextmanager
def attending_by(base: nn.Module, name: str) -> Iterator[None]:
    """Use another attention in all parts of a model within the block."""
    before = [
        (part.config, part.config._attn_implementation)
        for part in base.modules()
        if isinstance(part, PreTrainedModel)
    ]
    try:
        set_attention(base, name)
        yield
    finally:
        for config, value in before:
            config._attn_implementation_internal = value


# Which layers rotate

PROBE_ATTENTION = "ropepatch_probe"


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


def rotating_layers(base: PreTrainedModel, site: RotarySite) -> dict[Any, bool]:
    """Return every attention module of a model, and whether it rotates its queries and keys.

    The model runs on a few tokens with and without its rotation.

    Args:
        base: The model, its weights in memory.
        site: Its rotary module.

    Raises:
        RopepatchError: If attention is not only rotation and a causal softmax.
    """
    if any(parameter.is_meta for parameter in base.parameters()):
        raise refusal(base, "its weights are on the meta device")
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
    except Exception as error:  # a model's own code may raise anything
        kind = type(error).__name__
        raise refusal(
            base, f"it does not run with attention of another kind ({kind})"
        ) from error
    layers = {}
    for rotated, plain in zip(with_rotation, without, strict=True):
        if reason := _more_than_attention(plain):
            raise refusal(base, reason)
        rotates = _rotates(rotated, plain, tables)
        if rotates is None:
            check_finite(base, type(base).__name__)
            name = type(plain.module).__name__
            raise refusal(
                base,
                f"its {name} does not rotate queries and keys last, by apply_rotary_pos_emb",
            )
        layers[plain.module] = rotates
    if not any(layers.values()):
        raise refusal(
            base, "its attention is no interchangeable function, or rotates nothing"
        )
    return layers


@torch.no_grad()
def _calls(base: PreTrainedModel) -> list[_Call]:
    token = _CALLS.set([])
    try:
        base.base_model(
            input_ids=torch.arange(4, device=base.device)[None], use_cache=False
        )
        return _CALLS.get()
    finally:
        _CALLS.reset(token)


def _more_than_attention(call: _Call) -> str | None:
    for argument in OTHER_SCORES:
        if call.others.get(argument) is not None:
            return f"it changes its scores itself ({argument})"
    if call.mask is not None:  # none was passed in
        return "its layers make masks of their own"
    if call.others.get("position_ids") is None:
        return f"its {type(call.module).__name__} is not given the positions of its queries (position_ids)"
    return None


def _rotates(rotated: _Call, plain: _Call, tables: list[Tensor]) -> bool | None:
    """Return whether the rotation of `tables`, cos and sin, was applied; None for any other difference."""
    pairs = [(rotated.query, plain.query), (rotated.key, plain.key)]
    try:
        own = [rotate(plain.module, x, *tables) for _, x in pairs]
    except (AttributeError, TypeError, ValueError, RuntimeError):
        own = []
    if own and all(_alike(x, y) for x, (y, _) in zip(own, pairs, strict=True)):
        return True
    return False if all(_alike(x, y) for x, y in pairs) else None


def _alike(one: Tensor, other: Tensor) -> bool:
    tolerance = 1e-4 if one.dtype in (torch.float32, torch.float64) else 2e-2
    scale = max(float(other.abs().max()), 1e-6)
    return one.shape == other.shape and bool(
        (one.float() - other.float()).abs().max() <= tolerance * scale
    )
