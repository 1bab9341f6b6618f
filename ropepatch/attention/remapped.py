"""Apply a position remapping to a loaded model, reversibly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ropepatch.attention.interchange import (
    ATTENTION,
    PositionsInAttention,
    attending_by,
    refusal,
    rotating_layers,
    uninterchangeable,
)
from ropepatch.attention.modeling_position_remapping import RemappedRotation
from ropepatch.attention.remappings import Remapping
from ropepatch.errors import RopepatchError
from ropepatch.model.architectures import SLIDING_LAYERS
from ropepatch.model.checkpoint import InMemory
from ropepatch.model.config import text_config
from ropepatch.model.rotary import (
    Substitution,
    base_model,
    find_substitute,
    own_configs,
    rotating_by,
)
from ropepatch.settings import Length


class RemappedRope(RemappedRotation, PositionsInAttention):
    """Replaces the rotary module and contains the remapping that attention uses.

    Args:
        stock: The original rotary module; not registered.
        config: The configuration of the language model, with `position_remapping`.
        distances: The remapping, with all its parameters.
    """

    state = "this model has a position remapping"
    way_back = "call remove() on its remapping first"

    def __init__(
        self, stock: nn.Module, config: PreTrainedConfig, distances: Remapping
    ) -> None:
        super().__init__(stock, config)
        self.distances = distances
        self.set_remapping(config.position_remapping)

    def extra_repr(self) -> str:
        """Return the text that `print(model)` shows."""
        return f"{self.distances.name}, {self.distances.described()}"


class Remapped(Substitution[RemappedRope]):
    """Handle of a model with a position remapping, and a context manager that removes it.

    Args:
        model: The model.
        path: The path of its rotary module.
        substitute: The module at that path now.
    """

    @property
    def distances(self) -> Remapping:
        """The remapping, with all its parameters."""
        return self._substitute.distances

    def _undo(self) -> None:
        self._substitute.empty_slots()
        del vars(self.model)["save_pretrained"]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Apply a removed remapping within the block, for forward passes without gradients.

        On exit the rotary module and the attention that were in place are restored. The configuration does
        not change.
        """
        rope = self._substitute
        rope.fill_slots()
        try:
            with (
                attending_by(self.model, rope.attention),
                rotating_by(self.model, self.path, rope),
            ):
                yield
        finally:
            rope.empty_slots()


def remap_positions(
    model: nn.Module,
    distances: Remapping,
    *,
    to: Length,
    original: Length | None = None,
) -> Remapped:
    """Keep every distance in a loaded model within those it was trained on, reversibly.

    Layers without RoPE, and layers with a sliding window within the original context length, do not change.
    Meanwhile the configuration contains `position_remapping`, and `save_pretrained` raises an error, since
    transformers would load the saved model without the remapping.
    """
    base = base_model(model)
    ours = *ATTENTION, "max_position_embeddings", "position_remapping"
    with torch.device("cpu"), own_configs(base, *ours) as configs:
        source = InMemory.of(base, original)
        config: Any = text_config(base.config)
        site, window = source.config.site, source.config.window
        check_mappable(base, window)
        target = source.config.target(to, source.name)
        fitted = distances.fitted(window, target)
        layers = rotating_layers(base, site)
        rotating = [module.layer_idx for module, rotates in layers.items() if rotates]
        _check_far(base, window, rotating)
        config.max_position_embeddings = target
        config.position_remapping = {
            "name": fitted.name,
            "parameters": fitted.parameters(),
            "window": window,
            "target": target,
            "layer_type": site.layer_type,
        }
        rope = RemappedRope(base.get_submodule(site.path), config, fitted)
        rope.put(base, site.path, layers, configs)
        vars(base)["save_pretrained"] = partial(_refuse_saving, fitted.name)
        return Remapped(base, site.path, rope)


def check_mappable(model: PreTrainedModel, window: int) -> None:
    """Raise an error if the classes or configuration of a model rule out a remapping; needs no weights."""
    if reason := uninterchangeable(model):
        raise refusal(model, reason)
    _check_far(model, window, range(text_config(model.config).num_hidden_layers))


def _check_far(model: PreTrainedModel, window: int, layers: Iterable[int]) -> None:
    """Raise an error if no layer attends farther than the original context length."""
    config: Any = text_config(model.config)
    sees = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not sees or sees > window:
        return
    if all(kinds is None or kinds[layer] == SLIDING_LAYERS for layer in layers):
        raise refusal(
            model,
            f"its layers with RoPE attend to only {sees} of its {window} tokens",
        )


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
