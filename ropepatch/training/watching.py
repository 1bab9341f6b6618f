"""Evaluation during training: loss at the original and the target length, and passkeys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropepatch.evaluation.intervals import Mean
from ropepatch.evaluation.perplexity import perplexity
from ropepatch.evaluation.retrieval import retrieve
from ropepatch.progress import Advance, unseen

DEPTHS = 5  # equal parts of the target, with equally many passkeys


@dataclass(frozen=True, eq=False)
class Watcher:
    """Evaluates a model repeatedly on the same text and passkeys."""

    tokenizer: PreTrainedTokenizerBase
    pieces: Sequence[Tensor]  # held out; [target] each, or [L] for no loss at the target
    trained: int  # the original context length L, in tokens
    target: int | None  # None for no evaluation beyond the original length
    trials: int  # passkeys at each of five depths of the target
    split: bool  # whether processes share the work; False if the model is split over them

    def measure(self, model: PreTrainedModel) -> dict[str, float]:
        """Measure loss (nats/token) within the original length and at the target, and passkey accuracy."""
        if self.target is None or len(self.pieces[0]) < self.target:
            measured = {"short_loss": self.short_context(model).value}
        else:
            curve = perplexity(model, None, self.pieces, split=self.split)
            measured = {
                "short_loss": curve.at(self.trained).value,
                "target_loss": curve.between(self.target // 2, self.target).value,
            }
        if self.target is not None and self.trials:
            found = retrieve(
                model,
                self.tokenizer,
                lengths=[self.target],
                haystacks=DEPTHS * self.trials,
                keys=1,
                kinds=("passkey",),
                split=self.split,
            )
            measured["target_passkey"] = found.found(self.target).value
        return measured

    def short_context(self, model: PreTrainedModel, advance: Advance = unseen) -> Mean:
        """Measure the loss (nats/token) of the first L tokens, without running beyond them."""
        pieces = [piece[: self.trained] for piece in self.pieces]
        return perplexity(model, None, pieces, split=self.split, progress=advance).at(self.trained)
