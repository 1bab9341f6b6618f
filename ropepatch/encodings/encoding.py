"""Base class of all position encodings: frozen parameters, and a function that encodes inputs of attention.

Shapes, here and in the encodings: B sequences, H heads, K key-value heads, Q queries, T keys, D dimensions of
a head, E dimensions of encoded queries, C hidden size, q queries of a block, R distances.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ropepatch.scaling.rope import Rope
from ropepatch.settings import Named

if TYPE_CHECKING:
    from ropepatch.model.config import Config


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model that an encoding depends on.

    Args:
        layers: The number of layers.
        heads: H.
        key_value_heads: K.
        head_dim: D.
        hidden_size: C.
        rope: The RoPE of the model: D, rope_theta and the original context length.
        initializer_range: The standard deviation of new parameters.
    """

    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    hidden_size: int
    rope: Rope
    initializer_range: float = 0.02

    @classmethod
    def of(cls, config: Config) -> ModelShape:
        """Return the sizes in a configuration."""
        text: Any = config.text
        return cls(
            layers=text.num_hidden_layers,
            heads=text.num_attention_heads,
            key_value_heads=config.key_value_heads,
            head_dim=config.head_dim,
            hidden_size=text.hidden_size,
            rope=config.rope,
            initializer_range=text.initializer_range,
        )

    @property
    def window(self) -> int:
        """L, the original context length in tokens."""
        return self.rope.original_max_position_embeddings


@dataclass(frozen=True, eq=False)
class Relative:
    """Additions for distances of 0 to R - 1 tokens; larger distances use the last one.

    Args:
        numbers: Added to the scaled scores: [H or 1, R] float32.
        vectors: Their products with a query are added to its scaled scores: [H or 1, E, R] float32.
        values: Added to the values: [E, R] float32.
    """

    numbers: Tensor
    vectors: Tensor | None = None
    values: Tensor | None = None

    @property
    def reach(self) -> int:
        """R."""
        return self.numbers.shape[-1]

    def bias(self, query: Tensor, distances: Tensor) -> Tensor:
        """Return additions [B or 1, H, q, T] to scores: queries [B, H, q, E], distances [B or 1, q, T]."""
        index = distances.clamp(0, self.reach - 1)
        if self.vectors is None:
            # Four times faster than [:, index]
            chosen = self.numbers.index_select(1, index.flatten())
            return chosen.view(-1, *index.shape).transpose(0, 1)
        products = query.to(self.vectors) @ self.vectors + self.numbers[:, None]
        return products.gather(-1, index[:, None].expand(*products.shape[:3], -1))

    def read(self, weights: Tensor, distances: Tensor) -> Tensor | None:
        """Return the addition [B, H, q, E] to the output: weights [B, H, q, T], distances [B or 1, q, T]."""
        if self.values is None:
            return None
        index = distances.clamp(0, self.reach - 1)[:, None].expand_as(weights)
        summed = weights.new_zeros(*weights.shape[:3], self.reach)
        return summed.scatter_add(-1, index, weights) @ self.values.mT


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """Inputs of one layer's attention, including those of cached tokens.

    Args:
        query: [B, H, Q, E]; before encoding they contain no position and E = D.
        key: [B, K, T, E].
        value: [B, K, T, E].
        query_positions: [B or 1, Q], in tokens.
        key_positions: [B or 1, T].
        layer: Counted from 0.
        scaling: The factor of the product of a query and a key, 1/sqrt(D).
        relative: Additions to scores and values per distance.
        finish: A function from the output [B, Q, H, E] to [B, Q, H, D].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_positions: Tensor
    key_positions: Tensor
    layer: int
    scaling: float
    relative: Relative | None = None
    finish: Callable[[Tensor], Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """The device of the layer."""
        return self.query.device

    @property
    def reach(self) -> int:
        """One more than the largest distance from a query to an earlier key."""
        return (
            int((self.query_positions.max() - self.key_positions.min()).clamp(min=0))
            + 1
        )


class Encoding(Named):
    """One published way to encode the positions of tokens.

    A subclass defines `apply`, and the `sizes` of its trained parameters and its `constants` if it has any.

    Raises:
        RopepatchError: On invalid parameters.
    """

    listed_by = "ropepatch encodings"
    family: ClassVar[str]  # absolute, relative, rotary or none

    def check_shape(self, shape: ModelShape) -> None:
        """Raise an error if the encoding does not fit the model."""

    def sizes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """Return the sizes of the trained tensors, by their names in a checkpoint."""
        return {}

    def constants(self, shape: ModelShape) -> dict[str, Tensor]:
        """Return the tensors that are not trained: float32, on the CPU, never saved or cast."""
        return {}

    @abstractmethod
    def apply(self, *inputs: Any, **tensors: Any) -> Any:
        """Encode positions, given `(inputs, shape, **tensors)`.

        The tensors are those of `sizes`, in the model's dtype, and of `constants`, on the inputs' device.
        An absolute encoding takes positions [B, T] and returns the vectors to add to the embeddings of their
        tokens, [B, T, C] float32. All others take and return the `AttentionInputs` of a layer.
        """


class EncodingModule(nn.Module):
    """An encoding as a module, with new parameters drawn from torch's generator.

    Args:
        encoding: The encoding.
        shape: The sizes of the model.

    Raises:
        RopepatchError: If the encoding does not fit the shape.
    """

    def __init__(self, encoding: Encoding, shape: ModelShape) -> None:
        super().__init__()
        encoding.check_shape(shape)
        self.encoding, self.shape = encoding, shape
        self.constants = encoding.constants(shape)
        for name, size in encoding.sizes(shape).items():
            drawn = torch.randn(*size, dtype=torch.float32) * shape.initializer_range
            self.register_parameter(name, nn.Parameter(drawn))

    def forward(self, inputs: Any) -> Any:
        """Encode positions [B, T], or the `AttentionInputs` of a layer."""
        tensors = (*self.constants.items(), *self.named_parameters(recurse=False))
        here = {name: tensor.to(inputs.device) for name, tensor in tensors}
        return self.encoding.apply(inputs, self.shape, **here)
