"""Perplexity at every length from one pass over the documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.curves import LossCurve, check_length
from ropepatch.evaluation.losses import evaluating, read_losses
from ropepatch.evaluation.texts import token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Sequence[str | Sequence[int] | Tensor],
    *,
    length: int | None = None,
    chunk: int = 1024,
    progress: Callable[[int, int], None] | None = None,
) -> LossCurve:
    """Read each document in one forward pass and keep the loss of every token.

    Args:
        model: A causal language model of transformers; put in eval mode and back into the mode it was in.
        tokenizer: Splits the documents that are text, without special tokens but preceded by its
            beginning-of-sequence token if it has one; None if all documents are token ids.
        documents: Texts or token ids.
        length: Tokens read of each document; None for all.
        chunk: Tokens whose logits are held in memory at one time.
        progress: Called as (documents read, documents in all) after each.

    Raises:
        RopepatchError: No documents, one of fewer than 2 tokens, a token id outside the vocabulary, or a loss
            that is not finite.
    """
    if length is not None:
        check_length(length)
    if chunk < 1:
        raise RopepatchError(f"chunk must be at least 1 token, got {chunk}")
    vocabulary = model.config.get_text_config().vocab_size
    checked = [
        _check_ids(ids, index, vocabulary)[:length]
        for index, ids in enumerate(token_ids(tokenizer, documents))
    ]
    if not checked:
        raise RopepatchError("no documents to read", hint="pass at least one text or list of token ids")
    embedding: Any = model.get_input_embeddings().weight
    device = torch.device("cpu") if embedding.is_meta else embedding.device  # meta: offloaded by accelerate
    losses: list[Tensor] = []
    with evaluating(model), torch.inference_mode():
        for nll in read_losses(model, (ids.to(device) for ids in checked), chunk):
            losses.append(_check_finite(nll, len(losses)))
            if progress is not None:
                progress(len(losses), len(checked))
    return LossCurve(tuple(nll.clone() for nll in losses))  # a clone made here is no inference tensor


def _check_ids(ids: Tensor, index: int, vocabulary: int) -> Tensor:
    if ids.ndim != 1 or len(ids) < 2:
        raise RopepatchError(
            f"documents[{index}] must be one row of at least 2 tokens, got shape {list(ids.shape)}",
            hint="leave out empty documents; the first token is never scored",
        )
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise RopepatchError(f"documents[{index}] must hold whole token ids, got {ids.dtype}")
    ids = ids.long()
    outside = (ids < 0) | (ids >= vocabulary)
    if outside.any():
        position = int(outside.nonzero()[0])
        raise RopepatchError(
            f"documents[{index}]: token {position} is {ids[position]}, expected 0 to {vocabulary - 1}",
            hint="use the tokenizer that belongs to the model",
        )
    return ids


def _check_finite(nll: Tensor, index: int) -> Tensor:
    broken = ~nll.isfinite()
    if broken.any():
        position = int(broken.nonzero()[0])
        raise RopepatchError(
            f"documents[{index}]: the loss of token {position + 1} is {nll[position]}, expected a number",
            hint="load the model in float32 or bfloat16; check its weights and its rope scaling",
        )
    return nll
