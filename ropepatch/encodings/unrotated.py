"""No positions, in all or in some heads or layers: order then comes from the causal mask alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ropepatch.encodings.encoding import Attended, AttentionModule, Encoding, ModelShape, Places
from ropepatch.encodings.rotary import Turning, ladder
from ropepatch.errors import RopepatchError


class Unpositioned(AttentionModule):
    """Queries and keys as they are.

    Args:
        temperature: The queries are multiplied by it, and so are all scores.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, stock: Attended, layer: int, places: Places, scaling: float) -> Attended:
        return stock if self.temperature == 1 else replace(stock, query=stock.query * self.temperature)


@dataclass(frozen=True, kw_only=True)
class NoPE(Encoding):
    """No positions at all (Haviv et al. 2022, Kazemnejad et al. 2023)."""

    name = "nope"
    family = "none"
    formula = "q·k"
    paper = "arXiv:2305.19466"

    def build(self, shape: ModelShape) -> AttentionModule:
        return Unpositioned()


@dataclass(frozen=True, kw_only=True)
class DroPE(Encoding):
    """A rope that is dropped after training, to be followed by a short training at L (Sakana AI, 2025).

    Args:
        temperature: The factor of the scores, for texts beyond L; 1 while training.
    """

    name = "drope"
    family = "none"
    formula = "q·k after training with rope, then a recalibration at L"
    paper = "arXiv:2512.12167"
    domains = (("temperature", "above 0", lambda one: one.temperature > 0),)

    temperature: float = 1.0

    def build(self, shape: ModelShape) -> AttentionModule:
        return Unpositioned(self.temperature)


@dataclass(frozen=True, kw_only=True)
class NoPEHeads(Encoding):
    """Some heads have a rope, the others no positions.

    Args:
        rotated: The share of the key-value heads, the first ones, that turn with their queries.
    """

    name = "nope-heads"
    family = "none"
    formula = "rope in the first rotated·K key-value heads"
    domains = (("rotated", "from 0 to 1", lambda one: 0 <= one.rotated <= 1),)
    rotated: float = 0.5

    def build(self, shape: ModelShape) -> AttentionModule:
        groups = round(self.rotated * shape.key_value_heads)
        if 0 < self.rotated < 1 and groups in (0, shape.key_value_heads):
            raise RopepatchError(
                f"nope-heads: {self.rotated:g} of {shape.key_value_heads} key-value heads is "
                f"{'none' if groups == 0 else 'all'} of them",
                hint="use nope-layers, or another share",
            )
        return Turning(ladder(shape.rope.inv_freq()), shape.rope.carried_attention_factor, groups)


@dataclass(frozen=True, kw_only=True)
class NoPELayers(Encoding):
    """Every n-th layer has no positions, the others a rope (as SmolLM3 and Llama 4).

    Args:
        every: n: layers n, 2n, ... counted from 1 do not turn.
    """

    name = "nope-layers"
    family = "none"
    formula = "rope, but not in every n-th layer"
    paper = "arXiv:2501.18795"
    domains = (("every", "at least 1", lambda one: one.every >= 1),)

    every: int = 4

    def build(self, shape: ModelShape) -> AttentionModule:
        if self.every > shape.layers:
            raise RopepatchError(
                f"nope-layers: of {shape.layers} layers none is number {self.every}",
                hint=f"every={shape.layers} leaves the last one without positions",
            )
        skipped = frozenset(range(self.every - 1, shape.layers, self.every))
        return Turning(ladder(shape.rope.inv_freq()), shape.rope.carried_attention_factor, skipped=skipped)
