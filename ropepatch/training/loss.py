"""The loss of a training step, computed in chunks in place of the logits.

Shapes: B sequences of a batch, N tokens of a sequence, V vocabulary. Losses are in nats.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropepatch.data.texts import IGNORED
from ropepatch.model.config import text_config
from ropepatch.model.head import find_linear_head, in_eval_mode, shadowed
from ropepatch.model.rotary import base_model
from ropepatch.training.fused_loss import linear_cross_entropy

logger = logging.getLogger(__name__)

CHECKED = 16  # tokens of the pass that looks for the head
NO_INPUT = ("labels", "answers")  # keys of a batch that are no arguments of a model


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

    def mean(total: Tensor) -> Tensor:
        return total / count.clamp(min=1).to(total.device)

    if head is None:
        logits: Tensor = model(**inputs).logits.float()
        targets = labels.flatten().to(logits.device)
        if distilled is not None:
            return mean(distilled(logits.flatten(0, -2), None, targets))
        return mean(F.cross_entropy(logits.flatten(0, -2), targets, reduction="sum"))

    exact: list[Tensor] = []

    def loss_of(hidden: Tensor) -> Tensor:
        targets = labels.flatten().to(hidden.device)
        score = distilled or linear_cross_entropy
        loss = score(hidden.flatten(0, -2), head.weight, targets, bias=head.bias)
        # Divided here: rounding of the output does not change a gradient of 1
        exact.append(mean(loss))
        return exact[-1]

    with shadowed(head, loss_of):
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
    inputs = _short_batch(vocabulary, base.get_input_embeddings().weight.device)
    with in_eval_mode(model), torch.no_grad():
        head = find_linear_head(model, base, inputs)
    torch.clear_autocast_cache()  # it holds weights that were cast without gradients
    if head is None:
        # Logits, log-softmax and the gradients of both, in float32
        gib = 4096 * vocabulary * 4 * 4 / 2**30
        logger.warning(
            "%s: its logits are not those of one linear layer, so all are made at once: about %.1f GiB for "
            "each 4096 tokens of a batch",
            type(base).__name__,
            gib,
        )
    return head


def _short_batch(vocabulary: int, device: torch.device) -> dict[str, Any]:
    """Make a packed sequence of one document, with tokens from the whole vocabulary."""
    ids = (torch.arange(CHECKED, device=device) * 7919 % vocabulary)[None]
    ends = torch.tensor([0, CHECKED], dtype=torch.int32, device=device)
    segments: dict[str, Any] = {f"cu_seq_lens_{side}": ends for side in "qk"}
    segments |= {f"max_length_{side}": CHECKED for side in "qk"}
    return {
        "input_ids": ids,
        "position_ids": torch.arange(CHECKED, device=device)[None],
        **segments,
    }
