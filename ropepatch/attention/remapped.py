"""Apply a position remapping to a loaded model, reversibly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from ropepatch.attention import modeling_position_remapping as modeling
from ropepatch.attention.interchange import (
    ATTENTION,
    POSITIONS_SLOT,
    AttentionSubstitution,
    PositionsInAttention,
    set_attention,
    uninterchangeable,
)
from ropepatch.attention.probe import rotating_layers
from ropepatch.attention.remappings import Remapping, make_remapping
from ropepatch.errors import RopepatchError
from ropepatch.model.architectures import SLIDING_LAYERS
from ropepatch.model.checkpoint import InMemory
from ropepatch.model.config import text_config
from ropepatch.model.rotary import (
    OwnConfigs,
    base_model,
    find_substitute,
    own_configs,
    rotating_by,
)
from ropepatch.settings import Length, shown

# Registered in transformers for the whole process
REMAPPED_ATTENTION = "ropepatch_remapping"


class RemappedRope(PositionsInAttention, modeling.RemappedRotation):
    """Replaces the rotary module and contains the remapping that attention uses.

    Args:
        stock: The original rotary module; not registered.
        config: The configuration of the language model.
        distances: The remapping, with all its parameters.
        window: L, the original context length in tokens.
        layer_type: The layer type that is remapped, if RoPE differs by layer type.
    """

    state = "this model has a position remapping"
    way_back = "call remove() on its remapping first"
    reason = "it has a position remapping"
    attention, what, when = REMAPPED_ATTENTION, "position remapping", "remapping"

    def __init__(
        self,
        stock: nn.Module,
        config: PreTrainedConfig,
        distances: Remapping,
        window: int,
        layer_type: str | None,
    ) -> None:
        super().__init__(stock, config)
        self.distances = distances
        described = {
            "name": distances.name,
            "parameters": distances.parameters(),
            "window": window,
            "layer_type": layer_type,
        }
        self.set_remapping(config, described)

    def forward(self, x: Tensor, position_ids: Tensor, *layer_type: str) -> Any:
        """Return ones and zeros; the original cos and sin for layer types that are not remapped."""
        self.check_attention()
        return modeling.RemappedRotation.forward(self, x, position_ids, *layer_type)

    def extra_repr(self) -> str:
        """Return the text that `print(model)` shows."""
        return f"{self.distances.name}, {self.distances.described()}"


def _attend(
    module: nn.Module, *tensors: Any, **others: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with the remapping stored in the module."""
    if POSITIONS_SLOT not in module.__dict__:
        raise RopepatchError(
            "this attention needs a position remapping, and there is none",
            hint="call ropepatch.patch with a remapping first",
        )
    return modeling.attend(module, *tensors, **others)


AttentionInterface.register(REMAPPED_ATTENTION, _attend)
AttentionMaskInterface.register(REMAPPED_ATTENTION, modeling.short_mask)


