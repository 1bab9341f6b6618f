"""The loss of a training step, computed in chunks without the logits of all tokens at once.

It is the cross-entropy of the next tokens, or the Kullback-Leibler divergence from a teacher's distributions
to the student's (Hinton et al. 2015, arXiv:1503.02531).

Shapes: B sequences of a batch, N tokens, H hidden size, V vocabulary, C tokens of a chunk. Losses are in nats.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropepatch.data.texts import IGNORED
from ropepatch.model.config import text_config
from ropepatch.model.cost import CHUNK
from ropepatch.model.head import find_linear_head, in_eval_mode, shadowed
from ropepatch.model.rotary import base_model
from ropepatch.training.packed_attention import segments

logger = logging.getLogger(__name__)

# Tokens, from the whole vocabulary, of the pass that looks for the head
CHECKED = 16
NO_INPUT = ("labels", "answers")  # keys of a batch that are no arguments of a model
DISTILLED = CHUNK // 4  # a chunk holds logits and distributions of both models

# Maps logits [C, V] of some tokens to the sum of their losses and its gradient; may overwrite the logits.
Objective = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


def causal_lm_loss(
    model: nn.Module,
    batch: Mapping[str, Any],
    num_items: Tensor | int | None = None,
    *,
    head: nn.Linear | None,
    distilled: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Compute the loss of a batch, a float32 scalar, in the model's `__call__`.

    The head returns the loss instead of logits. For DDP, FSDP, PEFT and autocast it is therefore an ordinary
    forward pass, with the head's weights gathered.

    Args:
        model: A causal language model, wrapped or not.
        batch: With `labels` [B, N], not shifted; -100 is left out.
        num_items: Divisor of the sum over the labels; None for their number.
        head: The result of `linear_head`; None to compute all logits.
        distilled: `linear_distillation` towards a teacher; None for the cross-entropy of the labels.
    """
    labels = of_next(batch["labels"], IGNORED)
    count = (
        (labels != IGNORED).sum() if num_items is None else torch.as_tensor(num_items)
    )
    given = {name: value for name, value in batch.items() if name not in NO_INPUT}
    inputs = {"use_cache": False} | given

    def loss_of(hidden: Tensor, weight: Tensor | None) -> Tensor:
        targets = labels.flatten().to(hidden.device)
        score = distilled or linear_cross_entropy
        total = score(hidden.flatten(0, -2), weight, targets)
        return total / count.clamp(min=1).to(total.device)

    if head is None:
        return loss_of(model(**inputs).logits.float(), None)
    exact: list[Tensor] = []

    def in_place_of_logits(hidden: Tensor) -> Tensor:
        # Divided here: rounding of the output does not change a gradient of 1
        exact.append(loss_of(hidden, head.weight))
        return exact[-1]

    with shadowed(head, in_place_of_logits):
        loss: Tensor = model(**inputs).logits.float()
    # FSDP2 with accelerate's policy rounds the output to 16 bits
    return loss + (exact[0] - loss).detach()


def of_next(values: Tensor, last: float) -> Tensor:
    """Shift values by one: that of the next token, for each token [B, N]."""
    return F.pad(values, (0, 1), value=last)[..., 1:]


def linear_head(model: nn.Module) -> nn.Linear | None:
    """Find the layer whose output is the model's logits; None, with a warning, if there is none.

    Every process calls this.
    """
    base: Any = base_model(model)
    vocabulary = text_config(base.config).vocab_size
    device = base.get_input_embeddings().weight.device
    inputs = {
        "input_ids": torch.arange(CHECKED, device=device)[None] * 7919 % vocabulary,
        "position_ids": torch.arange(CHECKED, device=device)[None],
        **segments([CHECKED], device),
    }
    with in_eval_mode(model), torch.no_grad():
        head = find_linear_head(model, base, inputs)
    torch.clear_autocast_cache()  # it holds weights that were cast without gradients
    if head is None or head.bias is not None:
        # Logits, log-softmax and the gradients of both, in float32
        gib = 4096 * vocabulary * 4 * 4 / 2**30
        logger.warning(
            "%s: its logits are not those of one linear layer without a bias, so all are made at once: "
            "about %.1f GiB for each 4096 tokens of a batch",
            type(base).__name__,
            gib,
        )
        return None
    return head


