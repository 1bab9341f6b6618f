"""What a fit found, and how sure it is that it is better."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropepatch.scaling.file import write_scaling

if TYPE_CHECKING:
    from ropepatch.extension.planning import Plan
    from ropepatch.scaling.searched import CustomDivisors


@dataclass(frozen=True)
class Fitted:
    """A fitted scaling.

    Args:
        plan: Of the scaling, on the model it was fitted on; what `ropepatch.patch` and `extend` take.
        record: How it was found, JSON-ready.
    """

    plan: Plan
    record: dict[str, Any]

    @property
    def scaling(self) -> CustomDivisors:
        """The divisors and the attention factor."""
        scaling: Any = self.plan.scaling
        found: CustomDivisors = scaling
        return found

    def save(self, file: str | Path) -> Path:
        """Write the small JSON that every command takes for a method.

        Raises:
            RopepatchError: If the file exists or cannot be written.
        """
        return write_scaling(file, self.plan, fit=self.record)

    def __str__(self) -> str:
        held, window = self.record["held_out"], self.plan.rope.original_max_position_embeddings
        low, high = held["gain_interval"]
        divisors = ", ".join(f"{divisor:.3g}" for divisor in self.scaling.divisors)
        return "\n".join(
            [
                f"{self.plan.model}: {window} -> {self.plan.target} tokens",
                f"divisors, fastest pair first: {divisors}",
                f"attention factor: {self.scaling.attention_factor:.4g}",
                "loss of windows that decided nothing, nats per token: "
                f"{held['before']:.4f} ({self.record['start']}) -> {held['after']:.4f}, "
                f"gain {held['gain']:.4f} (95 % interval {low:.4f} to {high:.4f}, "
                f"{held['windows']} windows)",
                f"the model as it is, through its own window: {held['own_window']:.4f}",
                f"within the first {window} tokens: {held['short_before']:.4f} -> {held['short_after']:.4f}",
                f"{self.record['forward_tokens'] / 1e6:.2f} M forward tokens, {self.record['seconds']:.0f} s",
            ]
        )
