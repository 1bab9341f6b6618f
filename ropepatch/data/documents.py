"""What every generated document is: its tokens, and how probable each was.

Shapes: T tokens of a document. Log-probabilities are natural logarithms, float64.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropepatch.errors import RopepatchError

BOS, EOS = 0, 1  # the special tokens of the tokenizer


@dataclass(frozen=True, eq=False)
class GeneratedDocument:
    """Token ids and their exact probabilities under the process that drew them.

    A reader of the last w tokens is taken to know the process, the document's length and where in it they
    stand. For such a reader a token is certain if it repeats one among those w, and otherwise as probable as
    it was when it was first drawn.

    Attributes:
        ids: Token ids [T]; the first is the beginning-of-sequence token.
        prior: The log-probability [T] of each token for a reader who has not seen what it repeats.
        distance: How many tokens back [T] that is; 0 if the token repeats nothing.
        reach: `log_probs` is exact for readers of at least so many tokens: those who see less may not know
            which sentence they are in.
    """

    ids: Tensor
    prior: Tensor
    distance: Tensor
    reach: int

    @classmethod
    def of(
        cls, ids: Sequence[int], prior: Sequence[float], distance: Sequence[int], *, reach: int
    ) -> GeneratedDocument:
        """A document from one number of each sort per token."""
        return cls(torch.tensor(ids), torch.tensor(prior, dtype=torch.float64), torch.tensor(distance), reach)

    def log_probs(self, window: int | None = None) -> Tensor:
        """The log-probability [T] of every token given all tokens before it, or the last ``window`` alone.

        The mean of its negative is the loss that no model can beat, other than by luck.

        Raises:
            RopepatchError: ``window`` is shorter than `reach`.
        """
        if window is not None and window < self.reach:
            raise RopepatchError(
                f"window must be at least {self.reach} tokens, got {window}",
                hint="a shorter one does not hold the sentence that it is to continue",
            )
        certain = self.distance > 0
        if window is not None:
            certain &= self.distance <= window
        return self.prior.masked_fill(certain, 0.0)


def copying(length: int, vocab_size: int, seed: int) -> GeneratedDocument:
    """A sequence of ``length`` random tokens, then the same again: BOS, sequence, EOS, sequence, EOS.

    The tokens are drawn uniformly from all that are not special.
    """
    draw = random.Random(seed)
    sequence = [draw.randrange(EOS + 1, vocab_size) for _ in range(length)]
    free = [-math.log(vocab_size - EOS - 1)] * length
    return GeneratedDocument.of(
        [BOS, *sequence, EOS, *sequence, EOS],
        [0.0, *free, 0.0, *free, 0.0],
        [0] * (length + 2) + [length + 1] * length + [0],
        reach=1,
    )
