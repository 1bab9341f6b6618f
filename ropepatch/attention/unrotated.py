"""A rotary module that does not rotate: caches then hold keys that attention turns when they are read."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ropepatch.errors import RopepatchError
from ropepatch.model.rotary import RotarySubstitute


class Unrotated(RotarySubstitute):
    """Stands in the place of the rotary module: cos 1 and sin 0; an attention function does what it did.

    Args:
        stock: The rotary module; not registered.
        config: The configuration of the language model.

    Attributes:
        implementation: The attention that the model was set to.
        wants_weights: Whether that was eager attention, which returns its weights.
    """

    reason: ClassVar[str]  # why a model that has it cannot be given another attention
    attention: ClassVar[str]  # its function's name in transformers' interface
    what: ClassVar[str]  # that another attention would ignore
    when: ClassVar[str]

    def __init__(self, stock: nn.Module, config: PreTrainedConfig) -> None:
        super().__init__(stock)
        self.config = config
        self.implementation = config._attn_implementation
        self.wants_weights = self.implementation == "eager"

    def forward(self, x: Tensor, position_ids: Tensor, *layer_type: str) -> Any:
        """Ones and zeros in the shape of the stock module's cos and sin.

        Raises:
            RopepatchError: If the model was set to another attention.
        """
        if (set_to := self.config._attn_implementation) != self.attention:
            raise RopepatchError(
                f"the attention of this model was set to {set_to!r}, which ignores its {self.what}",
                hint=f"set it before the {self.when}: eager or sdpa",
            )
        return self.cos_sin(x, position_ids, *layer_type)

    def cos_sin(self, x: Tensor, position_ids: Tensor, *layer_type: str) -> tuple[Tensor, Tensor]:
        """cos and sin that turn nothing."""
        cos, _ = self.stock(x, position_ids, *layer_type)
        return torch.ones_like(cos), torch.zeros_like(cos)


class UnrotatedLayers(Unrotated):
    """As `Unrotated`, in a model whose rope may differ by layer type: the layers of one type do not rotate.

    Args:
        stock: The rotary module; not registered.
        config: The configuration of the language model.
        layer_type: The type; None where there is one rope.
    """

    def __init__(self, stock: nn.Module, config: PreTrainedConfig, layer_type: str | None) -> None:
        super().__init__(stock, config)
        self.layer_type = () if layer_type is None else (layer_type,)

    def forward(self, x: Tensor, position_ids: Tensor, *layer_type: str) -> Any:
        """Ones and zeros, but to layers of another type the stock module's cos and sin."""
        if self.layer_type and layer_type != self.layer_type:
            return self.stock(x, position_ids, *layer_type)
        return super().forward(x, position_ids, *layer_type)

    def rotation(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """The model's cos and sin at places [B or 1, T], in the type of x."""
        cos, sin = self.stock(x, places, *self.layer_type)
        return cos, sin

    def __getattr__(self, name: str) -> Any:
        # What a model reads off its rotary module, as layer_types, is there on this one.
        if "stock" in self.__dict__ and name not in self.__dict__["_modules"]:
            return getattr(self.__dict__["stock"], name)
        return super().__getattr__(name)
