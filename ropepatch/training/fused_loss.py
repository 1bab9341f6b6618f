"""The loss of hidden states under a linear head, without the logits of all tokens at once.

It is the cross-entropy of the next tokens, or the Kullback-Leibler divergence from a teacher's distributions
to the student's (Hinton et al. 2015, arXiv:1503.02531).

Shapes: N tokens, H hidden size, V vocabulary, C tokens of a chunk. Losses are in nats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ropepatch.data.texts import IGNORED
from ropepatch.model.cost import CHUNK as CHUNK

DISTILLED = CHUNK // 4  # a chunk holds logits and distributions of both models

# Maps logits [C, V] of some tokens to the sum of their losses and its gradient; may overwrite the logits.
Objective = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Sum the negative log likelihoods of all labels but -100; 0 if there are none.

    The forward pass computes the gradients chunk by chunk, and frees the logits. Under autocast the matrix
    products are in its dtype; softmax and the sum are in float32. `F.linear_cross_entropy` of torch 2.13 is
    not used: on a CPU it takes as much memory and time, in bfloat16 more time, and it rounds the sum to
    bfloat16.

    Args:
        hidden: The hidden states [N, H].
        weight: The head's weight [V, H], in the dtype of `hidden` unless autocast makes it so.
        labels: The token that follows each [N], int64.
        bias: The head's bias [V].
        chunk: Tokens whose logits are held at a time.
    """
    hidden, weight, bias = _as_multiplied(hidden, weight, bias)
    return _summed(hidden, weight, bias, _to_labels(labels), len(labels), chunk)


@dataclass(frozen=True, eq=False)
class TeacherOutput:
    """A teacher's prediction after each token: hidden states with the head, or logits."""

    hidden: Tensor  # [N, H], or logits [N, V] without a weight
    weight: Tensor | None = None  # [V, H]
    bias: Tensor | None = None  # [V]

    def logits(self, rows: slice) -> Tensor:
        """Return the logits [C, V] of some of the tokens."""
        hidden = self.hidden[rows]
        return (
            hidden if self.weight is None else F.linear(hidden, self.weight, self.bias)
        )


