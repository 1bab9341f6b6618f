"""The loss of every scored token of a batch under a model, with few logits in memory at a time.

Shapes: B passages of a batch, T tokens of its longest, C positions of a chunk, V vocabulary. Losses are in
nats.
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
from ropepatch.evaluation.batches import padded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

    from ropepatch.evaluation.batches import Batch

logger = logging.getLogger(__name__)


class LossReader:
    """Reads the losses of batches under one model.

    Args:
        model: A causal language model, in eval mode.
        chunk: Logits of at most so many positions are held at a time, over all passages of a batch, or of
            two per passage.
    """

    def __init__(self, model: PreTrainedModel, chunk: int) -> None:
        self._model = model
        self._chunk = chunk
        self._decoder = decoder_of(model)
        self._warned = False

    def read(self, batch: Batch) -> list[Tensor]:
        """Float32 losses on the CPU of each passage's tokens from its first scored one on."""
        with torch.inference_mode():
            losses = self._losses(batch)
        return [nll.clone() for nll in losses]  # not slices, which hold and are sent with their whole batch

    def _losses(self, batch: Batch) -> list[Tensor]:
        device, first = input_device(self._model), batch[0].first
        if self._decoder is not None:
            ids = padded(batch).to(device)
            losses = _chunked_losses(self._model, self._decoder, ids, first, self._chunk)
            if losses is not None:
                return [row[: len(passage) - first] for row, passage in zip(losses, batch, strict=True)]
        if not self._warned:
            name = type(self._model).__name__
            logger.warning("%s: its head cannot be run in chunks; needs memory for all logits at once", name)
            self._decoder, self._warned = None, True
        return [_full_losses(self._model, passage.ids.to(device), first, self._chunk) for passage in batch]


def input_device(model: PreTrainedModel) -> torch.device:
    """Where the model takes its token ids."""
    embedding: Any = model.get_input_embeddings().weight
    return torch.device("cpu") if embedding.is_meta else embedding.device  # meta: offloaded by accelerate


def decoder_of(model: PreTrainedModel) -> nn.Module | None:
    """What the model runs below its head; None if it has no such part or cannot give single positions."""
    if not any(map(gives_positions, model.modules())):  # any: wrappers such as PEFT's pass keywords on
        return None
    decoder = getattr(model, "get_decoder", lambda: None)()
    # Llama 4 answers with the whole model, head included; in Gemma 4 the decoder takes logits_to_keep itself.
    return getattr(decoder, "model", decoder) if decoder and gives_positions(decoder) else decoder


def gives_positions(module: nn.Module) -> bool:
    """Whether its forward can be asked for the logits of some positions alone."""
    return "logits_to_keep" in inspect.signature(module.forward).parameters


def _chunked_losses(
    model: PreTrainedModel, decoder: nn.Module, ids: Tensor, first: int, chunk: int
) -> Tensor | None:
    """Losses [B, T - first] of ids [B, T], from calls of the whole model for C positions each.

    Its decoder runs in the first call only, so the head is the model's own code, with all its family does
    before and after the projection. None if the decoder does not give one row per token, or if the first and
    last logits are not those the model gives when asked for these two alone.
    """

    def logits_at(positions: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=positions).logits
        return logits  # [B, C, V]

    def chunk_at(positions: Tensor) -> tuple[Tensor, Tensor] | None:
        logits = logits_at(positions)
        if logits.shape[1] != len(positions):
            return None
        at_ends = logits[:, torch.isin(positions, ends)]  # a copy: the logits are freed on return
        return _cross_entropy(logits, ids[:, positions + 1]), at_ends

    predicting = torch.arange(first - 1, ids.shape[1] - 1)
    ends = torch.unique(predicting[[0, -1]])
    chunks = []
    with computed_once(decoder) as outputs:
        # Positions, never their number: for a number, Gemma 4's decoder leaves out all other rows. The last
        # comes first, so that a model which answers two positions of its own choice is found out.
        expected = logits_at(ends.flip(0)).flip(1)
        if len(outputs) != 1 or expected.shape[1] != len(ends) or _shape(outputs[0]) != ids.shape:
            return None
        for positions in torch.split(predicting, max(1, chunk // len(ids))):
            read = chunk_at(positions)
            if read is None:
                return None
            chunks.append(read)
    losses, at_ends = (torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True))
    # Products of other shapes round differently, in TF32 most of all; a wrong position is off by far more.
    tolerance = max(torch.finfo(expected.dtype).eps ** 0.5, 1e-3) * expected.nan_to_num().abs().max().item()
    same = torch.allclose(at_ends, expected, rtol=0, atol=tolerance, equal_nan=True)
    return losses if same else None


def _shape(output: Any) -> torch.Size:
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]  # [B, T, hidden_size]
    return hidden.shape[:2]


@contextmanager
def computed_once(
    module: nn.Module, through: Callable[[Any], Any] = lambda output: output
) -> Iterator[list[Any]]:
    """Within the block, this one instance computes at its first call and repeats that output at later ones.

    Yields the outputs given so far, one per call.

    Args:
        module: The instance.
        through: What is done to the output once it is computed.
    """
    forward, shadowed = module.forward, "forward" in vars(module)
    outputs: list[Any] = []

    @functools.wraps(forward)
    def compute_once(*args: Any, **kwargs: Any) -> Any:
        outputs.append(outputs[0] if outputs else through(forward(*args, **kwargs)))
        return outputs[-1]

    module.forward = compute_once
    try:
        yield outputs
    finally:
        if shadowed:
            module.forward = forward
        else:
            del module.forward


def _full_losses(model: PreTrainedModel, ids: Tensor, first: int, chunk: int) -> Tensor:
    """Losses [T - first] of ids [T], from all logits [T, V] at once."""
    logits = model(input_ids=ids[None], use_cache=False).logits
    if logits.shape[1] != len(ids):
        raise RopepatchError(f"{type(model).__name__} gave {logits.shape[1]} logits for {len(ids)} tokens")
    rows, targets = logits[0, first - 1 : -1], ids[first:]
    pairs = zip(torch.split(rows, chunk), torch.split(targets, chunk), strict=True)
    return torch.cat([_cross_entropy(*pair) for pair in pairs])


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Float32 losses on the CPU of the targets [...] under the logits [..., V]."""
    rows = logits.flatten(end_dim=-2).float()
    nll = F.cross_entropy(rows, targets.flatten().to(rows.device), reduction="none")
    return nll.view(targets.shape).cpu()


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
