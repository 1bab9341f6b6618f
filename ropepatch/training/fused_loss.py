"""The loss of hidden states under a linear head, without the logits of all tokens at once.

Shapes: N tokens, H hidden size, V vocabulary, C tokens of a chunk. Losses are in nats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the label of a token that is not predicted, as in torch and transformers
CHUNK = 1024


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, chunk: int = CHUNK
) -> Tensor:
    """Sum of the negative log likelihoods of all labels but -100, a scalar; 0 if there are none.

    The gradients come with the forward pass, chunk by chunk, since the logits are gone by the time of the
    backward pass. Under autocast the matrix products are in its dtype; softmax and the sum are in float32.

    Args:
        hidden: The hidden states [N, H].
        weight: The head's weight [V, H], in the dtype of `hidden` unless autocast makes it so.
        labels: The token that follows each [N], int64.
        bias: The head's bias [V].
        chunk: Logits of at most so many tokens are held at a time; liger chooses for itself.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return _backend(hidden)(hidden, weight, labels, bias, chunk)


def _backend(hidden: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor | None, int], Tensor]:
    """On a GPU the kernel of liger-kernel, if it is installed; else our chunks.

    `F.linear_cross_entropy` of torch 2.13 is not used: on a CPU it takes as much memory and time as our
    chunks, in bfloat16 more time, and it rounds the sum to bfloat16.
    """
    if hidden.device.type != "cuda" or not _installed("liger_kernel"):
        return _in_chunks
    # Where the hidden states need no gradient, liger gives the head none either.
    return _by_liger if hidden.requires_grad or not torch.is_grad_enabled() else _in_chunks


_installed = functools.cache(find_spec)


def _by_liger(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, chunk: int) -> Tensor:
    """With liger-kernel 0.8.5 checked in Triton's interpreter on a CPU, not on a GPU; see `linear_head`."""
    functional: Any = import_module("liger_kernel.transformers.functional")
    options = {"ignore_index": IGNORED, "reduction": "sum", "accum_dtype": torch.float32}
    loss: Tensor = functional.liger_fused_linear_cross_entropy(hidden, weight, labels, bias=bias, **options)
    return loss


def _in_chunks(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, chunk: int) -> Tensor:
    tensors = (hidden, weight, bias)
    # Told here: within a Function, gradients seem to be needed under no_grad, too.
    needed = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors]
    loss: Tensor = _ChunkedLoss.apply(*tensors, labels, chunk, needed)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk: int,
        needed: list[bool],
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        of_hidden = torch.empty_like(hidden) if needed[0] else None
        of_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None

        def add(rows: slice) -> None:
            """Add one chunk; its logits are freed on return."""
            scored = (labels[rows] != IGNORED)[:, None]
            targets = labels[rows, None].where(scored, 0)
            logits = F.linear(hidden[rows], weight, bias).to(wide)  # [C, V], changed in place from here on
            of_targets, highest = logits.gather(1, targets), logits.amax(1, keepdim=True)
            mass = logits.sub_(highest).exp_().sum(1, keepdim=True)
            total.add_((mass.log() + highest - of_targets).where(scored, 0).sum())
            if not any(needed):
                return
            # The gradient of the logits: the probabilities, less 1 at the target.
            logits.mul_(scored / mass).scatter_add_(1, targets, -scored.to(wide))
            gradient = logits.to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(gradient, weight, out=of_hidden[rows])
            if of_weight is not None and wide == hidden.dtype:
                of_weight.addmm_(gradient.T, hidden[rows])
            elif of_weight is not None:
                of_weight.add_(gradient.T @ hidden[rows])
            if of_bias is not None:
                of_bias.add_(logits.sum(0))

        for start in range(0, len(labels), chunk):
            add(slice(start, start + chunk))
        sums = (of_weight, weight), (of_bias, bias)
        rounded = [None if of is None or x is None else of.to(x.dtype) for of, x in sums]
        ctx.save_for_backward(of_hidden, *rounded)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        # A Python number: on a GPU a tensor of one would be rounded to 16 bits before the product.
        scale = upstream[0].item()
        gradients = (None if gradient is None else gradient * scale for gradient in ctx.saved_tensors)
        return (*gradients, None, None, None)
