"""Perplexity at every length, from one pass over the documents or from sliding windows.

The two protocols measure different quantities, so their numbers cannot be compared. Token 0 of a document is
not scored. Few logits are in memory at a time. Losses are in nats. Shapes: B windows of a batch, T tokens of
each, C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count, groupby
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from ropepatch.columns import as_text, columns, data_frame
from ropepatch.data.texts import token_ids
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.intervals import Mean
from ropepatch.model.architectures import BOS_IN_EACH_WINDOW
from ropepatch.model.head import (
    decoded_once,
    decoder_of,
    evaluating,
    input_device,
    token_losses,
)
from ropepatch.processes import ALONE, join
from ropepatch.progress import Advance, advancing, deal_resumed
from ropepatch.settings import key_of, whole_number

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CHUNK = (
    1024  # positions whose logits are in memory at a time, over all windows of a batch
)


def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Sequence[str | Sequence[int] | Tensor],
    *,
    length: int | None = None,
    window: int | None = None,
    stride: int | None = None,
    bos: bool = True,
    tokens_per_batch: int | None = None,
    keep: Path | None = None,
    split: bool = False,
    first: int | None = None,
    progress: Advance | bool | None = None,
) -> LossCurve:
    """Compute the loss of every token but the first of each document, in the order of the documents.

    The model processes each document in one pass, so every token sees all tokens before it, and the first N
    tokens of the curve are those of a pass over N tokens. An exception are frequencies that depend on the
    input length, as in stock ``dynamic`` and ``longrope``: there the length of the whole document decides.
    With a window and a stride, windows slide over each document, and each token counts once, in the first
    window that contains it.

    Memory, in addition to the weights and one forward pass of the decoder over a batch: the logits of 1024
    tokens in the model's dtype and twice that in float32, 8 bytes per token of the documents, and 4 bytes per
    scored token. A model that cannot return single positions needs the logits of a whole window at once, and
    logs a warning.

    Windows of one length are batched, up to ``tokens_per_batch`` tokens. Batches depend only on the
    documents, so the order of the documents changes no bit of the result.

    Args:
        model: A causal language model of transformers; put in eval mode, and back into its earlier mode.
        tokenizer: The tokenizer for documents that are text, without special tokens of its own; None if all
            documents are token ids.
        documents: Texts or token ids; all are tokenised before the first pass.
        length: Tokens of each document to use, beginning-of-sequence token included; None for all.
        window: Tokens per forward pass; None for one pass.
        stride: Tokens between the beginnings of two windows, from 1 to window - 1.
        bos: Put the tokenizer's beginning-of-sequence token before each text, if it has one; token ids stay
            as they are.
        tokens_per_batch: The most tokens per batch; a longer window is a batch of its own. None for 8192, or
            1024 on a CPU, whose caches are too small for more.
        keep: A folder for the losses of finished batches, from which the next call with the same documents,
            windows and ``tokens_per_batch`` resumes. Use it for one model only.
        first: A token that begins every sliding window. None for what the model's family needs, with ``bos``.
        split: Share the batches among the processes that torchrun or accelerate started, if any; every
            process passes the same documents and gets the same curve, to the bit that of one process with as
            many threads.
        progress: A function of (tokens done, tokens in total), both of this process, called after each batch.
            True for a progress bar, in a terminal or in a notebook with ipywidgets.

    Returns:
        The losses in nats, as a `LossCurve`.

    Raises:
        RopepatchError: If there are no documents, one has fewer than 2 tokens, a token id is outside the
            vocabulary, a loss is not finite, or the settings score nothing.
    """
    check_windows(window, stride)
    if tokens_per_batch is None:
        tokens_per_batch = 1024 if input_device(model).type == "cpu" else 8192
    config = model.config.get_text_config()
    if bos and first is None and config.model_type in BOS_IN_EACH_WINDOW:
        first = config.bos_token_id
    rows: list[list[Window]] = []
    for index, ids in enumerate(
        token_ids(tokenizer, documents, bos=bos, length=length)
    ):
        ids = ids[:length]
        _check_ids(ids, index, config.vocab_size)
        rows.append(windows(index, ids, window, stride, first))
    if not rows:
        raise RopepatchError(
            "no documents", hint="pass at least one text or list of token ids"
        )
    batches = batched(chain(*rows), tokens_per_batch)
    processes = join(str(input_device(model))) if split else ALONE
    with evaluating(model), advancing(progress, "tokens") as advance:
        read = deal_resumed(
            processes,
            batches,
            LossReader(model).read,
            keys=[key_of_batch(batch) for batch in batches],
            sizes=[sum(len(window.ids) for window in batch) for batch in batches],
            keep=keep,
            advance=advance,
        )
    losses = [torch.as_tensor(nll, dtype=torch.float32) for nll in chain(*read)]
    by_window = dict(zip(chain(*batches), losses, strict=True))
    return LossCurve(tuple(torch.cat([by_window[one] for one in row]) for row in rows))


def _check_ids(ids: Tensor, index: int, vocabulary: int) -> None:
    """Refuse ids that cannot be scored."""
    if len(ids) < 2:
        raise RopepatchError(
            f"documents[{index}] must have at least 2 tokens, got {len(ids)}",
            hint="leave out empty documents; the first token is never scored",
        )
    outside = ids >= vocabulary
    if outside.any():
        position = int(outside.nonzero()[0])
        raise RopepatchError(
            f"documents[{index}]: token {position} is {ids[position]}, expected 0 to {vocabulary - 1}",
            hint="use the tokenizer that belongs to the model",
        )


def _refuse(nll: Tensor, window: Window) -> NoReturn:
    """Name the first loss of a window that is not a number."""
    position = int((~nll.isfinite()).nonzero()[0])
    raise RopepatchError(
        f"documents[{window.document}]: the loss of token {window.begin + window.first + position} is "
        f"{nll[position]}, expected a number",
        hint="load the model in float32 or bfloat16; check its weights and its RoPE scaling",
    )


class LossReader:
    """Computes the losses of batches with one model, a causal language model in eval mode."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._device = model, input_device(model)
        self._decoder = decoder_of(model)
        if self._decoder is None:
            self._read_whole()

    def read(self, batch: list[Window]) -> list[Tensor]:
        """The float32 losses of each window on the CPU, from its first scored token on."""
        first = batch[0].first
        ids = torch.stack([window.ids for window in batch]).to(self._device)
        losses: Iterable[Tensor] | None = None
        with torch.inference_mode():
            if self._decoder is not None:
                losses = _chunked_losses(self._model, self._decoder, ids, first)
                if losses is None:
                    self._read_whole()
            if losses is None:
                losses = [_full_losses(self._model, row, first) for row in ids]
        copies = []  # because a slice keeps its whole batch in memory, and is sent with it
        for window, nll in zip(batch, losses, strict=True):
            if not nll.isfinite().all():
                _refuse(nll, window)
            copies.append(nll.float().clone())
        return copies

    def _read_whole(self) -> None:
        self._decoder = None
        logger.warning(
            "%s: its head cannot be run in chunks; needs memory for all logits at once",
            type(self._model).__name__,
        )