# Of hidden states


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor | None, labels: Tensor, *, chunk: int = CHUNK
) -> Tensor:
    """Sum the negative log likelihoods of all labels but -100; 0 if there are none.

    The forward pass computes the gradients chunk by chunk, and frees the logits. Under autocast the matrix
    products are in its dtype; softmax and the sum are in float32. `F.linear_cross_entropy` of torch 2.13 is
    not used: on a CPU it takes as much memory and time, in bfloat16 more time, and it rounds the sum to
    bfloat16.

    Args:
        hidden: The hidden states [N, H], or logits [N, V] where there is no weight.
        weight: The head's weight [V, H], in the dtype of `hidden` unless autocast makes it so.
        labels: The token that follows each [N], int64.
        chunk: Tokens whose logits are held at a time.
    """
    hidden, weight = _as_multiplied(hidden, weight)
    return _summed(
        hidden, weight, _to_labels(labels, torch.ones_like(labels)), len(labels), chunk
    )


@dataclass(frozen=True, eq=False)
class TeacherOutput:
    """A teacher's prediction after each token: hidden states with the head, or logits."""

    hidden: Tensor  # [N, H], or logits [N, V] without a weight
    weight: Tensor | None = None  # [V, H]

    def logits(self, rows: slice) -> Tensor:
        """Return the logits [C, V] of some of the tokens."""
        hidden = self.hidden[rows]
        return hidden if self.weight is None else F.linear(hidden, self.weight)


def linear_distillation(
    hidden: Tensor,
    weight: Tensor | None,
    labels: Tensor,
    *,
    teacher: TeacherOutput,
    answers: Tensor,
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
        temperature: T.
        cross_entropy: The share c of the cross-entropy: c CE + (1 - c) T² KL.
        chunk: Tokens whose logits are held at a time, for each model.
    """
    hidden, weight = _as_multiplied(hidden, weight)
    teacher = TeacherOutput(*_as_multiplied(teacher.hidden, teacher.weight))
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

    return _summed(hidden, weight, objective, len(labels), chunk)


def _divergence(student: Tensor, teacher: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Compute KL(teacher || student) at temperature t, [C], and its gradient times t, [C, V]."""
    log_p = (teacher if t == 1 else teacher / t).log_softmax(1)
    del teacher
    log_q = (student if t == 1 else student / t).log_softmax(1)
    p = log_p.exp()
    divergence = torch.linalg.vecdot(p, log_p.sub_(log_q))
    return divergence, log_q.exp_().sub_(p)


def _as_multiplied(hidden: Tensor, weight: Tensor | None) -> tuple[Tensor, Any]:
    """Cast to autocast's dtype, if it is enabled."""
    device = hidden.device.type
    if weight is None or not torch.is_autocast_enabled(device):
        return hidden, weight
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype)


def _to_labels(labels: Tensor, weights: Tensor) -> Objective:
    """Make the weighted cross-entropy of the labels; it overwrites the logits with the gradient."""

    def objective(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        scored: Tensor = (labels[rows] != IGNORED)[:, None]
        weight = weights[rows, None].to(logits) * scored
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
    hidden: Tensor, weight: Tensor | None, objective: Objective, count: int, chunk: int
) -> Tensor:
    # Decided here: within a Function, `requires_grad` is also True under no_grad.
    needed = [
        torch.is_grad_enabled() and x is not None and x.requires_grad
        for x in (hidden, weight)
    ]
    loss: Tensor = _ChunkedLoss.apply(hidden, weight, objective, count, chunk, needed)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        objective: Objective,
        count: int,
        chunk: int,
        needed: list[bool],
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        of_hidden = torch.empty_like(hidden) if needed[0] else None
        of_weight = None
        if weight is not None and needed[1]:
            of_weight = torch.zeros_like(weight, dtype=wide)

        def add(rows: slice) -> None:
            """Add one chunk; its logits are freed on return."""
            given = hidden[rows]
            logits = given.clone() if weight is None else F.linear(given, weight)
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

        for start in range(0, count, chunk):
            add(slice(start, start + chunk))
        if of_weight is not None:
            of_weight = of_weight.to(hidden.dtype)
        ctx.save_for_backward(of_hidden, of_weight)
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
