"""The loss of every scored token of a batch under a model, with few logits in memory at a time.

Shapes: B windows of a batch, T tokens of each, C positions of a chunk, V vocabulary. Losses are in
nats.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.windows import Window
from ropepatch.model.head import decoded_once, decoder_of, input_device, token_losses

if TYPE_CHECKING:
    from transformers import PreTrainedModel


logger = logging.getLogger(__name__)


class LossReader:
    """Reads the losses of batches under one model.

    Args:
        model: A causal language model, in eval mode.
        chunk: Logits of at most so many positions are held at a time, over all windows of a batch, or of
            two per window.
    """

    def __init__(self, model: PreTrainedModel, chunk: int) -> None:
        self._model = model
        self._chunk = chunk
        self._decoder = decoder_of(model)
        self._warned = False

    def read(self, batch: list[Window]) -> list[Tensor]:
        """Float32 losses on the CPU of each window's tokens from its first scored one on."""
        with torch.inference_mode():
            losses = self._losses(batch)
        return [nll.clone() for nll in losses]  # not slices, which hold and are sent with their whole batch

    def _losses(self, batch: list[Window]) -> list[Tensor]:
        device, first = input_device(self._model), batch[0].first
        if self._decoder is not None:
            ids = torch.stack([window.ids for window in batch]).to(device)
            losses = _chunked_losses(self._model, self._decoder, ids, first, self._chunk)
            if losses is not None:
                return list(losses)
        if not self._warned:
            name = type(self._model).__name__
            logger.warning("%s: its head cannot be run in chunks; needs memory for all logits at once", name)
            self._decoder, self._warned = None, True
        return [_full_losses(self._model, window.ids.to(device), first, self._chunk) for window in batch]


def _chunked_losses(
    model: PreTrainedModel, decoder: nn.Module, ids: Tensor, first: int, chunk: int
) -> Tensor | None:
    """Losses [B, T - first] of ids [B, T], from the logits of C positions at a time.

    None if the decoder does not give one row per token, or if the first and last logits are not those the
    model gives when asked for these two alone.
    """
    predicting = torch.arange(first - 1, ids.shape[1] - 1)
    ends = torch.unique(predicting[[0, -1]])
    chunks = []
    with decoded_once(model, decoder, ids) as (logits_at, states):
        # The last comes first, so that a model which answers two positions of its own choice is found out.
        expected = logits_at(ends.flip(0)).flip(1)
        if len(states) != 1 or expected.shape[1] != len(ends) or states[0].shape[:2] != ids.shape:
            return None
        for positions in torch.split(predicting, max(1, chunk // len(ids))):
            logits = logits_at(positions)
            if logits.shape[1] != len(positions):
                return None
            at_ends = logits[:, torch.isin(positions, ends)]  # a copy: the chunk's logits are freed
            chunks.append((token_losses(logits, ids[:, positions + 1]).cpu(), at_ends))
            del logits
    losses, at_ends = (torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True))
    # Products of other shapes round differently, in TF32 most of all; a wrong position is off by far more.
    tolerance = max(torch.finfo(expected.dtype).eps ** 0.5, 1e-3) * expected.nan_to_num().abs().max().item()
    same = torch.allclose(at_ends, expected, rtol=0, atol=tolerance, equal_nan=True)
    return losses if same else None


def _full_losses(model: PreTrainedModel, ids: Tensor, first: int, chunk: int) -> Tensor:
    """Losses [T - first] of ids [T], from all logits [T, V] at once."""
    logits = model(input_ids=ids[None], use_cache=False).logits
    if logits.shape[1] != len(ids):
        raise RopepatchError(f"{type(model).__name__} gave {logits.shape[1]} logits for {len(ids)} tokens")
    rows, targets = logits[0, first - 1 : -1], ids[first:]
    pairs = zip(torch.split(rows, chunk), torch.split(targets, chunk), strict=True)
    return torch.cat([token_losses(*pair).cpu() for pair in pairs])
