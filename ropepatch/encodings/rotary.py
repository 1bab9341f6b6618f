"""Rotary positions in all channels, heads and layers, in some, or in none.

Pairs of channels rotate with the position, so that the product of a query and a key depends on the distance.
The pairs are (x_i, x_{i + n}) for i < n in the first 2n channels, as in LLaMA. Without rotation, order comes
only from the causal mask.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ropepatch.encodings.encoding import AttentionInputs, Encoding, ModelShape
from ropepatch.errors import RopepatchError
from ropepatch.scaling.rope import Rope
from ropepatch.settings import Amount, Count, Several, Share

Extents = Several[Annotated[int, Field(gt=0, lt=2**31)]]
LINES = 2**31  # of a grid: no limit


def rotated(x: Tensor, angles: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Rotate the pairs in the first 2n channels of queries or keys x [B, H, T, D].

    Args:
        x: Queries or keys.
        angles: Radians [B, T, n], float32.
        scale: The factor of cos and sin: a number, or [B or 1, T, n].
    """
    tables = angles.cos() * scale, angles.sin() * scale
    cos, sin = (table.to(x.dtype).repeat(1, 1, 2)[:, None] for table in tables)
    rotary = x[..., : cos.shape[-1]]
    first, second = rotary.chunk(2, -1)
    out = rotary * cos + torch.cat((-second, first), -1) * sin
    if rotary.shape == x.shape:
        return out
    return torch.cat((out, x[..., cos.shape[-1] :]), -1)


class RoPE(Encoding):
    """The model's RoPE, applied inside attention, so that the KV cache holds unrotated keys."""

    name = "rope"
    family = "rotary"
    formula = "pair i rotates by m·b^(−2i/D)"
    paper = "arXiv:2104.09864"

    def rope(self, shape: ModelShape) -> Rope:
        """Return the RoPE by which channels rotate."""
        return shape.rope

    def constants(self, shape: ModelShape) -> dict[str, Tensor]:
        return {"inv_freq": self.rope(shape).inv_freq()}

    def angles(self, positions: Tensor, inv_freq: Tensor) -> Tensor:
        """Return the angles [B, T, n] of positions [B, T], in radians, float32."""
        return positions[..., None].float() * inv_freq.to(positions.device)

    def apply(
        self, inputs: AttentionInputs, shape: ModelShape, *, inv_freq: Tensor
    ) -> AttentionInputs:
        factor = self.rope(shape).carried_attention_factor
        of_queries = self.angles(inputs.query_positions, inv_freq)
        of_keys = self.angles(inputs.key_positions, inv_freq)
        return replace(
            inputs,
            query=rotated(inputs.query, of_queries, factor),
            key=rotated(inputs.key, of_keys, factor),
        )


class PartialRotary(RoPE):
    """RoPE in the first channels of a head only, over the full range of frequencies (GPT-J, GPT-NeoX).

    Args:
        share: The share of the head's channels that rotate, rounded down to an even number.
    """

    name = "partial"
    formula = "the first share·D channels are a rope of their own"
    paper = "arXiv:2204.06745"

    share: Annotated[float, Field(gt=0, le=1)] = 0.5

    def rope(self, shape: ModelShape) -> Rope:
        pairs = int(self.share * shape.head_dim) // 2
        return Rope(2 * pairs, shape.rope.rope_theta, shape.window)


class ProportionalRotary(RoPE):
    """RoPE without rotation at the lowest frequencies (Barbero et al. 2024).

    Args:
        share: The share of the pairs that rotate; the fastest int(share * D/2) keep their frequencies.
    """

    name = "p-rope"
    formula = "the fastest share·D/2 pairs rotate as in rope"
    paper = "arXiv:2410.06205"

    share: Share = 0.75

    def constants(self, shape: ModelShape) -> dict[str, Tensor]:
        inv_freq = self.rope(shape).inv_freq()
        rotates = torch.arange(len(inv_freq)) < int(self.share * len(inv_freq))
        return {"inv_freq": inv_freq * rotates}


class Axial(RoPE):
    """Axial RoPE in N dimensions: each axis rotates its own block of pairs.

    Tokens fill a grid line by line; with grid (16,) position p lies at (p // 16, p % 16).

    Args:
        grid: The sizes of all axes but the first, slowest axis first; N - 1 numbers for N axes.
    """

    name = "axial"
    formula = "block c of N: pair i rotates by m^c·b^(−2i/(D/N))"
    paper = "arXiv:2403.13298"

    grid: Extents = (16,)

    def check_shape(self, shape: ModelShape) -> None:
        axes = len(self.grid) + 1
        if shape.head_dim % (2 * axes):
            raise RopepatchError(
                f"{axes} axes need a head_dim that {2 * axes} divides, got {shape.head_dim}",
                hint="use a grid of fewer axes",
            )

    def rope(self, shape: ModelShape) -> Rope:
        of_axis = shape.head_dim // (len(self.grid) + 1)
        return Rope(of_axis, shape.rope.rope_theta, shape.window)

    def angles(self, positions: Tensor, inv_freq: Tensor) -> Tensor:
        sizes = LINES, *self.grid
        coordinates = torch.stack(torch.unravel_index(positions, sizes), -1)
        return super().angles(coordinates, inv_freq).flatten(-2)


