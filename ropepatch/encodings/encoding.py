"""What every position encoding is: a frozen set of parameters that builds the module a model runs.

Shapes, here and in the encodings: B sequences, H heads, K key-value heads, Q queries, T keys, q queries of a
block, D dimensions of a head, C those of the residual stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ropepatch.attention.places import Places as Places
from ropepatch.attention.relative import Relative as Relative
from ropepatch.errors import RopepatchError
from ropepatch.scaling.rope import Rope
from ropepatch.settings.parameters import Checked


@dataclass(frozen=True)
class ModelShape:
    """What an encoding must know of a model.

    Args:
        layers: The number of layers.
        heads: H.
        key_value_heads: K.
        head_dim: D.
        hidden_size: C.
        rope: The rope it was built with: D, rope_theta, and its window in tokens.
        initializer_range: The standard deviation of new parameters.
    """

    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    hidden_size: int
    rope: Rope
    initializer_range: float = 0.02

    @property
    def window(self) -> int:
        """L: the tokens the model was built to read."""
        return self.rope.original_max_position_embeddings

    def parameter(self, *size: int) -> nn.Parameter:
        """A new parameter, normally distributed as the model's own are."""
        return nn.Parameter(torch.randn(*size, dtype=torch.float32) * self.initializer_range)


@dataclass(frozen=True)
class Attended:
    """What attention works on in place of the model's own queries, keys and values.

    Args:
        query: [B, H, Q, E]; E may differ from D.
        key: [B, K, T, E].
        value: [B, K, T, F].
        relative: What distances add to scores and values.
        finish: What the whole output [B, H, Q, F] becomes: [B, H, Q, D].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    relative: Relative | None = None
    finish: Callable[[Tensor], Tensor] | None = None


class AbsoluteModule(nn.Module, ABC):
    """Adds a vector to every token before the first layer."""

    @abstractmethod
    def forward(self, positions: Tensor) -> Tensor:
        """The vectors [B, T, C], float32, of tokens at positions [B, T]."""


class AttentionModule(nn.Module, ABC):
    """Changes what attention works on, in every layer."""

    @abstractmethod
    def forward(self, stock: Attended, layer: int, places: Places, scaling: float) -> Attended:
        """What attention works on.

        Args:
            stock: The model's own queries, keys and values, of the cached tokens too; without any position.
            layer: Counted from 0.
            places: The positions of queries and keys.
            scaling: What the product of a query and a key is multiplied by, 1/sqrt(D).
        """


@dataclass(frozen=True, kw_only=True)
class Encoding(Checked, ABC):
    """One published way to tell a transformer the order of its tokens.

    Raises:
        RopepatchError: On parameters outside its domain.
    """

    listed_by = "ropepatch encodings"
    family: ClassVar[str]  # absolute, relative, rotary or none
    formula: ClassVar[str]  # one line, for tables
    paper: ClassVar[str] = "–"
    # Of parameters, beyond their types: the name, the domain in words, and whether an encoding keeps to it.
    domains: ClassVar[tuple[tuple[str, str, Callable[[Any], bool]], ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for parameter, domain, holds in self.domains:
            self._require(holds(self), parameter, domain)

    @abstractmethod
    def build(self, shape: ModelShape) -> AbsoluteModule | AttentionModule:
        """The module for a model of this shape, its new parameters drawn from torch's generator.

        Raises:
            RopepatchError: Where the encoding does not fit the shape.
        """

    def parameters(self) -> dict[str, Any]:
        """The parameters by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _require_even(self, name: str, channels: int, instead: str) -> None:
        if channels % 2:
            raise RopepatchError(f"{self.name} needs an even {name}, got {channels}", hint=f"use {instead}")