class Remapped(AttentionSubstitution[RemappedRope]):
    """Handle of a model with a position remapping, and a context manager that removes it.

    Args:
        model: The model.
        path: The path of its rotary module.
        substitute: The module at that path now.
    """

    @property
    def distances(self) -> Remapping:
        """The remapping in use, with all its parameters.

        Raises:
            RopepatchError: If it has been removed.
        """
        return self.positions.distances

    def _undo(self) -> None:
        super()._undo()
        refused = vars(self.model).pop("save_pretrained")
        if refused.keywords["wrapped"] is not None:
            vars(self.model)["save_pretrained"] = refused.keywords["wrapped"]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Apply a removed remapping within the block, for forward passes without gradients.

        On exit the rotary module and the attention that were in place are restored. The configuration does
        not change.
        """
        rope = self._substitute
        configs = OwnConfigs(self.model, ATTENTION)
        for part, slot in self.slots.items():
            part.__dict__[POSITIONS_SLOT] = slot
        try:
            set_attention(self.model, REMAPPED_ATTENTION)
            rope.config = text_config(self.model.config)
            with rotating_by(self.model, self.path, rope):
                yield
        finally:
            for part in self.slots:
                part.__dict__.pop(POSITIONS_SLOT, None)
            configs.put_back(self.model)


def remap_positions(
    model: nn.Module,
    distances: str | Remapping,
    *,
    to: Length,
    original: Length | None = None,
    **parameters: Any,
) -> Remapped:
    """Keep every distance in a loaded model within those it was trained on, reversibly.

    Layers without RoPE, and layers with a sliding window within the original context length, do not change.
    Meanwhile the configuration contains `position_remapping`, and `save_pretrained` raises an error, since
    transformers would load the saved model without the remapping.
    """
    if isinstance(distances, str):
        distances = make_remapping(distances, **parameters)
    elif not isinstance(distances, Remapping) or parameters:
        raise RopepatchError(
            f"remap_positions takes a name with its parameters, or a remapping, got {distances!r}",
            hint="remap_positions(model, 'self-extend', to=8192)",
        )
    base = base_model(model)
    ours = *ATTENTION, "max_position_embeddings", "position_remapping"
    with torch.device("cpu"), own_configs(base, *ours) as configs:
        return _mapped(base, distances, to, original, configs)


def _mapped(
    base: PreTrainedModel,
    distances: Remapping,
    to: Length,
    original: Length | None,
    configs: OwnConfigs,
) -> Remapped:
    """Remap a model that shares its configurations with no other."""
    source = InMemory.of(base, original)
    config: Any = text_config(base.config)
    site, window = source.config.site, source.config.window
    check_mappable(base, window)
    target = source.config.target(to, source.name)
    fitted = distances.fitted(window, target)
    layers = rotating_layers(base, site, partial(_refusal, config.model_type))
    rotating = [module for module, rotates in layers.items() if rotates]
    if not any(_sees_far(module, config, window) for module in rotating):
        raise _refusal(config.model_type, _narrow(config.sliding_window, window))
    stock = base.get_submodule(site.path)
    rope = RemappedRope(stock, config, fitted, window, site.layer_type)
    rope.put(base, site.path, layers, configs)
    config.max_position_embeddings = target
    described = {"name": fitted.name, "target": target}
    config.position_remapping = described | fitted.parameters()
    wrapped = vars(base).get("save_pretrained")
    vars(base)["save_pretrained"] = partial(
        _refuse_saving, fitted.name, wrapped=wrapped
    )
    return Remapped(base, site.path, rope)


def check_mappable(model: PreTrainedModel, window: int) -> None:
    """Raise an error if the classes or configuration of a model rule out a remapping; needs no weights."""
    config: Any = text_config(model.config)
    reason = uninterchangeable(model)
    sees = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ()
    if not isinstance(sees, int | None):
        reason = f"its sliding_window must be a whole number, got {shown(sees)}"
    elif not reason and sees and sees <= window and set(kinds) <= {SLIDING_LAYERS}:
        reason = _narrow(sees, window)
    if reason:
        raise _refusal(config.model_type, reason)


def _narrow(sees: int, window: int) -> str:
    return f"its layers with RoPE attend to only {sees} of its {window} tokens"


def mapped(model: nn.Module) -> Remapped | None:
    """Return the remapping of a model, also of a copy of a remapped model, or None."""
    base = base_model(model)
    place = find_substitute(base, RemappedRope)
    return None if place is None else Remapped(base, *place)


def _refuse_saving(name: str, *given: Any, **options: Any) -> NoReturn:
    """Replaces a model's `save_pretrained`."""
    raise RopepatchError(
        f"a model with a position remapping ({name}) cannot be saved: transformers would ignore it",
        hint="remove the remapping first; an adapter can be saved by itself",
    )


def _refusal(model_type: str, reason: str) -> RopepatchError:
    return RopepatchError(
        f"{model_type} cannot have a position remapping: {reason}",
        hint="extend it by a method of frequencies: `ropepatch methods` lists them",
    )


def _sees_far(module: Any, config: Any, window: int) -> bool:
    """Return whether a layer attends farther than the original context length."""
    sees = getattr(config, "sliding_window", None)
    if sees is None or sees > window:
        return True
    kinds = getattr(config, "layer_types", None)
    return kinds is not None and kinds[module.layer_idx] != SLIDING_LAYERS
