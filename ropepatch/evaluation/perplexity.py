"""The loss of every token of a document, from one forward pass, and the perplexities that it holds.

Shapes: T tokens of a document, C tokens of a chunk, V vocabulary. Losses are in nats.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.texts import token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Perplexity:
    """How well ``num_tokens`` tokens were predicted."""

    nll: float  # nats, summed over the tokens
    num_tokens: int

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.nll / self.num_tokens

    @property
    def value(self) -> float:
        """The perplexity exp(mean); infinite beyond the largest float."""
        return torch.tensor(self.mean, dtype=torch.float64).exp().item()


@dataclass(frozen=True, eq=False)
class LossCurve:
    """The loss of every token but the first of every document.

    Attributes:
        nll: A float32 CPU tensor [T - 1] per document; entry t is -ln p(token t + 1 | tokens 0..t), in nats.
    """

    nll: tuple[Tensor, ...]

    def at(self, length: int) -> Perplexity:
        """The perplexity of reading the first ``length`` tokens of every document that has at least so many.

        Raises:
            RopepatchError: No document has ``length`` tokens, or ``length`` is below 2.
        """
        _check_length(length)
        read = [nll[: length - 1] for nll in self.nll if len(nll) >= length - 1]
        return self._sum(read, f"{length} tokens")

    def between(self, begin: int, end: int) -> Perplexity:
        """The perplexity of the tokens with an index in [begin, end) in their document, however long that is.

        Raises:
            RopepatchError: No document has such a token; token 0 is never scored.
        """
        if not 0 <= begin < end:
            raise RopepatchError(f"need 0 <= begin < end, got begin {begin}, end {end}")
        read = [nll[max(begin, 1) - 1 : end - 1] for nll in self.nll]
        return self._sum(read, f"a scored token in [{begin}, {end})")

    def _sum(self, losses: list[Tensor], wanted: str) -> Perplexity:
        num_tokens = sum(map(len, losses))
        if not num_tokens:
            raise RopepatchError(f"no document has {wanted}: the longest has {self._longest()} tokens")
        # fsum rounds once, so that the order of the documents changes nothing.
        return Perplexity(math.fsum(nll.sum(dtype=torch.float64).item() for nll in losses), num_tokens)

    def _longest(self) -> int:
        return max((len(nll) + 1 for nll in self.nll), default=0)

    def __repr__(self) -> str:
        return f"LossCurve({len(self.nll)} documents, {sum(map(len, self.nll))} tokens scored)"

    def __str__(self) -> str:
        rows = [("length", "documents", "tokens", "nats/token", "perplexity")]
        longest = self._longest()
        for length in sorted({2**k for k in range(4, longest.bit_length())} | {longest}):
            read = self.at(length)
            documents = read.num_tokens // (length - 1)
            row = (f"{length}", f"{documents}", f"{read.num_tokens}", f"{read.mean:.4f}", f"{read.value:.2f}")
            rows.append(row)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


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
        _check_length(length)
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
        for nll in _read(model, (ids.to(device) for ids in checked), chunk):
            losses.append(_check_finite(nll, len(losses)))
            if progress is not None:
                progress(len(losses), len(checked))
    return LossCurve(tuple(nll.clone() for nll in losses))  # a clone made here is no inference tensor


def _check_length(length: int) -> None:
    if length < 2:
        raise RopepatchError(f"length must be at least 2 tokens, got {length}: the first is never scored")


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


def _read(model: PreTrainedModel, documents: Iterable[Tensor], chunk: int) -> Iterator[Tensor]:
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
