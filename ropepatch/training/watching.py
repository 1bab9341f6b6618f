"""What is measured while a model trains: its loss within the old context and at the target, and passkeys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ropepatch.evaluation.passkey import passkey
from ropepatch.evaluation.perplexity import perplexity

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, eq=False)
class Watcher:
    """Measures one model again and again, always on the same text and keys.

    Args:
        tokenizer: Of the model.
        pieces: Held-out token ids, [target] each.
        trained: The old context L, in tokens.
        target: The new one.
        trials: Passkeys at each depth; 0 for none.
        split: Whether the processes share the work; not where the model itself is split over them.
    """

    tokenizer: PreTrainedTokenizerBase
    pieces: Sequence[Tensor]
    trained: int
    target: int
    trials: int
    split: bool

    def measure(self, model: PreTrainedModel) -> dict[str, float]:
        """Nats per token of the first L tokens and of the target's last half; the share of keys found."""
        curve = perplexity(model, None, self.pieces, split=self.split)
        found = {
            "short_loss": curve.at(self.trained).mean,
            "target_loss": curve.between(self.target // 2, self.target).mean,
        }
        if self.trials:
            grid = passkey(
                model, self.tokenizer, lengths=[self.target], depths=DEPTHS, trials=self.trials
            ).at(self.target)
            found["target_passkey"] = grid.correct / grid.n
        return found

    def short_loss(self, model: PreTrainedModel) -> float:
        """Nats per token of the first L tokens alone, of a model that need not read farther."""
        pieces = [piece[: self.trained] for piece in self.pieces]
        return perplexity(model, None, pieces, split=self.split).at(self.trained).mean


@dataclass(frozen=True)
class Gate:
    """How much the loss within the old context may rise.

    Args:
        base: Of the model before, in nats per token.
        now: Of the adapted model.
        most: The greatest increase allowed, as a share of `base`.
    """

    base: float
    now: float
    most: float

    @property
    def increase(self) -> float:
        """As a share of the base's loss."""
        return self.now / self.base - 1

    @property
    def passed(self) -> bool:
        """Whether the increase is allowed."""
        return self.increase <= self.most

    def __str__(self) -> str:
        verdict = "within" if self.passed else "beyond"
        change = f"{self.base:.4f} -> {self.now:.4f} ({self.increase:+.2%})"
        return f"short-context loss {change}, {verdict} the {self.most:.2%} allowed"

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {
            "base": self.base,
            "now": self.now,
            "increase": self.increase,
            "most": self.most,
            "passed": self.passed,
        }
