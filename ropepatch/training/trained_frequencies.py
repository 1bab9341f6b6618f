"""Frequencies that are trained with the weights, and the plan of what they have become.

Shapes: P rotary pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ropepatch.errors import RopepatchError
from ropepatch.extension.planning import Plan, plan_scaling
from ropepatch.files import read_json, write_json
from ropepatch.fitting.loss import LearnableRope
from ropepatch.fitting.vectors import Vector
from ropepatch.model.rotary import base_model, float32_on_cpu
from ropepatch.scaling.rope import Frequencies, Rope, divisors
from ropepatch.scaling.searched import CustomDivisors

FILE = "frequencies.json"  # in the folder of a checkpoint


class TrainedRope(LearnableRope):
    """A rotary module whose vector is trained: logarithms relative to the frequencies of a plan, 0 at first.

    They are parameters, so that a data-parallel wrapper sums their gradients; float32 whatever the model is
    cast to; and in no state dict, for stock transformers has no such weights: `save` and `restore` keep them.
    """

    def __init__(self, stock: nn.Module, plan: Plan, learning_rate: float) -> None:
        super().__init__(stock, plan.site, plan.rope)
        start = plan.frequencies()
        self.__dict__["inv_freq"] = start.inv_freq
        self.carried_attention_factor = start.attention_factor
        self.log_divisors = nn.Parameter(torch.zeros(plan.rope.num_pairs, dtype=torch.float32))
        self.log_attention = nn.Parameter(torch.zeros((), dtype=torch.float32))
        self.vector = Vector(self.log_divisors, self.log_attention)
        self.learning_rate = learning_rate

    def group(self) -> dict[str, Any]:
        """The optimiser's group: a rate of its own, and no decay, which would draw it back to the start."""
        return {"params": [*self.parameters()], "lr": self.learning_rate, "weight_decay": 0.0}

    def save(self, folder: Path) -> None:
        """Write the vector beside the weights of a checkpoint, to the bit."""
        content = {"log_divisors": self.log_divisors.tolist(), "log_attention": self.log_attention.item()}
        write_json(folder / FILE, content, indent=None)

    def restore(self, folder: Path) -> None:
        """Go on from the vector of a checkpoint."""
        vector = read_vector(folder)
        with torch.no_grad():
            self.log_divisors.copy_(vector.log_divisors)
            self.log_attention.copy_(vector.log_attention)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return super()._apply(lambda tensor: tensor.to(fn(torch.zeros_like(tensor)).device), recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Nothing."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Nothing."""


@float32_on_cpu()
def train_frequencies(model: nn.Module, plan: Plan, learning_rate: float) -> TrainedRope:
    """Replace the rotary module of a patched model, possibly inside a PEFT model, by a `TrainedRope`."""
    base = base_model(model)
    scaled: Any = base.get_submodule(plan.site.path)
    rope = TrainedRope(scaled.stock, plan, learning_rate)
    layer = () if plan.site.layer_type is None else (plan.site.layer_type,)
    tables = rope(torch.zeros(1, 1, 8, dtype=torch.float32), torch.ones(1, 1, dtype=torch.long), *layer)
    if not all(part.requires_grad for part in (tables if isinstance(tables, tuple) else (tables,))):
        raise RopepatchError(
            f"no gradient reaches the frequencies of {plan.model_type}",
            hint="leave frequencies out of the recipe",
        )
    base.set_submodule(plan.site.path, rope)
    return rope


def read_vector(folder: Path) -> Vector:
    """What `TrainedRope.save` wrote."""
    content = read_json(folder / FILE)
    parts = (content["log_divisors"], content["log_attention"])
    return Vector(*(torch.tensor(part, dtype=torch.float32) for part in parts))


@float32_on_cpu()
def frozen(plan: Plan, folder: Path) -> Plan:
    """The plan of what `TrainedRope.save` wrote, for a training that started from another."""
    vector, start = read_vector(folder), plan.frequencies()
    inv_freq = start.inv_freq * torch.exp(-vector.log_divisors)
    factor = start.attention_factor * torch.exp(vector.log_attention).item()
    scaling = as_divisors(Frequencies(inv_freq, factor), plan.rope, plan.scaling.factor)
    scaling = scaling.model_copy(update={"queries": plan.queries})
    return plan_scaling(plan.survey, plan.model, plan.revision, scaling, plan.target)


def as_divisors(frequencies: Frequencies, rope: Rope, factor: float) -> CustomDivisors:
    """Frequencies that a rope is scaled to by a factor s, as `custom`, in digits that float32 tells apart."""
    ratios = divisors(rope.inv_freq(), frequencies.inv_freq)
    a = frequencies.attention_factor / rope.carried_attention_factor
    return CustomDivisors.rounded(ratios, a, factor=factor, digits=9)
