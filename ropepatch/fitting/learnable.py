"""A rotary module through which gradients reach the frequencies."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ropepatch.fitting.vectors import Vector
from ropepatch.model.rotary import RotarySite, RotarySubstitute, scaled_twin
from ropepatch.scaling.rope import Frequencies, Rope


class LearnableRope(RotarySubstitute):
    """The stock forward, without the `no_grad` around it, over frequencies that are tensors of a graph.

    The stock class does the work in its own layout and precision, as in
    `ropepatch.extension.patching.ScaledRope`; its `inv_freq` and `attention_scaling` are computed
    from `vector` at every call.

    Args:
        stock: The model's rotary module.
        site: Where it stands.
        rope: Its rope, whose frequencies the divisors divide.
    """

    inv_freq: Tensor

    def __init__(self, stock: nn.Module, site: RotarySite, rope: Rope) -> None:
        super().__init__(stock)
        self.site = site
        self.carried_attention_factor = rope.carried_attention_factor
        self.__dict__["inv_freq"] = rope.inv_freq()
        self.vector = Vector.unscaled(rope)
        unwrapped: Callable[..., Any] = inspect.unwrap(site.rotary_class.forward)
        self.__dict__["compute"] = unwrapped

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """cos and sin (or what the stock class returns instead) for x [B, T, H] at position_ids [B, T]."""
        inv_freq = self.inv_freq.to(x.device) * torch.exp(-self.vector.log_divisors.to(x.device))
        factor: Any = self.carried_attention_factor * torch.exp(self.vector.log_attention.to(x.device))
        table = scaled_twin(self.stock, self.site, Frequencies(inv_freq, factor))
        return self.__dict__["compute"](table, x, position_ids, *args, **kwargs)
