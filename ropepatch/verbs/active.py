"""What ropepatch has changed in a loaded model."""

from __future__ import annotations

from torch import nn

from ropepatch.attention.remapped import Remapped, mapped
from ropepatch.encodings.swapping import Swap, swapped
from ropepatch.extension.patching import Patch
from ropepatch.extension.patching import active as patched


def active(model: nn.Module) -> Patch | Remapped | Swap | None:
    """The patch, position remapping or swapped encoding of a model or of a copy of it, or None.

    Its `remove()` restores the model.

    Args:
        model: A causal language model, possibly inside a PEFT model.
    """
    return patched(model) or mapped(model) or swapped(model)
