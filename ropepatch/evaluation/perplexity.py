"""Perplexity at every length from one pass over the documents, and by the protocols of published tables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from ropepatch.data.texts import token_ids
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.bars import advancing
from ropepatch.evaluation.batches import PADDING, Batch, Passage, TokenizedDocument, batched, key_of
from ropepatch.evaluation.curves import LossCurve, check_length
from ropepatch.evaluation.loss_reader import LossReader
from ropepatch.evaluation.processes import distribute, rank_and_ranks
from ropepatch.evaluation.protocols import ONE_PASS, Protocol
from ropepatch.evaluation.store import LossStore
from ropepatch.model.head import evaluating, input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

BLOCK = 256  # documents of an iterator that are held at a time

Bos = Literal["document", "window", "none"]


def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Iterable[str | Sequence[int] | Tensor],
    *,
    length: int | None = None,
    protocol: Protocol = ONE_PASS,
    bos: Bos = "document",
    chunk: int = 1024,
    tokens_per_batch: int | None = None,
    keep: Path | None = None,
    split: bool = False,
    progress: Callable[[int, int | None], None] | bool | None = None,
) -> LossCurve:
    """Read documents and keep the loss of every scored token, in the order of the documents.

    Memory, besides the weights and what one forward pass of the decoder over a batch takes: ``chunk`` x
    vocabulary logits in the model's dtype and twice that in float32, 8 bytes per token of the documents that
    are held, and 4 bytes per scored token in all. A model that cannot give single positions needs the logits
    of a whole window at once, and a warning says so.

    Passages of nearly the same length are read together: as many as ``tokens_per_batch`` holds, at most 1/16
    of it padding, and none where padding would change frequencies (stock ``dynamic`` and ``longrope``). What
    is read together follows from the documents alone, so their order changes nothing, to the bit.

    Args:
        model: A causal language model of transformers; put in eval mode and back into the mode it was in.
        tokenizer: Splits the documents that are text, without special tokens of its own; None if all
            documents are token ids and ``bos`` is not "window".
        documents: Texts or token ids. A collection is tokenised whole before any of it is read; an iterator
            256 documents at a time, which are batched among themselves.
        length: Tokens read of each document, beginning-of-sequence token included; None for all.
        protocol: What is read with what context.
        bos: Where the tokenizer's beginning-of-sequence token stands. "document": before each text, if the
            tokenizer has one; token ids are taken as they are. "window": before each window of each document,
            token ids too; those that begin with one already are given no second at their beginning. "none":
            nowhere; token ids are taken as they are.
        chunk: Positions whose logits are held in memory at one time.
        tokens_per_batch: The most tokens read together; a longer passage is read by itself. None for 8192, or
            1024 on a CPU, whose caches more do not fit.
        keep: A folder in which the losses of each batch are kept as they come and found by the next call with
            the same documents, protocol and ``tokens_per_batch``. It must belong to this model alone.
        split: Deal the batches to the processes of torch.distributed, if they are many; every process gives
            the same documents and is returned the same curve, to the bit that of one process with as many
            threads.
        progress: Called as (tokens read, tokens to read), both by this process, after each batch; how many
            there are to read is None for an iterator. True for a bar.

    Raises:
        RopepatchError: No documents, one of fewer than 2 tokens or none that the protocol reads, a token id
            outside the vocabulary, a loss that is not finite, or settings that score nothing.
    """
    if length is not None:
        check_length(length)
    if tokens_per_batch is None:
        tokens_per_batch = 1024 if input_device(model).type == "cpu" else 8192
    if chunk < 1 or tokens_per_batch < 1:
        raise RopepatchError(
            f"chunk and tokens_per_batch must be at least 1, got {chunk}, {tokens_per_batch}"
        )
    if not isinstance(protocol, Protocol):
        raise RopepatchError(
            f"protocol must be one of ropepatch.evaluation.protocols, got {protocol!r}",
            hint="e.g. Sliding(4096, stride=256)",
        )
    first = _window_bos(tokenizer, bos)
    before = 0 if first is None else 1
    vocabulary = model.config.get_text_config().vocab_size
    padding = 0.0 if follows_length(model) else PADDING
    reader, store = LossReader(model, chunk), None if keep is None else LossStore(keep)
    rank, ranks = rank_and_ranks(split)
    tokens_read, tokens_in_all = 0, None

    def measure(batch: Batch) -> list[Tensor]:
        nonlocal tokens_read
        losses = _measure(batch, reader, store)
        tokens_read += _tokens(batch)
        if advance is not None:
            advance(tokens_read, tokens_in_all)
        return losses

    rows: list[Tensor] = []
    indices: list[int] = []
    lengths: list[int] = []
    with evaluating(model), advancing(progress, "tokens") as advance:
        for block in _blocks(documents):
            texts = token_ids(tokenizer, block, bos=bos == "document", length=length)
            checked = [
                TokenizedDocument(index, _check_ids(ids, index, vocabulary, first)[:length])
                for index, ids in enumerate(texts, start=len(lengths))
            ]
            lengths += [len(document.ids) for document in checked]
            passages = [
                [Passage(document, window, before) for window in row]
                for document in checked
                for row in protocol.rows(len(document.ids), before)
            ]
            batches = batched(
                list(chain(*passages)), tokens=tokens_per_batch, rows=max(1, chunk // 2), padding=padding
            )
            if isinstance(documents, Sized):
                tokens_in_all = sum(map(_tokens, batches[rank::ranks]))
            losses = chain(*distribute(batches, measure, key=key_of, split=split))
            by_passage = dict(zip(chain(*batches), losses, strict=True))
            rows += [torch.cat([by_passage[passage] for passage in row]) for row in passages]
            indices += [row[0].document.index for row in passages]
    if not lengths:
        raise RopepatchError("no documents to read", hint="pass at least one text or list of token ids")
    if not rows:
        raise RopepatchError(
            f"{protocol.label}: none of {len(lengths)} documents is so long, the longest has {max(lengths)} "
            "tokens",
            hint="give longer documents, or a shorter window",
        )
    if length is not None and max(lengths) < length:
        logger.warning("no document has %d tokens: the longest has %d", length, max(lengths))
    return LossCurve(tuple(rows), tuple(indices))


def _tokens(batch: Batch) -> int:
    return sum(map(len, batch))


def _blocks(documents: Iterable[Any]) -> Iterator[Any]:
    """A collection in one block, an iterator in many."""
    if isinstance(documents, Sized):
        yield documents
        return
    remaining = iter(documents)
    while block := list(islice(remaining, BLOCK)):
        yield block


def _measure(batch: Batch, reader: LossReader, store: LossStore | None) -> list[Tensor]:
    """The losses of a batch, found or measured, and kept."""
    key, counts = key_of(batch), [len(passage) - passage.first for passage in batch]
    losses = store.find(key, counts) if store else None
    if losses is None:
        losses = reader.read(batch)
        for passage, nll in zip(batch, losses, strict=True):
            _check_finite(nll, passage)
        if store:
            store.write(key, losses)
    return losses


def _window_bos(tokenizer: PreTrainedTokenizerBase | None, bos: Bos) -> int | None:
    """The token that stands before every window, if one does."""
    if bos not in get_args(Bos):
        raise RopepatchError(f"bos must be one of {', '.join(get_args(Bos))}, got {bos!r}")
    if bos != "window":
        return None
    if tokenizer is None or tokenizer.bos_token_id is None:
        missing = "tokenizer is None" if tokenizer is None else f"{type(tokenizer).__name__} has none"
        raise RopepatchError(
            f"bos is 'window', which needs a beginning-of-sequence token, but {missing}",
            hint="pass the model's tokenizer, or bos='document' or 'none'",
        )
    return int(tokenizer.bos_token_id)


def follows_length(model: PreTrainedModel) -> bool:
    """Whether its frequencies follow the length of the input: stock ``dynamic``, or two sets of factors."""
    for module in model.modules():
        kind = str(getattr(module, "rope_type", ""))  # may be a dict by layer
        if "dynamic" in kind:
            return True
        if "longrope" in kind:
            parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
            sets = [parameters, *(one for one in parameters.values() if isinstance(one, dict))]
            if not any("long_factor" in one for one in sets):
                return True
            if any(one.get("short_factor") != one.get("long_factor") for one in sets):
                return True
    return False


def _check_ids(ids: Tensor, index: int, vocabulary: int, first: int | None) -> Tensor:
    """The ids as int64, after the token ``first`` if they do not begin with it."""
    added = first is not None and ids.ndim == 1 and bool(ids[:1].ne(first).all())
    if ids.ndim != 1 or len(ids) + added < 2:
        raise RopepatchError(
            f"documents[{index}] must be one row of at least 2 tokens, got shape {list(ids.shape)}",
            hint="leave out empty documents; the first token is never scored",
        )
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise RopepatchError(f"documents[{index}] must hold whole token ids, got {ids.dtype}")
    ids = torch.cat([torch.tensor([first] if added else [], dtype=torch.long), ids.long()])
    outside = (ids < 0) | (ids >= vocabulary)
    if outside.any():
        position = int(outside.nonzero()[0])
        raise RopepatchError(
            f"documents[{index}]: token {position} is {ids[position]}, expected 0 to {vocabulary - 1}",
            hint="use the tokenizer that belongs to the model",
        )
    return ids


def _check_finite(nll: Tensor, passage: Passage) -> None:
    broken = ~nll.isfinite()
    if broken.any():
        position = int(broken.nonzero()[0])
        raise RopepatchError(
            f"documents[{passage.document.index}]: the loss of token {passage.window.scored + position} is "
            f"{nll[position]}, expected a number",
            hint="load the model in float32 or bfloat16; check its weights and its rope scaling",
        )
