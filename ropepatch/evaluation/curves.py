"""The loss of every token of some documents, and the perplexities that it holds. Losses are in nats."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ropepatch.errors import RopepatchError


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
        check_length(length)
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


def check_length(length: int) -> None:
    """Refuse a length at which no token is scored."""
    if length < 2:
        raise RopepatchError(f"length must be at least 2 tokens, got {length}: the first is never scored")