def _chunked_losses(
    model: PreTrainedModel, decoder: nn.Module, ids: Tensor, first: int
) -> Tensor | None:
    """Losses [B, T - first] of ids [B, T], from the logits of C positions at a time.

    None if the decoder does not return one state per token, or if the first and last logits differ from those
    that the model computes for these two positions only.
    """
    predicting = torch.arange(first - 1, ids.shape[1] - 1)
    ends = torch.unique(predicting[[0, -1]])
    chunks = []
    with decoded_once(model, decoder, ids) as (logits_at, states):
        # In reverse, to detect a model that ignores the positions and returns two of its own choice.
        expected = logits_at(ends.flip(0)).flip(1)
        if (
            len(states) != 1
            or expected.shape[1] != len(ends)
            or states[0].shape[:2] != ids.shape
        ):
            return None
        for positions in torch.split(predicting, max(1, CHUNK // len(ids))):
            logits = logits_at(positions)
            if logits.shape[1] != len(positions):
                return None
            # A copy: the chunk's logits are freed
            at_ends = logits[:, torch.isin(positions, ends)]
            chunks.append((token_losses(logits, ids[:, positions + 1]).cpu(), at_ends))
            del logits
    losses, at_ends = (torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True))
    # Matrix products of different shapes round differently, most of all in TF32; a wrong position has a far
    # greater effect.
    tolerance = (
        max(torch.finfo(expected.dtype).eps ** 0.5, 1e-3)
        * expected.nan_to_num().abs().max().item()
    )
    same = torch.allclose(at_ends, expected, rtol=0, atol=tolerance, equal_nan=True)
    return losses if same else None


def _full_losses(model: PreTrainedModel, ids: Tensor, first: int) -> Tensor:
    """Losses [T - first] of ids [T], from all logits [T, V] at once."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    parts = zip(
        torch.split(logits[first - 1 : -1], CHUNK),
        torch.split(ids[first:], CHUNK),
        strict=True,
    )
    return torch.cat([token_losses(*part).cpu() for part in parts])


# Windows


@dataclass(frozen=True, eq=False)
class Window:
    """Tokens of a document in one forward pass.

    Attributes:
        document: The index of the document.
        begin: The index in the document of the first token.
        ids: The token ids [T], int64 on the CPU.
        first: The index in the window of the first scored token, at least 1.
    """

    document: int
    begin: int
    ids: Tensor
    first: int

    @cached_property
    def identity(self) -> tuple[int, int, str]:
        """A key that is equal for windows with equal losses; shorter windows come first."""
        return (
            len(self.ids),
            self.first,
            hashlib.sha256(self.ids.numpy().tobytes()).hexdigest(),
        )


def check_windows(window: int | None, stride: int | None) -> None:
    """Refuse windows that leave tokens out."""
    if window is None and stride is None:
        return
    if window is None or stride is None:
        raise RopepatchError(
            f"windows that slide need a length and a stride, got window={window}, stride={stride}",
            hint="window=4096, stride=256; or neither, for one pass",
        )
    if not 1 <= whole_number("stride", stride) < whole_number("window", window):
        raise RopepatchError(
            f"stride must be from 1 to {window - 1} for windows of {window} tokens, got {stride}",
            hint=f"a half of the window: {window // 2}",
        )


def windows(
    document: int,
    ids: Tensor,
    window: int | None,
    stride: int | None,
    first: int | None = None,
) -> list[Window]:
    """The windows of a document, which together score all its tokens but the first.

    Without a window length there is one window, in which every token attends to all tokens before it. Sliding
    windows begin at the multiples of the stride. Each token is scored in the first window that contains it,
    with a context of window - stride to window - 1 tokens, in the first window all tokens before it. The last
    window ends with the document, and may be shorter. The token ``first`` replaces the first of each window
    but that of the document.
    """
    if window is None or stride is None or len(ids) <= window:
        return [Window(document, 0, ids, 1)]
    ends = [*range(window, len(ids), stride), len(ids)]
    places = zip(range(0, len(ids), stride), ends, [1, *ends[:-1]], strict=False)
    found = []
    for begin, end, scored in places:
        of_window = ids[begin:end]
        if begin and first is not None:
            of_window = torch.cat([of_window.new_tensor([first]), of_window[1:]])
        found.append(Window(document, begin, of_window, scored - begin))
    return found


def batched(windows: Iterable[Window], tokens: int) -> list[list[Window]]:
    """The windows in batches of equal length and first scored token, in an order of their own.

    A batch has at most ``tokens`` tokens unless it is one window. The shortest come first, because stock
    ``dynamic`` models keep the frequencies of a longer input until one within the original context length.
    """
    batches = []
    ordered = sorted(windows, key=lambda window: window.identity)
    for (length, _), alike in groupby(ordered, key=lambda window: window.identity[:2]):
        together, size = list(alike), max(1, min(CHUNK // 2, tokens // length))
        batches += [
            together[begin : begin + size] for begin in range(0, len(together), size)
        ]
    return batches


def key_of_batch(batch: list[Window]) -> str:
    """The key of the losses of a batch on disk, for one model."""
    return key_of([window.identity for window in batch])


# Losses


@dataclass(frozen=True, eq=False)
class LossCurve:
    """The loss of every scored token, in rows of neighbouring tokens.

    Attributes:
        nll: A float32 CPU tensor [T - 1] per row; entry t is -ln p(token t + 1 | its context) in nats, or NaN
            if the token was not scored. A row is a document, or a window of one.
        documents: The index of the document of each row; None if each row is its own document.
    """

    nll: tuple[Tensor, ...]
    documents: tuple[int, ...] | None = None

    def at(self, length: int) -> Mean:
        """The loss of the first ``length`` tokens of every row that has at least so many, as a `Mean`.

        Raises:
            RopepatchError: If no row has ``length`` tokens, or none is scored.
        """
        read = [
            nll[: length - 1] if len(nll) >= length - 1 else nll[:0] for nll in self.nll
        ]
        return self._sum(read, f"{length} tokens")

    def between(self, begin: int, end: int) -> Mean:
        """The loss of the tokens with an index in [begin, end) in their row, as a `Mean`; rows of any length.

        Raises:
            RopepatchError: If no row has such a token; token 0 is never scored.
        """
        read = [nll[max(begin, 1) - 1 : max(end - 1, 0)] for nll in self.nll]
        return self._sum(read, f"a scored token in [{begin}, {end})")

    def of_documents(self, documents: Sequence[int]) -> LossCurve:
        """The curve with the document of each row."""
        return replace(self, documents=tuple(documents))

    def _sum(self, losses: list[Tensor], wanted: str) -> Mean:
        sums: defaultdict[int, list[float]] = defaultdict(list)
        counts: defaultdict[int, int] = defaultdict(int)
        for index, every in zip(self.documents or count(), losses, strict=False):
            if len(nll := every[~every.isnan()]):
                sums[index].append(nll.sum(dtype=torch.float64).item())
                counts[index] += len(nll)
        if not sums:
            raise RopepatchError(
                f"no document has {wanted}: the longest has {self._longest} tokens"
            )
        # fsum rounds once, so the order of the rows has no effect.
        return Mean(tuple((math.fsum(sums[index]), counts[index]) for index in sums))

    @property
    def _longest(self) -> int:
        return max(len(nll) + 1 for nll in self.nll)

    def __repr__(self) -> str:
        heads = ("length", "documents", "tokens", "nats/token", "perplexity")
        cells = []
        for *counts, nats, perplexity in map(dict.values, self._doublings()):
            cells.append((*map(str, counts), f"{nats:.4f}", f"{perplexity:.2f}"))
        return as_text([columns(cells, heads, right=range(5))])

    def _doublings(self) -> Iterator[dict[str, float]]:
        """The loss at every doubling of the length, up to the longest row."""
        powers = {2**k for k in range(4, self._longest.bit_length())}
        for length in sorted(powers | {self._longest}):
            read = self.at(length)
            yield {
                "length": length,
                "documents": len(read.clusters),
                "tokens": round(read.weight),
                "nats": read.value,
                "perplexity": read.perplexity,
            }

    def to_pandas(self) -> DataFrame:
        """A pandas frame with a row for every doubling of the length in tokens, up to the longest row.

        Raises:
            RopepatchError: If pandas is not installed.
        """
        return data_frame(self._doublings())
