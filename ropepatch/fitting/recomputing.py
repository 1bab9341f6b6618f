"""Gradients of long windows: activations that do not fit are computed again, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ropepatch.model.head import shadowed

if TYPE_CHECKING:
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
                    again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
                    stack.enter_context(shadowed(layer, again))
        yield
