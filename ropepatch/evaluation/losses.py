"""The loss of every token of a document under a model, with few logits in memory at a time.

Shapes: T tokens of a document, C tokens of a chunk, V vocabulary. Losses are in nats.
"""

from __future__ import annotations

import functools
import inspect
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropepatch.errors import RopepatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def read_losses(model: PreTrainedModel, documents: Iterable[Tensor], chunk: int) -> Iterator[Tensor]:
    """Float32 losses [T - 1] on the CPU for the token ids [T] of each document."""
    decoder = _decoder(model)
    warned = False
    for ids in documents:
        losses = None if decoder is None else _chunked_losses(model, decoder, ids, chunk)
        if losses is None and not warned:
            name = type(model).__name__
            logger.warning("%s: its head cannot be run in chunks; needs memory for all logits at once", name)
            decoder, warned = None, True
        yield _full_losses(model, ids, chunk) if losses is None else losses


def _decoder(model: PreTrainedModel) -> nn.Module | None:
    """What the model runs below its head; None if it has no such part or cannot give single positions."""
    if not any(map(gives_positions, model.modules())):  # any: wrappers such as PEFT's pass keywords on
        return None
    decoder = getattr(model, "get_decoder", lambda: None)()
    # Llama 4 answers with the whole model, head included; in Gemma 4 the decoder takes logits_to_keep itself.
    return getattr(decoder, "model", decoder) if decoder and gives_positions(decoder) else decoder


def gives_positions(module: nn.Module) -> bool:
    """Whether its forward can be asked for the logits of some positions alone."""
    return "logits_to_keep" in inspect.signature(module.forward).parameters


def _chunked_losses(model: PreTrainedModel, decoder: nn.Module, ids: Tensor, chunk: int) -> Tensor | None:
    """Losses [T - 1] from calls of the whole model for C positions each; its decoder runs in the first only.

    So the head is the model's own code, with all its family does before and after the projection. None if
    the decoder does not give one row per token, or if the first and last logits are not those the model gives
    when asked for these two alone.
    """

    def logits_at(positions: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids[None], use_cache=False, logits_to_keep=positions).logits[0]
        return logits  # [C, V]

    ends = torch.tensor([0, len(ids) - 1])
    losses, found = [], []
    with _computed_once(decoder) as outputs:
        # Positions, never their number: for a number, Gemma 4's decoder leaves out all other rows.
        expected = logits_at(ends)
        if len(outputs) != 1 or len(expected) != 2 or _rows(outputs[0]) != len(ids):
            return None
        for positions in torch.split(torch.arange(len(ids)), chunk):
            logits = logits_at(positions)
            if len(logits) != len(positions):
                return None
            losses.append(_cross_entropy(logits, ids[positions[0] + 1 : positions[-1] + 2]))
            found.append(logits[torch.isin(positions, ends)])
    # Products of other shapes round differently, in TF32 most of all; a wrong position is off by far more.
    tolerance = max(torch.finfo(expected.dtype).eps ** 0.5, 1e-3) * expected.nan_to_num().abs().max().item()
    same = torch.allclose(torch.cat(found), expected, rtol=0, atol=tolerance, equal_nan=True)
    return torch.cat(losses) if same else None


def _rows(output: Any) -> int:
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]  # [1, T, hidden_size]
    return hidden.shape[1]


@contextmanager
def _computed_once(module: nn.Module) -> Iterator[list[Any]]:
    """Within the block, this one instance computes at its first call and repeats that output at later ones.

    Yields the outputs given so far, one per call.
    """
    forward, shadowed = module.forward, "forward" in vars(module)
    outputs: list[Any] = []

    @functools.wraps(forward)
    def compute_once(*args: Any, **kwargs: Any) -> Any:
        outputs.append(outputs[0] if outputs else forward(*args, **kwargs))
        return outputs[-1]

    module.forward = compute_once
    try:
        yield outputs
    finally:
        if shadowed:
            module.forward = forward
        else:
            del module.forward


def _full_losses(model: PreTrainedModel, ids: Tensor, chunk: int) -> Tensor:
    """Losses [T - 1] from all logits [T, V] at once."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    if len(logits) != len(ids):
        raise RopepatchError(f"{type(model).__name__} gave {len(logits)} logits for {len(ids)} tokens")
    pairs = zip(torch.split(logits[:-1], chunk), torch.split(ids[1:], chunk), strict=True)
    return torch.cat([_cross_entropy(rows, targets) for rows, targets in pairs])


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Float32 losses [N] on the CPU of the targets [N] under the first N rows of the logits."""
    rows = logits[: len(targets)].float()
    return F.cross_entropy(rows, targets.to(rows.device), reduction="none").cpu()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode within the block; afterwards every module is back in its own mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
