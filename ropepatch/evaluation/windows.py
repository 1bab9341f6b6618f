"""What of a document is read with what context, and which of it is read together.

Two protocols: one pass, and windows that slide. They measure different quantities, whose numbers never belong
in one column. Token 0 of a document is not scored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from torch import Tensor

from ropepatch.errors import RopepatchError


@dataclass(frozen=True, eq=False)
class TokenizedDocument:
    """The token ids [T] of a document, int64 on the CPU, and its index among all that are read."""

    index: int
    ids: Tensor

    @cached_property
    def digest(self) -> str:
        """Names its token ids."""
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class Window:
    """Tokens [begin, end) of a document that are read at once; those from ``scored`` on count."""

    document: TokenizedDocument
    begin: int
    end: int
    scored: int

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def first(self) -> int:
        """The index in the window of its first scored token, at least 1."""
        return self.scored - self.begin

    @property
    def ids(self) -> Tensor:
        """The token ids [len(self)]."""
        return self.document.ids[self.begin : self.end]

    @property
    def shape(self) -> tuple[int, int]:
        """The same for windows that can be read together; shorter ones come first."""
        return len(self), self.first

    @cached_property
    def identity(self) -> tuple[int, int, str, int]:
        """The same for windows that have the same losses."""
        return *self.shape, self.document.digest, self.begin


def check_windows(window: int | None, stride: int | None) -> None:
    """Refuse windows that leave tokens out."""
    if window is None and stride is None:
        return
    if window is None or stride is None:
        raise RopepatchError(
            f"windows that slide need a length and a stride, got window={window}, stride={stride}",
            hint="window=4096, stride=256; or neither, to read in one pass",
        )
    if window < 2:
        raise RopepatchError(f"window must be at least 2 tokens, got {window}: the first is never scored")
    if not 1 <= stride < window:
        raise RopepatchError(
            f"stride must be from 1 to {window - 1} for windows of {window} tokens, got {stride}",
            hint=f"a half of the window: {window // 2}",
        )


def windows(document: TokenizedDocument, window: int | None, stride: int | None) -> list[Window]:
    """The windows whose scored tokens, one after another, are all tokens but the first.

    Without a window the document is one: one pass, in which every token sees all tokens before it. Windows
    that slide begin at the multiples of the stride, and each token counts in the first that holds it: it sees
    at least window - stride and at most window - 1 tokens, in the first window all before it. The last ends
    where the document does, and may be shorter.
    """
    length = len(document.ids)
    if window is None or stride is None or length <= window:
        return [Window(document, 0, length, 1)]
    ends = [*range(window, length, stride), length]
    begins = range(0, length, stride)
    scored = [1, *ends[:-1]]
    return [Window(document, *place) for place in zip(begins, ends, scored, strict=False)]


def batched(windows: Iterable[Window], *, tokens: int, rows: int) -> list[list[Window]]:
    """The windows in batches of one shape, the shortest first; their own order changes nothing.

    A batch holds at most so many tokens, unless it is one window, and rows. The order also suits stock
    ``dynamic`` models, which forget the frequencies of a longer input only at one within their window.
    """
    batches = []
    ordered = sorted(windows, key=lambda window: window.identity)
    for (length, _), alike in groupby(ordered, key=lambda window: window.shape):
        together, size = list(alike), max(1, min(rows, tokens // length))
        batches += [together[begin : begin + size] for begin in range(0, len(together), size)]
    return batches


def key_of(batch: list[Window]) -> str:
    """Names the losses of a batch on disk, for one model."""
    return hashlib.sha256(repr([window.identity for window in batch]).encode()).hexdigest()