def linear_distillation(
    hidden: Tensor,
    weight: Tensor | None,
    labels: Tensor,
    *,
    teacher: TeacherOutput,
    answers: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    cross_entropy: float = 0.0,
    chunk: int = DISTILLED,
) -> Tensor:
    """Sum T² KL(teacher || student), mixed with the labels' cross-entropy, over all labels but -100.

    Both distributions are at the temperature T. No gradient goes to the teacher; otherwise as
    `linear_cross_entropy`.

    Args:
        hidden: The hidden states of the student [N, H], or its logits [N, V] where there is no weight.
        weight: The weight of the student's head [V, H].
        labels: The token that follows each [N], int64.
        teacher: The teacher's output for the same tokens.
        answers: Weights [N] of the cross-entropy of labels that are known answers, instead of the
            divergence; 0 for all other labels.
        bias: The bias of the student's head [V].
        temperature: T.
        cross_entropy: The share c of the cross-entropy: c CE + (1 - c) T² KL.
        chunk: Tokens whose logits are held at a time, for each model.
    """
    hidden, weight, bias = _as_multiplied(hidden, weight, bias)
    teacher = TeacherOutput(
        *_as_multiplied(teacher.hidden, teacher.weight, teacher.bias)
    )
    wide = torch.promote_types(hidden.dtype, torch.float32)
    is_text = answers.to(labels.device) == 0
    entropy = answers.to(labels.device, wide).masked_fill(is_text, cross_entropy)
    kept = (labels != IGNORED).to(wide) * is_text * (1 - cross_entropy)
    to_labels = _to_labels(labels, entropy)

    def objective(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        divergence, gradient = _divergence(
            logits, teacher.logits(rows).to(logits.dtype), temperature
        )
        weights = kept[rows].to(divergence)
        total = divergence.where(weights > 0, 0).mul(weights).sum() * temperature**2
        gradient.mul_(weights[:, None] * temperature)
        if entropy[rows].any():
            loss, slope = to_labels(logits, rows)
            total, gradient = total + loss, gradient.add_(slope)
        return total, gradient

    return _summed(hidden, weight, bias, objective, len(labels), chunk)


def _divergence(student: Tensor, teacher: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Compute KL(teacher || student) at temperature t, [C], and its gradient times t, [C, V]."""
    log_p = (teacher if t == 1 else teacher / t).log_softmax(1)
    del teacher
    log_q = (student if t == 1 else student / t).log_softmax(1)
    p = log_p.exp()
    divergence = torch.linalg.vecdot(p, log_p.sub_(log_q))
    return divergence, log_q.exp_().sub_(p)


def _as_multiplied(
    hidden: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Any, Tensor | None]:
    """Cast to autocast's dtype, if it is enabled."""
    device = hidden.device.type
    if weight is None or not torch.is_autocast_enabled(device):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _to_labels(labels: Tensor, weights: Tensor | None = None) -> Objective:
    """Make the weighted cross-entropy of the labels; it overwrites the logits with the gradient."""

    def objective(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        scored: Tensor = (labels[rows] != IGNORED)[:, None]
        weight = (
            scored.to(logits)
            if weights is None
            else weights[rows, None].to(logits) * scored
        )
        targets = labels[rows, None].where(scored, 0)
        of_targets, highest = logits.gather(1, targets), logits.amax(1, keepdim=True)
        mass = logits.sub_(highest).exp_().sum(1, keepdim=True)
        losses = (mass.log() + highest - of_targets).where(scored, 0) * weight
        # The probabilities, less 1 at the target.
        return losses.sum(), logits.mul_(weight / mass).scatter_add_(
            1, targets, -weight
        )

    return objective


def _summed(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    objective: Objective,
    count: int,
    chunk: int,
) -> Tensor:
    tensors = (hidden, weight, bias)
    # Decided here: within a Function, `requires_grad` is also True under no_grad.
    needed = [
        torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors
    ]
    loss: Tensor = _ChunkedLoss.apply(*tensors, objective, count, chunk, needed)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        objective: Objective,
        count: int,
        chunk: int,
        needed: list[bool],
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        of_hidden = torch.empty_like(hidden) if needed[0] else None
        of_weight = (
            torch.zeros_like(weight, dtype=wide)
            if weight is not None and needed[1]
            else None
        )
        of_bias = (
            torch.zeros_like(bias, dtype=wide)
            if bias is not None and needed[2]
            else None
        )

        def add(rows: slice) -> None:
            """Add one chunk; its logits are freed on return."""
            logits = (
                hidden[rows].clone()
                if weight is None
                else F.linear(hidden[rows], weight, bias)
            )
            loss, slope = objective(logits.to(wide), rows)
            total.add_(loss)
            if not any(needed):
                return
            gradient = slope.to(hidden.dtype)
            if of_hidden is not None and weight is not None:
                torch.mm(gradient, weight, out=of_hidden[rows])
            elif of_hidden is not None:
                of_hidden[rows] = gradient
            if of_weight is not None and wide == hidden.dtype:
                of_weight.addmm_(gradient.T, hidden[rows])
            elif of_weight is not None:
                of_weight.add_(gradient.T @ hidden[rows])
            if of_bias is not None:
                of_bias.add_(slope.sum(0))

        for start in range(0, count, chunk):
            add(slice(start, start + chunk))
        sums = (of_weight, weight), (of_bias, bias)
        rounded = [
            None if of is None or x is None else of.to(x.dtype) for of, x in sums
        ]
        ctx.save_for_backward(of_hidden, *rounded)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        # A Python number: on a GPU a tensor of one would be rounded to 16 bits before the product.
        scale = upstream[0].item()
        gradients = (
            None if gradient is None else gradient * scale
            for gradient in ctx.saved_tensors
        )
        return (*gradients, None, None, None, None)
