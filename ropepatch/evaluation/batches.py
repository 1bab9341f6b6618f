"""Passages of documents, and which of them are read together.

Shapes: B passages of a batch, T tokens of its longest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ropepatch.evaluation.protocols import Window

PADDING = 1 / 16  # of the tokens of a batch, at most


@dataclass(frozen=True, eq=False)
class TokenizedDocument:
    """The token ids [T] of a document, int64 on the CPU, and its index among all that are read."""

    index: int
    ids: Tensor

    @cached_property
    def digest(self) -> str:
        """What names its token ids."""
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class Passage:
    """One row of a batch: a window of a document, after the document's first ``before`` tokens."""

    document: TokenizedDocument
    window: Window
    before: int

    def __len__(self) -> int:
        return self.before + self.window.end - self.window.begin

    @property
    def first(self) -> int:
        """The index in the passage of its first scored token, at least 1."""
        return self.window.scored - self.window.begin + self.before

    @property
    def ids(self) -> Tensor:
        """The token ids [len(self)]."""
        inside = self.document.ids[self.window.begin : self.window.end]
        return torch.cat([self.document.ids[: self.before], inside]) if self.before else inside

    @cached_property
    def identity(self) -> tuple[Any, ...]:
        """The same for passages that have the same losses; in this order neighbours share batches."""
        return self.first, len(self), self.document.digest, *self.window, self.before


Batch = list[Passage]  # the longest last


def batched(passages: Sequence[Passage], *, tokens: int, rows: int, padding: float) -> list[Batch]:
    """The passages in batches, the shortest first; their own order changes nothing.

    The passages of a batch are scored from the same index on. The order also suits stock ``dynamic`` models,
    which forget the frequencies of a longer input only at one within their window.

    Args:
        passages: What is to be read.
        tokens: The most that a batch holds, padding included, unless it is one passage.
        rows: The most passages of a batch.
        padding: The most padding, as a share of the batch's tokens.
    """
    batches: list[Batch] = []
    for passage in sorted(passages, key=lambda passage: passage.identity):
        together = [*(batches[-1] if batches else []), passage]
        size = len(together) * len(passage)
        fits = len(together) <= rows and size <= tokens and together[0].first == passage.first
        if batches and fits and size - sum(map(len, together)) <= padding * size:
            batches[-1] = together
        else:
            batches.append([passage])
    return sorted(batches, key=lambda batch: len(batch[-1]))


def padded(batch: Batch) -> Tensor:
    """The token ids [B, T]: short rows repeat their last token, which in a causal model no real one sees."""
    length = len(batch[-1])
    return torch.stack([torch.cat([p.ids, p.ids[-1:].expand(length - len(p))]) for p in batch])


def key_of(batch: Batch) -> str:
    """What names the losses of a batch on disk, for one model."""
    return hashlib.sha256(repr([passage.identity for passage in batch]).encode()).hexdigest()
