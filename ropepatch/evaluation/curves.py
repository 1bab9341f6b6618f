"""The loss of every token of documents, and its means. Losses are in nats."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropepatch.columns import as_text, columns, data_frame
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.intervals import Mean
from ropepatch.settings import whole_number

if TYPE_CHECKING:
    from pandas import DataFrame


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

    def __post_init__(self) -> None:
        if self.documents is not None and len(self.documents) != len(self.nll):
            raise RopepatchError(
                f"{len(self.nll)} rows need the documents of as many, got {len(self.documents)}"
            )

    def at(self, length: int) -> Mean:
        """The loss of the first ``length`` tokens of every row that has at least so many.

        Raises:
            RopepatchError: If no row has ``length`` tokens, or ``length`` is below 2.
        """
        check_length(length)
        read = [
            nll[: length - 1] if len(nll) >= length - 1 else nll[:0] for nll in self.nll
        ]
        return self._sum(read, f"{length} tokens")

    def between(self, begin: int, end: int) -> Mean:
        """The loss of the tokens with an index in [begin, end) in their row, of rows of any length.

        Raises:
            RopepatchError: If no row has such a token; token 0 is never scored.
        """
        if not 0 <= begin < end:
            raise RopepatchError(f"need 0 <= begin < end, got begin {begin}, end {end}")
        read = [nll[max(begin, 1) - 1 : end - 1] for nll in self.nll]
        return self._sum(read, f"a scored token in [{begin}, {end})")

    def gain_over(self, limited: LossCurve) -> LossCurve:
        """The gain of each token from the longer context, over ``limited``, a curve of the same tokens.

        The values are the losses of ``limited`` minus those of this curve: above 0 where the longer context
        helps.

        Raises:
            RopepatchError: If the rows differ in number, length or document.
        """
        shapes = [[len(nll) for nll in curve.nll] for curve in (self, limited)]
        if shapes[0] != shapes[1] or self._indices() != limited._indices():
            raise RopepatchError(
                f"cannot subtract {self!r} from {limited!r}: not the same tokens",
                hint="measure the same documents in the same order, cut to the same length, in one row each",
            )
        gains = tuple(
            short - full for short, full in zip(limited.nll, self.nll, strict=True)
        )
        return LossCurve(gains, self.documents)

    def of_documents(self, documents: Sequence[int]) -> LossCurve:
        """The curve with the document of each row."""
        return replace(self, documents=tuple(documents))

    def _indices(self) -> tuple[int, ...]:
        return tuple(range(len(self.nll))) if self.documents is None else self.documents

    def _sum(self, losses: list[Tensor], wanted: str) -> Mean:
        if not any(map(len, losses)):
            raise RopepatchError(
                f"no document has {wanted}: the longest has {self._longest()} tokens"
            )
        sums: defaultdict[int, list[float]] = defaultdict(list)
        counts: defaultdict[int, int] = defaultdict(int)
        for index, every in zip(self._indices(), losses, strict=True):
            if len(nll := every[~every.isnan()]):
                sums[index].append(nll.sum(dtype=torch.float64).item())
                counts[index] += len(nll)
        # fsum rounds once, so the order of the rows has no effect.
        return Mean(tuple((math.fsum(sums[index]), counts[index]) for index in sums))

    def _longest(self) -> int:
        return max((len(nll) + 1 for nll in self.nll), default=0)

    def __repr__(self) -> str:
        return f"LossCurve({len(set(self._indices()))} documents, {sum(map(len, self.nll))} tokens scored)"

    def __str__(self) -> str:
        heads, rows = ("length", "documents", "tokens", "nats/token", "perplexity"), []
        for length, read in self._doublings():
            counts = (f"{length}", f"{len(read.clusters)}", f"{read.weight:.0f}")
            rows.append((*counts, f"{read.value:.4f}", f"{read.perplexity:.2f}"))
        return as_text([columns(rows, heads, right=range(5))])

    def _doublings(self) -> Iterator[tuple[int, Mean]]:
        longest = self._longest()
        for length in sorted(
            {2**k for k in range(4, longest.bit_length())} | {longest}
        ):
            yield length, self.at(length)

    def to_pandas(self) -> DataFrame:
        """A pandas frame with a row for every doubling of the length in tokens, up to the longest row.

        Raises:
            RopepatchError: If pandas is not installed.
        """
        return data_frame(
            {
                "length": length,
                "documents": len(read.clusters),
                "tokens": round(read.weight),
                "nats": read.value,
                "perplexity": read.perplexity,
            }
            for length, read in self._doublings()
        )

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def check_length(length: int) -> None:
    """Refuse a length at which no token is scored."""
    if whole_number("length", length) < 2:
        raise RopepatchError(
            f"length must be at least 2 tokens, got {length}: the first is never scored"
        )
