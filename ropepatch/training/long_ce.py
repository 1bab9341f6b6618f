"""LongCE: tokens weigh as much as the context beyond a short window brings them (arXiv:2410.23771).

Shapes: N tokens of a batch, M of the short windows over them. Losses are in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropepatch.evaluation.perplexity import windows
from ropepatch.model.head import evaluating, shadowed, token_losses
from ropepatch.training.fused_loss import CHUNK, IGNORED


def token_weights(losses: Tensor, short: Tensor, clip: float) -> Tensor:
    """min(exp(short - losses), clip); 1 for a token that the short window does not take context from, NaN."""
    return (short - losses).exp().clamp(max=clip).where(short.isfinite(), 1)


class LongCE:
    """Reads batches in short windows, and weighs their tokens.

    Args:
        window: W, the tokens of a short window, whose segments stand on end in one pass without gradients.
        stride: By how much it moves; a token counts in the first window that holds it.
        clip: The greatest weight.
    """

    def __init__(self, window: int, stride: int, clip: float) -> None:
        self.window, self.stride, self.clip = window, stride, clip

    def weigh(
        self, model: nn.Module, batch: Mapping[str, Any], head: nn.Linear | None
    ) -> Callable[[Tensor, slice], Tensor]:
        """Make the function that weighs some tokens of a batch by their losses, each predicting the next."""
        short = self.short_losses(model, batch, head)
        return lambda losses, rows: token_weights(losses, short[rows].to(losses), self.clip)

    def short_losses(self, model: nn.Module, batch: Mapping[str, Any], head: nn.Linear | None) -> Tensor:
        """Float32 losses [N] of the token after each; NaN where the short window is the whole segment."""
        ids, labels = batch["input_ids"], F.pad(batch["labels"][0], (0, 1), value=IGNORED)[1:]
        ends = batch["cu_seq_lens_q"].tolist()
        taken: list[Tensor] = []  # of every short window: the tokens of the batch it reads,
        scored: list[Tensor] = []  # those of them that precede a token that counts,
        predicting: list[Tensor] = []  # and where these are among all that are read
        lengths: list[int] = []
        for begin, end in pairwise(ends):
            for window in windows(0, torch.arange(begin, end), self.window, self.stride)[1:]:
                first = sum(lengths) + window.first - 1
                predicting.append(torch.arange(first, sum(lengths) + len(window.ids) - 1))
                scored.append(window.ids[window.first :] - 1)
                taken.append(window.ids)
                lengths.append(len(window.ids))
        losses = torch.full(labels.shape, torch.nan, device=labels.device)
        if not taken:  # processes that share weights must read as often as each other
            taken, lengths = [torch.arange(2)], [2]
        places = torch.cat(taken).to(ids.device)
        bounds = torch.tensor([0, *lengths], device=ids.device).cumsum(0, dtype=torch.int32)
        inputs = {
            "input_ids": ids[:, places],
            "position_ids": batch["position_ids"][:, places],
            "use_cache": False,
            **{f"cu_seq_lens_{side}": bounds for side in "qk"},
            **{f"max_length_{side}": max(lengths) for side in "qk"},
        }
        tokens = torch.cat([torch.empty(0, dtype=torch.long), *scored]).to(ids.device)
        rows = torch.cat([torch.empty(0, dtype=torch.long), *predicting]).to(ids.device)
        found: list[Tensor] = []

        def keep(hidden: Tensor) -> Tensor:
            pairs = torch.split(rows, CHUNK), torch.split(labels[tokens], CHUNK)
            for some, here in zip(*pairs, strict=True):
                weight: Any = head
                states = hidden.flatten(0, -2)[some]
                logits = states if head is None else F.linear(states, weight.weight, weight.bias)
                found.append(token_losses(logits, here))
            return hidden.new_zeros(())

        with torch.no_grad(), evaluating(model):
            if head is None:
                keep(model(**inputs).logits)
            else:
                with shadowed(head, keep):
                    model(**inputs)
        if found and len(tokens):
            known = torch.cat(found).to(losses.device)
            losses[tokens] = known.where(labels[tokens] != IGNORED, torch.nan)
        return losses
