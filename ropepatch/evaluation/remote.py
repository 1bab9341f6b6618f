"""A model that is measured where it runs: another process has it, and answers what it is asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ropepatch.data.haystack import Haystack


class Remote(ABC):
    """Takes the place of a model in `perplexity` and `ask`.

    Attributes:
        label: What tables call it.
        vocabulary: How many tokens it knows.
        limit: The most tokens it reads; None where it does not say.
        environment: What a result says of where it was measured.
    """

    label: str
    vocabulary: int
    limit: int | None
    environment: dict[str, str]

    def reads(self, tokens: int) -> bool:
        """Whether so many tokens have room."""
        return self.limit is None or tokens <= self.limit

    @abstractmethod
    def losses(self, ids: Tensor, scored: Sequence[int]) -> list[float]:
        """The losses of tokens by their indices in ids [T], in nats; NaN where it does not answer."""

    @abstractmethod
    def answers(self, haystack: Haystack) -> list[tuple[int, str, float, bool, float]]:
        """Length, kind, depth, whether it is found, and log-probability of every answer that has room.

        The log-probability is NaN where it is not told.
        """
