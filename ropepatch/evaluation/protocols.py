"""What is read with what context: the procedures behind published perplexities.

They measure different quantities: numbers of two of them never belong in one column. A token has an index in
its document, which begins with the beginning-of-sequence token (BOS) if it has one; token 0 is not scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ropepatch.errors import RopepatchError


class Window(NamedTuple):
    """Tokens [begin, end) of a document read at once, of which those from ``scored`` on count."""

    begin: int
    end: int
    scored: int


Rows = list[list[Window]]  # the windows whose scored tokens, one after another, make a row of the curve


@dataclass(frozen=True)
class OnePass:
    """Each document is read once; every token sees all tokens before it.

    The first N tokens of the curve are what a pass over N tokens alone would give, so one pass holds the
    perplexity of every length. (Not if the frequencies follow the length of the input, as those of stock
    ``dynamic`` and ``longrope``: then the document's whole length decides for all its tokens.)

    The tables captioned "sliding window" of YaRN on Proof-pile are of this kind: see `Truncated`.
    """

    @property
    def label(self) -> str:
        """Its name in result files."""
        return "one-pass"

    def rows(self, length: int, before: int) -> Rows:
        """The windows of a document of ``length`` tokens.

        Args:
            length: Tokens of the document, BOS included.
            before: 1 if every window is given the document's first token, its BOS, in front; else 0.
        """
        return [[Window(before, length, 1)]]


ONE_PASS = OnePass()


@dataclass(frozen=True)
class _Windows:
    """Windows of ``window`` tokens, BOS included; a `RopepatchError` if they are less than 2."""

    window: int

    def __post_init__(self) -> None:
        if self.window < 2:
            raise RopepatchError(
                f"window must be at least 2 tokens, got {self.window}: the first is never scored"
            )

    @property
    def label(self) -> str:
        """Its name in result files."""
        return f"{type(self).__name__.lower()} window={self.window}"


class Truncated(_Windows):
    """The first ``window`` tokens of each document in one pass, all positions; shorter ones are left out.

    YaRN's tables on Proof-pile (2309.00071, table 2 and figure data) were run so (``--truncate``), on the
    first ten documents of at least 131,072 tokens, whatever their captions say.

    Args:
        window: Tokens, BOS included; window - 1 of them are scored.

    Raises:
        RopepatchError: A window below 2 tokens.
    """

    def rows(self, length: int, before: int) -> Rows:
        """The windows of a document, as in `OnePass`."""
        return [[Window(before, self.window, 1)]] if length >= self.window else []


@dataclass(frozen=True)
class Sliding(_Windows):
    """Windows whose beginnings move by ``stride``; each token counts once, in the first window that holds it.

    So a token of the first window sees all tokens before it, and a later one at least window - stride and at
    most window - 1. The last window is the first to reach the document's end: it begins at a multiple of the
    stride like the others, ends where the document ends, and may be shorter. A document of at most ``window``
    tokens is read in one pass. The mean is over tokens, not over windows.

    Published with it: Position Interpolation (2306.15595), stride 256; PoSE (2309.10400), stride 1,024 and
    16k for books; LongRoPE (2402.13753), stride 256, as others report. YaRN's GovReport figures slide by 256
    too but are means of windows with one weight each, which is another quantity. The rolling likelihood of
    lm-eval for inputs of N tokens is ``Sliding(N + 1, stride=N)`` with a last window moved back to be full.

    Args:
        window: Tokens read at once, BOS included.
        stride: Tokens from one window's beginning to the next one's.

    Raises:
        RopepatchError: A window below 2 tokens, or a stride that is not from 1 to window - 1.
    """

    stride: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.stride < self.window:
            raise RopepatchError(
                f"stride must be from 1 to {self.window - 1} for windows of {self.window} tokens, "
                f"got {self.stride}",
                hint=f"Disjoint({self.window}) reads windows that share no token",
            )

    @property
    def label(self) -> str:
        """Its name in result files."""
        return f"{super().label} stride={self.stride}"

    def rows(self, length: int, before: int) -> Rows:
        """The windows of a document, as in `OnePass`."""
        windows, scored = [], 1
        for begin in range(before, length, self.stride):
            end = min(begin + self.window - before, length)
            windows.append(Window(begin, end, scored))
            if end == length:
                break
            scored = end
        return [windows]


class Disjoint(_Windows):
    """Windows side by side, each on its own: a token sees what stands before it in its window.

    Each window is a row of the curve, so positions and lengths are those in the window; the last one of a
    document may be shorter; intervals still draw whole documents. A window's first token is not scored unless
    a BOS stands before it. A quick figure for short contexts; no paper on longer ones has tables of it.

    Args:
        window: Tokens, BOS included.

    Raises:
        RopepatchError: A window below 2 tokens.
    """

    def rows(self, length: int, before: int) -> Rows:
        """The windows of a document, as in `OnePass`."""
        size = self.window - before
        windows = (
            Window(begin, min(begin + size, length), begin + 1 - before)
            for begin in range(before, length, size)
        )
        return [[window] for window in windows if window.scored < window.end]


Protocol = OnePass | Truncated | Sliding | Disjoint
