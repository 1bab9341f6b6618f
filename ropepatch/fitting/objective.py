"""What a fit minimises: which tokens count, and how much."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from ropepatch.errors import RopepatchError
from ropepatch.settings import OneOf, Settings, Weight


class Objective(Settings):
    """What is minimised: a weighted mean over tokens, in nats.

    Args:
        short: The weight of a token within the trained context, against 1 beyond it.
        keys: Added to the weight of a key token, one that needs far context: by the loss difference between a
            long and a short window.
        needles: The weight of the loss of passkeys, asked for in prompts of the target's length, against 1
            for the text.
        lengths: `target`: all tokens of a window count alike. `all`: one vector for all lengths; the means
            over the first L, 2 L ... tokens up to the target count alike.
        text: The weight of the text; 0 to be driven by passkeys alone.
    """

    short: Weight = 1.0
    keys: Weight = 0.0
    needles: Weight = 0.0
    lengths: Annotated[str, OneOf(("target", "all"))] = "target"
    text: Weight = 1.0

    def check(self) -> None:
        """Refuse what counts nothing."""
        if not self.text and not self.needles:
            raise RopepatchError("neither text nor needles count: both are 0", hint="needles=1.0")

    def weights(self, length: int, trained: int) -> Tensor:
        """The weights [T - 1] of the tokens of a window from the second on; their mean is 1."""
        ends = [length]
        while self.lengths == "all" and ends[-1] > trained:
            ends.append(max(ends[-1] // 2, trained))
        weights = torch.zeros(length - 1)
        for end in ends:
            weights[: end - 1] += 1 / (end - 1)
        weights[: trained - 1] *= self.short
        if weights.sum() == 0:
            raise RopepatchError(
                "no token counts: short is 0 and the windows end there", hint="raise --short"
            )
        return weights / weights.mean()