class XPos(RoPE):
    """RoPE whose products decay with the distance, faster at higher frequencies (Sun et al. 2022).

    Exponents count from the last query, so that the factors of distant keys vanish instead of overflowing.

    Args:
        scale_base: Tokens over which pair i decays by zeta_i = (2i/D + gamma) / (1 + gamma).
        gamma: The larger, the slower the decay.
    """

    name = "xpos"
    formula = "rope, times ζ_i^((m−n)/scale_base), ζ_i = (2i/D+γ)/(1+γ)"
    paper = "arXiv:2212.10554"

    scale_base: Amount = 512.0
    gamma: Amount = 0.4

    def constants(self, shape: ModelShape) -> dict[str, Tensor]:
        decay = (shape.rope.exponents() + self.gamma) / (1 + self.gamma)
        return super().constants(shape) | {"decay": decay}

    def apply(  # type: ignore[override]  # one more tensor
        self,
        inputs: AttentionInputs,
        shape: ModelShape,
        *,
        inv_freq: Tensor,
        decay: Tensor,
    ) -> AttentionInputs:
        origin = inputs.query_positions.amax(-1, keepdim=True)

        def stretched(x: Tensor, positions: Tensor, sign: int) -> Tensor:
            # empty cache slots have larger positions
            behind = (positions - origin).clamp(max=0)[..., None].float()
            power: Tensor = decay ** (sign * behind / self.scale_base)
            scale = shape.rope.carried_attention_factor * power
            return rotated(x, self.angles(positions, inv_freq), scale)

        return replace(
            inputs,
            query=stretched(inputs.query, inputs.query_positions, 1),
            key=stretched(inputs.key, inputs.key_positions, -1),
        )


class NoPE(Encoding):
    """No positions at all (Haviv et al. 2022, Kazemnejad et al. 2023)."""

    name = "nope"
    family = "none"
    formula = "q·k"
    paper = "arXiv:2305.19466"

    def apply(self, inputs: AttentionInputs, shape: ModelShape) -> AttentionInputs:
        return inputs


class DroPE(Encoding):
    """No positions in a model trained with RoPE, recalibrated by a short training at L (Sakana AI, 2025).

    Args:
        temperature: The factor of the scores, for texts longer than L; 1 during training.
    """

    name = "drope"
    family = "none"
    formula = "q·k after training with rope, then a recalibration at L"
    paper = "arXiv:2512.12167"

    temperature: Amount = 1.0

    def apply(self, inputs: AttentionInputs, shape: ModelShape) -> AttentionInputs:
        if self.temperature == 1:
            return inputs
        return replace(inputs, query=inputs.query * self.temperature)


class NoPEHeads(RoPE):
    """RoPE in some heads, no positions in the others.

    Args:
        rotated: The share of the key-value heads, counted from the first, that rotate with their queries.
    """

    name = "nope-heads"
    family = "none"
    formula = "rope in the first rotated·K key-value heads"
    paper = "–"

    rotated: Share = 0.5

    def check_shape(self, shape: ModelShape) -> None:
        groups = self._groups(shape)
        if 0 < self.rotated < 1 and groups in (0, shape.key_value_heads):
            raise RopepatchError(
                f"nope-heads: {self.rotated:g} of {shape.key_value_heads} key-value heads is "
                f"{'none' if groups == 0 else 'all'} of them",
                hint="use nope-layers, or another share",
            )

    def apply(
        self, inputs: AttentionInputs, shape: ModelShape, *, inv_freq: Tensor
    ) -> AttentionInputs:
        groups = self._groups(shape)
        heads = groups * (inputs.query.shape[1] // inputs.key.shape[1])
        query, key = inputs.query, inputs.key
        first = replace(inputs, query=query[:, :heads], key=key[:, :groups])
        first = super().apply(first, shape, inv_freq=inv_freq)
        return replace(
            inputs,
            query=torch.cat((first.query, query[:, heads:]), 1),
            key=torch.cat((first.key, key[:, groups:]), 1),
        )

    def _groups(self, shape: ModelShape) -> int:
        return round(self.rotated * shape.key_value_heads)


class NoPELayers(RoPE):
    """RoPE in all but every n-th layer, as in SmolLM3 and Llama 4.

    Args:
        every: n; layers n, 2n, ... do not rotate, counted from 1.
    """

    name = "nope-layers"
    family = "none"
    formula = "rope, but not in every n-th layer"
    paper = "arXiv:2501.18795"

    every: Count = 4

    def check_shape(self, shape: ModelShape) -> None:
        if self.every > shape.layers:
            raise RopepatchError(
                f"nope-layers: of {shape.layers} layers none is number {self.every}",
                hint=f"every={shape.layers} leaves the last one without positions",
            )

    def apply(
        self, inputs: AttentionInputs, shape: ModelShape, *, inv_freq: Tensor
    ) -> AttentionInputs:
        if (inputs.layer + 1) % self.every == 0:
            return inputs
        return super().apply(inputs, shape, inv_freq=inv_freq)
