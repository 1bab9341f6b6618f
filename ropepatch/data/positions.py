"""Position ids for training rows, so that a short window trains a long target.

Only the positions jump: the text of a window is always one piece. The paper also takes the text behind a jump
from farther on, and found that this hardly matters (section 3 of arXiv:2309.10400).

Shapes: W tokens of a window.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from ropepatch.settings import Count, Settings


class PositionSampling(Settings, ABC):
    """Where the tokens of a window are said to stand within the target."""

    paper: ClassVar[str]
    name: str

    def sample(self, window: int, target: int, draw: random.Random) -> Tensor:
        """Strictly ascending positions [W] below ``target``, int64; 0 ... W-1 where W reaches the target."""
        if target <= window:
            return torch.arange(window)
        return self._sample(window, target, draw)

    @abstractmethod
    def _sample(self, window: int, target: int, draw: random.Random) -> Tensor:
        """The same for windows below the target, down to a single token."""


class TrueLength(PositionSampling):
    """The true positions."""

    paper = "arXiv:2306.15595"
    name: Literal["true-length"] = "true-length"

    def _sample(self, window: int, target: int, draw: random.Random) -> Tensor:
        return torch.arange(window)


class PoSE(PositionSampling):
    """Chunks with jumps between them; lengths and jumps are drawn for every training sequence.

    The first chunk starts at 0. Chunk i has a length from 1 to what leaves one for each further chunk, and
    is shifted by a skip u_i ~ U{u_(i-1) ... target - W} (equation 3 and figure 6 of the paper).

    Args:
        chunks: Number of chunks, at most the number of tokens; 2 in the paper, 1 is `true-length`.
    """

    paper = "arXiv:2309.10400"
    name: Literal["pose"] = "pose"
    chunks: Count = 2

    def _sample(self, window: int, target: int, draw: random.Random) -> Tensor:
        starts, skips = [0], [0]
        for chunks_left in range(min(self.chunks, window) - 1, 0, -1):
            starts.append(draw.randint(starts[-1] + 1, window - chunks_left))
            skips.append(draw.randint(skips[-1], target - window))
        lengths = torch.tensor([*starts, window]).diff()
        return torch.arange(window) + torch.tensor(skips).repeat_interleave(lengths)


def _by_name(content: Any) -> Any:
    return {"name": content} if isinstance(content, str) else content


Sampling = Annotated[TrueLength | PoSE, Field(discriminator="name")]
Positions = Annotated[
    Sampling,
    BeforeValidator(_by_name, json_schema_input_type=Literal["true-length", "pose"] | Sampling),
]
POSITIONS: dict[str, type[PositionSampling]] = {"true-length": TrueLength, "pose": PoSE}


def row_positions(
    sampling: PositionSampling, lengths: Sequence[int], target: int, draw: random.Random
) -> Tensor:
    """Positions [W] of a row of segments of these ``lengths``, int64, each sampled for itself."""
    return torch.cat([sampling.sample(length, target, draw) for length in lengths])
