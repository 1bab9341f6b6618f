"""Absolute positions: a vector for every position, added to the token's embedding.

Vaswani et al. multiply the embedding by sqrt(C) and add the table. A checkpoint's layers expect unscaled
embeddings, so here the table is divided by sqrt(C) instead, which gives the same ratio.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from ropepatch.encodings.encoding import Encoding, ModelShape
from ropepatch.errors import RopepatchError
from ropepatch.settings import AboveOne, Count


def sinusoid(positions: Tensor, width: int, base: float = 10000.0) -> Tensor:
    """Return sin(p / b^(2i/C)) in channel 2i and its cos in 2i + 1, [..., C] float32 (Vaswani et al. 2017).

    Args:
        positions: Positions [...], in tokens.
        width: C, the number of channels; even.
        base: b, the base of the frequencies.
    """
    inv_freq = 1.0 / base ** (
        torch.arange(0, width, 2, device=positions.device).float() / width
    )
    angles = positions.float()[..., None] * inv_freq
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)


class TableEncoding(Encoding):
    """A fixed function from a position to a vector."""

    family = "absolute"

    @abstractmethod
    def vectors(self, positions: Tensor, width: int) -> Tensor:
        """Return the vectors [..., C] float32 of positions [...], before the division by sqrt(C)."""

    def apply(self, positions: Tensor, shape: ModelShape) -> Tensor:
        return self.vectors(positions, shape.hidden_size) / math.sqrt(shape.hidden_size)


class Integer(TableEncoding):
    """The position itself in every channel; it soon exceeds the embedding."""

    name = "integer"
    formula = "x + p/√C"

    def vectors(self, positions: Tensor, width: int) -> Tensor:
        return positions.float()[..., None].expand(*positions.shape, width)


class Normalised(Integer):
    """The position divided by the text's length, so a position's vector depends on the text.

    Args:
        length: N, the length of the text in tokens; fixed while swapped, since cached keys depend on it.
    """

    name = "normalised"
    formula = "x + p/(N−1)/√C"

    length: Annotated[int, Field(ge=2)]

    def vectors(self, positions: Tensor, width: int) -> Tensor:
        return super().vectors(positions, width) / (self.length - 1)


class Binary(TableEncoding):
    """The binary digits of the position."""

    name = "binary"
    formula = "x + bit_i(p)/√C in channel i"

    def vectors(self, positions: Tensor, width: int) -> Tensor:
        """Return bit i of p in channel i, 0 or 1; channels from 31 on are 0."""
        bits = torch.arange(width, device=positions.device).clamp(max=31)
        return ((positions.long()[..., None] >> bits) & 1).float()


class Sinusoidal(TableEncoding):
    """Sines and cosines with geometrically decreasing frequencies.

    Args:
        base: b; positions are divided by b^(2i/C).
    """

    name = "sinusoidal"
    formula = "x + (sin, cos)(p/b^(2i/C))/√C"
    paper = "arXiv:1706.03762"

    base: AboveOne = 10000.0

    def vectors(self, positions: Tensor, width: int) -> Tensor:
        return sinusoid(positions, width, self.base)


class LearnedPositions(Encoding):
    """One trained vector per position, like an embedding (Gehring et al. 2017; BERT, GPT-2).

    Args:
        rows: N, the number of positions; None for the original context length. Others raise an error.
    """

    name = "learned"
    family = "absolute"
    formula = "x + P_p, P trained, N rows"
    paper = "arXiv:1705.03122"

    rows: Count | None = None

    def sizes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        return {"table": (self.rows or shape.window, shape.hidden_size)}

    def apply(self, positions: Tensor, shape: ModelShape, *, table: Tensor) -> Tensor:
        if (last := int(positions.max())) >= len(table):
            raise RopepatchError(
                f"learned positions end at {len(table) - 1}, got position {last}",
                hint="swap with more rows and train them, or use an encoding that is defined everywhere",
            )
        return nn.functional.embedding(positions, table).float()
