"""Replace the attention function of a model, if its architecture allows it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ropepatch.attention.modeling_position_remapping import (
    POSITIONS_SLOT as POSITIONS_SLOT,
)
from ropepatch.errors import RopepatchError
from ropepatch.model.architectures import GLOBAL_LAYERS, SLIDING_LAYERS
from ropepatch.model.config import text_config
from ropepatch.model.rotary import (
    OwnConfigs,
    RotarySubstitute,
    Substitution,
    find_substitute,
)

# Layer types that differ only in their mask
_MASKED_LAYERS = {GLOBAL_LAYERS, SLIDING_LAYERS}
OWN_MASK = "its layers make masks of their own"
# Attribute of a configuration with the name of its attention
ATTENTION = ("_attn_implementation_internal",)
# Arguments with which a model changes its scores
OTHER_SCORES = ("softcap", "s_aux", "position_bias")

logger = logging.getLogger("ropepatch")


class PositionsInAttention(RotarySubstitute):
    """Replaces the rotary module by one that returns cos 1 and sin 0; attention encodes positions instead.

    Args:
        stock: The original rotary module; not registered.
        config: The configuration of the language model.

    Attributes:
        wants_weights: Whether the model was set to eager attention, which returns its weights.
    """

    reason: ClassVar[str]  # why the attention of such a model cannot be replaced
    attention: ClassVar[str]  # name of the attention function in transformers
    what: ClassVar[str]  # what another attention would ignore
    when: ClassVar[str]

    def __init__(self, stock: nn.Module, config: PreTrainedConfig) -> None:
        super().__init__(stock)
        self.config = config
        self.wants_weights = config._attn_implementation == "eager"

    def check_attention(self) -> None:
        """Raise an error if the model has been set to another attention."""
        if (set_to := self.config._attn_implementation) != self.attention:
            raise RopepatchError(
                f"the attention of this model was set to {set_to!r}, which ignores its {self.what}",
                hint=f"set it before the {self.when}: eager or sdpa",
            )

    def forward(self, x: Tensor, position_ids: Tensor, *layer_type: str) -> Any:
        """Return ones and zeros in the shape of the original module's cos and sin."""
        self.check_attention()
        cos, _ = self.stock(x, position_ids, *layer_type)
        return torch.ones_like(cos), torch.zeros_like(cos)

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
        self.configs = configs
        self.train(self.stock.training)
        model.set_submodule(path, self)
        for module, has_positions in layers.items():
            module.__dict__[POSITIONS_SLOT] = self if has_positions else None
        set_attention(model, self.attention)
        name = type(model).__name__
        logger.info("%s: %s put in: %s", name, self.what, self.extra_repr())


Positions = TypeVar("Positions", bound=PositionsInAttention)


class AttentionSubstitution(Substitution[Positions]):
    """The handle of a model whose attention encodes positions, and a context manager that removes them.

    Args:
        model: The model.
        path: The path of its rotary module.
        substitute: The module at that path now.
    """

    slots: Mapping[nn.Module, Any] = {}  # of attention modules, after `remove()`

    @property
    def positions(self) -> Positions:
        """What encodes positions now.

        Raises:
            RopepatchError: If it has been removed.
        """
        if not self.in_force:
            raise RopepatchError(
                f"this {self._substitute.what} has been taken out",
                hint=f"repeat the {self._substitute.when}",
            )
        return self._substitute

    def _undo(self) -> None:
        self.slots = {
            part: part.__dict__.pop(POSITIONS_SLOT)
            for part in self.model.modules()
            if POSITIONS_SLOT in part.__dict__
        }
        logger.info("%s: %s removed", type(self.model).__name__, self._substitute.what)


def uninterchangeable(model: PreTrainedModel) -> str | None:
    """Return why a model's attention cannot be replaced by a function like sdpa's; None if it can."""
    config: Any = text_config(model.config)
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _MASKED_LAYERS)
    within = find_substitute(model, PositionsInAttention)
    causal = [getattr(part, "is_causal", True) for part in (config, *model.modules())]
    packed = str(model.config._attn_implementation).startswith("ropepatch_")
    reasons = (
        {within[1].reason: True}
        if within
        else {"it is within packed attention": packed}
    ) | {
        f"it has layers of the type {', '.join(others)}": others,
        "it carries a state from token to token": getattr(model, "_is_stateful", False),
        "it does not support sdpa": not model._supports_sdpa,
        "its attention is no interchangeable function": not model._can_set_attn_implementation(),
        "some of its attention is not causal": not all(causal),
        "it caps its attention scores": getattr(config, "attn_logit_softcapping", None),
        OWN_MASK: any(
            hasattr(module, "prepare_dynamic_mask") for module in model.modules()
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def set_attention(base: nn.Module, name: str | None) -> None:
    """Set the attention of all parts of a model, without the checks of transformers."""
    for module in base.modules():
        if isinstance(module, PreTrainedModel):
            # The setter also changes submodels
            module.config._attn_implementation_internal = name


@contextmanager
def attending_by(base: nn.Module, name: str) -> Iterator[None]:
    """Use another attention in all parts of a model within the block."""
    parts: list[Any] = [
        module for module in base.modules() if isinstance(module, PreTrainedModel)
    ]
    before = [(part.config, part.config._attn_implementation) for part in parts]
    try:
        set_attention(base, name)
        yield
    finally:
        for part, (config, value) in zip(parts, before, strict=True):
            # Two if the model was patched within the block
            for one in (
                config,
                part.config,
            ):
                one._attn_implementation_internal = value
