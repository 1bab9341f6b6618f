"""Counts of retrieved keys, their intervals, and the effective length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.table import aligned, data_frame

if TYPE_CHECKING:
    from pandas import DataFrame

    from ropepatch.data.templates import PasskeyTemplate


def wilson(correct: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (J. Am. Stat. Assoc. 22, 1927)."""
    z = 1.959964

    def least(correct: float) -> float:
        root = math.sqrt(correct * (n - correct) / n + z * z / 4)
        return (correct + z * z / 2 - z * root) / (n + z * z)

    return least(correct), 1 - least(n - correct)


@dataclass(frozen=True)
class Passkey:
    """How many of ``n`` keys were retrieved; ``found`` says of each prompt how many, where that was kept."""

    correct: int
    n: int
    found: tuple[int, ...] = field(default=(), compare=False, repr=False)

    @property
    def accuracy(self) -> float:
        """The share retrieved."""
        return self.correct / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the accuracy."""
        return wilson(self.correct, self.n)


THRESHOLD = 0.856  # the share found that counts as reading a length, RULER's (arXiv:2404.06654)


@dataclass(frozen=True)
class PasskeyGrid:
    """What was retrieved at every length and depth, and what was asked.

    Attributes:
        cells: By (length in tokens, depth of the first needle asked for).
        template: The words; None for a grid that was not measured here, as with all below.
        seed: The seed from which the keys were drawn.
        trials: Prompts per cell.
        distractors: Further needles in each prompt.
        queries: Needles asked for in each prompt; each counts.
    """

    cells: Mapping[tuple[int, float], Passkey]
    template: PasskeyTemplate | None = None
    seed: int | None = None
    trials: int | None = None
    distractors: int | None = None
    queries: int | None = None

    @property
    def lengths(self) -> list[int]:
        """In tokens, the shortest first."""
        return sorted({length for length, _ in self.cells})

    def at(self, length: int) -> Passkey:
        """All depths of a length together.

        Raises:
            RopepatchError: The grid has no such length.
        """
        read = [cell for (tokens, _), cell in self.cells.items() if tokens == length]
        if not read:
            raise RopepatchError(
                f"no passkey was asked for at {length} tokens", hint=f"measured: {self.lengths}"
            )
        found = tuple(said for cell in read for said in cell.found)
        return Passkey(sum(cell.correct for cell in read), sum(cell.n for cell in read), found)

    def effective_length(self, threshold: float = THRESHOLD) -> int | None:
        """The largest length whose accuracy is at or above the threshold, None if there is none.

        So RULER defines it (arXiv:2404.06654); its threshold is what Llama-2-7B-chat reaches at 4k there.
        YaRN takes 0.8; Position Interpolation 0.2, to be kept at every shorter length too.

        Raises:
            RopepatchError: A threshold that is not above 0, or above 1.
        """
        if not 0 < threshold <= 1:
            raise RopepatchError(
                f"the threshold must be above 0 and at most 1, got {threshold}",
                hint=f"the default is {THRESHOLD}",
            )
        reached = (length for length in self.lengths if self.at(length).accuracy >= threshold)
        return max(reached, default=None)

    def __repr__(self) -> str:
        lengths = self.lengths
        span = f"{lengths[0]} to {lengths[-1]} tokens, " if lengths else ""
        found, asked = (sum(getattr(cell, key) for cell in self.cells.values()) for key in ("correct", "n"))
        return f"PasskeyGrid({span}{len(self.cells)} cells, {found} of {asked} found)"

    def __str__(self) -> str:
        depths = sorted({depth for _, depth in self.cells})
        rows = [("tokens", *(f"depth {depth:.2f}" for depth in depths), "all", "(95 %)")]
        for length in self.lengths:
            cells = [*(self.cells[length, depth] for depth in depths), self.at(length)]
            low, high = (f"{100 * bound:.0f}" for bound in cells[-1].interval)
            rows.append((f"{length}", *(f"{cell.correct}/{cell.n}" for cell in cells), f"({low}–{high} %)"))
        return aligned(rows)

    def to_pandas(self) -> DataFrame:
        """A row for every length, in tokens, and depth: how many keys were retrieved, of how many.

        Raises:
            RopepatchError: If pandas is not installed.
        """
        return data_frame(
            {"length": length, "depth": depth, "correct": cell.correct, "n": cell.n}
            for (length, depth), cell in self.cells.items()
        )

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"
