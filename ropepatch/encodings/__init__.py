"""Every position encoding of the literature, as a swap-in for the rope of a loaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ropepatch.encodings.encoding import Encoding
from ropepatch.encodings.registry import ENCODINGS, make_encoding
from ropepatch.encodings.swapping import Swap, swap_encoding, swapped
from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from torch import nn


def swap(model: nn.Module, encoding: str | Encoding, **parameters: Any) -> Swap:
    """Put another position encoding into one loaded model, in memory and reversibly.

    A model that was trained with a rope has to learn the new one: its loss is that of a text in disorder
    until it is trained. New parameters are drawn from torch's generator; seed it first. With PEFT swap first,
    and train them by `modules_to_save=["rotary_emb.module"]`.

    Args:
        model: A LLaMA-like causal language model, possibly inside a PEFT model.
        encoding: One of `ENCODINGS`, or what `make_encoding` returned.
        parameters: Of an encoding that is given by its name.

    Raises:
        RopepatchError: If there is no such encoding, or the model is patched, swapped or not LLaMA-like.
    """
    if isinstance(encoding, str):
        encoding = make_encoding(encoding, **parameters)
    elif not isinstance(encoding, Encoding) or parameters:
        raise RopepatchError(
            f"swap takes a name with its parameters, or an encoding, got {encoding!r}",
            hint="ropepatch.swap(model, 'alibi')",
        )
    return swap_encoding(model, encoding)


__all__ = ["ENCODINGS", "Encoding", "Swap", "make_encoding", "swap", "swapped"]
