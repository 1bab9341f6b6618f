"""Position ids with which short training sequences train a long target length.

Only the positions jump; the text of a sequence is contiguous. The paper also skips text at a jump, and found
that this hardly matters (section 3 of arXiv:2309.10400).

Shapes: W tokens of a training sequence.
"""

from __future__ import annotations

import random
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from ropepatch.settings import Count, Settings


class TrueLength(Settings):
    """The true positions."""

    paper: ClassVar[str] = "arXiv:2306.15595"
    name: Literal["true-length"] = "true-length"

    def sample(self, window: int, target: int, draw: random.Random) -> Tensor:
        """Return the positions 0 ... W-1, int64."""
        return torch.arange(window)


class PoSE(Settings):
    """Chunks with jumps between them; lengths and jumps are drawn for every training sequence.

    The first chunk starts at 0. Chunk i has at least one token, leaves one for each further chunk, and
    is shifted by a skip u_i ~ U{u_(i-1) ... target - W} (equation 3 and figure 6 of the paper).

    Args:
        chunks: Number of chunks, at most the number of tokens; 2 in the paper, 1 is `true-length`.
    """

    paper: ClassVar[str] = "arXiv:2309.10400"
    name: Literal["pose"] = "pose"
    chunks: Count = 2

    def sample(self, window: int, target: int, draw: random.Random) -> Tensor:
        """Return strictly increasing positions [W] below ``target``, int64; 0 ... W-1 if W >= target."""
        if target <= window:
            return torch.arange(window)
        starts, skips = [0], [0]
        for chunks_left in range(min(self.chunks, window) - 1, 0, -1):
            starts.append(draw.randint(starts[-1] + 1, window - chunks_left))
            skips.append(draw.randint(skips[-1], target - window))
        lengths = torch.tensor([*starts, window]).diff()
        return torch.arange(window) + torch.tensor(skips).repeat_interleave(lengths)


PositionSampling = TrueLength | PoSE


def _by_name(content: Any) -> Any:
    return {"name": content} if isinstance(content, str) else content


Sampling = Annotated[PositionSampling, Field(discriminator="name")]
Positions = Annotated[
    Sampling,
    BeforeValidator(
        _by_name, json_schema_input_type=Literal["true-length", "pose"] | Sampling
    ),
]
