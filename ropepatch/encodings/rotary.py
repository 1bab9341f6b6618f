"""Rotary positions: pairs of channels turn with the position, so that a product depends on the distance.

Pairs are (x_i, x_{i + n}) for i < n in the first 2n channels, as LLaMA lays them out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ropepatch.encodings.encoding import Attended, AttentionModule, Encoding, ModelShape, Places
from ropepatch.errors import RopepatchError

Angles = Callable[[Tensor], Tensor]  # positions [B, T] -> radians [B, T, n], float32


def turned(x: Tensor, angles: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """x [B, H, T, D] with the pairs of its first 2n channels turned by angles [B, T, n].

    Args:
        x: Queries or keys.
        angles: Radians, float32.
        scale: The factor of cos and sin: a number, or [B or 1, T, n].
    """
    tables = angles.cos() * scale, angles.sin() * scale
    cos, sin = (table.to(x.dtype).repeat(1, 1, 2)[:, None] for table in tables)
    rotary = x[..., : cos.shape[-1]]
    first, second = rotary.chunk(2, -1)
    out = rotary * cos + torch.cat((-second, first), -1) * sin
    return out if rotary.shape == x.shape else torch.cat((out, x[..., cos.shape[-1] :]), -1)


class Turning(AttentionModule):
    """Turns queries and keys by the same angles.

    Args:
        angles: The angles of positions.
        scale: The factor of cos and sin.
        groups: The first so many key-value heads, and their queries, turn; None for all.
        skipped: Layers that do not turn.
    """

    def __init__(
        self,
        angles: Angles,
        scale: float = 1.0,
        groups: int | None = None,
        skipped: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self.angles, self.scale, self.groups, self.skipped = angles, scale, groups, skipped

    def forward(self, stock: Attended, layer: int, places: Places, scaling: float) -> Attended:
        if layer in self.skipped:
            return stock
        query, key = stock.query, stock.key
        groups = key.shape[1] if self.groups is None else self.groups
        heads = groups * (query.shape[1] // key.shape[1])
        query, key = self._turned(query, heads, places.queries), self._turned(key, groups, places.keys)
        return replace(stock, query=query, key=key)

    def _turned(self, x: Tensor, heads: int, positions: Tensor) -> Tensor:
        out = turned(x[:, :heads], self.angles(positions), self.scale)
        return out if heads == x.shape[1] else torch.cat((out, x[:, heads:]), 1)


def ladder(inv_freq: Tensor) -> Angles:
    """p * inv_freq, for frequencies [n] in radians per token."""
    return partial(_climbed, inv_freq)


def _climbed(inv_freq: Tensor, positions: Tensor) -> Tensor:
    return positions[..., None].float() * inv_freq.to(positions.device)


@dataclass(frozen=True, kw_only=True)
class RoPE(Encoding):
    """The model's own rope, on queries and keys at the time of attention: caches hold unturned keys."""

    name = "rope"
    family = "rotary"
    formula = "pair i turns by p·b^(−2i/D)"
    paper = "arXiv:2104.09864"

    def build(self, shape: ModelShape) -> AttentionModule:
        return Turning(ladder(shape.rope.inv_freq()), shape.rope.carried_attention_factor)


@dataclass(frozen=True, kw_only=True)
class PartialRotary(Encoding):
    """Only the first channels of a head turn, through all frequencies (GPT-J, GPT-NeoX).

    Args:
        share: The share of the head's channels; the number that turns is cut to an even one.
    """

    name = "partial"
    family = "rotary"
    formula = "the first share·D channels are a rope of their own"
    paper = "arXiv:2204.06745"
    domains = (("share", "above 0 and at most 1", lambda one: 0 < one.share <= 1),)

    share: float = 0.5

    def build(self, shape: ModelShape) -> AttentionModule:
        pairs = int(self.share * shape.head_dim) // 2
        if not pairs:
            raise RopepatchError(
                f"partial: a share of {self.share:g} leaves no pair of {shape.head_dim} channels",
                hint=f"use a share of {2 / shape.head_dim:g} or more, or nope",
            )
        exponents = torch.arange(pairs).float() / pairs
        return Turning(ladder(1.0 / shape.rope.rope_theta**exponents))


@dataclass(frozen=True, kw_only=True)
class ProportionalRotary(Encoding):
    """The lowest frequencies do not turn (Barbero et al. 2024).

    Args:
        share: The share of the pairs that turn; the fastest int(share * D/2) keep their frequencies.
    """

    name = "p-rope"
    family = "rotary"
    formula = "the fastest share·D/2 pairs turn as in rope, the others stand"
    paper = "arXiv:2410.06205"
    domains = (("share", "from 0 to 1", lambda one: 0 <= one.share <= 1),)

    share: float = 0.75

    def build(self, shape: ModelShape) -> AttentionModule:
        inv_freq = shape.rope.inv_freq()
        turning = torch.arange(len(inv_freq)) < int(self.share * len(inv_freq))
        return Turning(ladder(inv_freq * turning), shape.rope.carried_attention_factor)


