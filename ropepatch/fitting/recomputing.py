"""Gradients of long windows: activations that do not fit are computed again, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

MOST = 4 << 30  # bytes of activations that are held
VALUES = 16  # that a layer holds for every token, in units of the hidden size: counted on LLaMA in bfloat16


@contextmanager
def recomputing(model: PreTrainedModel, tokens: int) -> Iterator[None]:
    """Keep of each layer its input alone within the block, if all that so many tokens leave is above `MOST`.

    A backward pass then takes a forward pass more. The model is in eval mode, in which transformers' own
    switch does nothing.
    """
    config: Any = model.config.get_text_config()
    held = VALUES * config.hidden_size * config.num_hidden_layers * tokens * model.dtype.itemsize
    with ExitStack() as stack:
        if held > MOST:
            for layer in model.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    stack.enter_context(_recomputed(layer))
        yield


@contextmanager
def _recomputed(layer: nn.Module) -> Iterator[None]:
    before = vars(layer).get("forward")  # of a loader that has put its own there
    again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    vars(layer)["forward"] = again
    try:
        yield
    finally:
        del vars(layer)["forward"]
        if before is not None:
            vars(layer)["forward"] = before
