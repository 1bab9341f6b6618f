"""A model that runs in another process, such as a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ropepatch.data.haystack import Haystack


class Remote(ABC):
    """The interface of such a model for `perplexity` and `ask`.

    Attributes:
        label: Its name in tables.
        vocabulary: The size of its vocabulary.
        limit: The most tokens that it accepts; None if unknown.
        environment: The ``env`` of its results.
    """

    label: str
    vocabulary: int
    limit: int | None
    environment: dict[str, str]

    def reads(self, tokens: int) -> bool:
        """Whether it accepts so many tokens."""
        return self.limit is None or tokens <= self.limit

    @abstractmethod
    def losses(self, ids: Tensor, scored: Sequence[int]) -> list[float]:
        """The losses in nats of the tokens of ids [T] with these indices; NaN where it returns none."""

    @abstractmethod
    def answers(self, haystack: Haystack) -> list[tuple[int, str, float, bool, float]]:
        """The length, kind, depth, correctness and log-prob of every answer within the limit.

        The log-prob is NaN where the server returns none.
        """