@dataclass(frozen=True, kw_only=True)
class Axial(Encoding):
    """A rope per axis, each on its own block of pairs: axial, and N-dimensional.

    A text is laid out on a grid, line by line; with a grid of (16,) the position p is at (p // 16, p % 16).

    Args:
        grid: The extents of all axes but the first, slowest one first; N - 1 numbers for N axes.
    """

    name = "axial"
    family = "rotary"
    formula = "block c of N: pair i turns by p^c·b^(−2i/(D/N))"
    paper = "arXiv:2403.13298"
    domains = (
        (
            "grid",
            "one or more whole numbers above 0",
            lambda one: len(one.grid) > 0 and all(0 < extent < 2**31 for extent in one.grid),
        ),
    )

    grid: tuple[int, ...] = (16,)

    def build(self, shape: ModelShape) -> AttentionModule:
        axes = len(self.grid) + 1
        if shape.head_dim % (2 * axes):
            raise RopepatchError(
                f"{axes} axes need a head_dim that {2 * axes} divides, got {shape.head_dim}",
                hint="use a grid of fewer axes",
            )
        return Turning(partial(self._angles, shape.head_dim, shape.rope.rope_theta))

    def _angles(self, head_dim: int, base: float, positions: Tensor) -> Tensor:
        return axial_angles(coordinates(positions, self.grid), head_dim, base)


def coordinates(positions: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Where positions [...] are on a grid that is filled line by line: [..., N] int64."""
    where: list[Tensor] = []
    for extent in reversed(grid):
        where.insert(0, positions % extent)
        positions = positions // extent
    return torch.stack((positions, *where), -1)


def axial_angles(where: Tensor, head_dim: int, base: float) -> Tensor:
    """The angles [..., D/2] of tokens at N coordinates [..., N]: a block of D/2N pairs for each."""
    axes = where.shape[-1]
    exponents = torch.arange(0, head_dim // axes, 2, device=where.device).float() / (head_dim // axes)
    return (where[..., None].float() * (1.0 / base**exponents)).flatten(-2)


@dataclass(frozen=True, kw_only=True)
class XPos(Encoding):
    """A rope whose products decay with the distance, fast pairs faster (Sun et al. 2022).

    Args:
        scale_base: Tokens over which pair i decays by zeta_i = (2i/D + gamma) / (1 + gamma).
        gamma: The larger, the slower the decay.
    """

    name = "xpos"
    family = "rotary"
    formula = "rope, times ζ_i^((m−n)/scale_base), ζ_i = (2i/D+γ)/(1+γ)"
    paper = "arXiv:2212.10554"
    domains = (
        ("scale_base", "above 0", lambda one: one.scale_base > 0),
        ("gamma", "above 0", lambda one: one.gamma > 0),
    )

    scale_base: float = 512.0
    gamma: float = 0.4

    def build(self, shape: ModelShape) -> AttentionModule:
        return Decaying(shape, self.scale_base, self.gamma)


class Decaying(AttentionModule):
    """Turns queries and keys, and scales them by inverse powers of their positions.

    Powers count from the farthest query: a key far behind it vanishes, and nothing overflows in one step.
    """

    def __init__(self, shape: ModelShape, scale_base: float, gamma: float) -> None:
        super().__init__()
        self.angles = ladder(shape.rope.inv_freq())
        self.factor = shape.rope.carried_attention_factor
        self.decay = (shape.rope.exponents() + gamma) / (1 + gamma)
        self.scale_base = scale_base

    def forward(self, stock: Attended, layer: int, places: Places, scaling: float) -> Attended:
        query, key = stock.query, stock.key
        origin = places.queries.amax(-1, keepdim=True)
        decay = self.decay.to(query.device)
        reach = (origin - places.queries).max() / self.scale_base
        largest = float(query.detach().abs().max() * key.detach().abs().max())
        bound = float(decay.min() ** -reach.float()) * 4 * query.shape[-1] * max(largest, 1.0)
        if not bound < torch.finfo(query.dtype).max:
            raise RopepatchError(
                f"xpos over {int(reach * self.scale_base)} tokens leaves the range of {query.dtype}",
                hint="read in chunks through a cache, or give a larger scale_base",
            )

        def scale(positions: Tensor, sign: int) -> Tensor:
            behind = (positions - origin).clamp(max=0)[..., None].float()  # a cache has empty columns ahead
            power: Tensor = self.factor * decay ** (sign * behind / self.scale_base)
            return power

        return replace(
            stock,
            query=turned(query, self.angles(places.queries), scale(places.queries, 1)),
            key=turned(key, self.angles(places.keys), scale(places.keys, -1)),
        )
