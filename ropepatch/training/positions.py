"""Position ids for training rows, so that a short window trains a long target.

Only the positions jump: the text of a window is always one piece. The papers also take the text behind a jump
from farther on; PoSE found that this hardly matters (section 3 of arXiv:2309.10400).

Shapes: W tokens of a window.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, model_serializer, model_validator
from pydantic_core import CoreSchema
from torch import Tensor

from ropepatch.settings import Amount, Count, Settings, Several


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

    def for_row(self, draw: random.Random) -> PositionSampling:
        """The sampling of all segments of one row."""
        return self


class TrueLength(PositionSampling):
    """Where they stand."""

    paper = "arXiv:2306.15595"
    name: Literal["true-length"] = "true-length"

    def _sample(self, window: int, target: int, draw: random.Random) -> Tensor:
        return torch.arange(window)


class PoSE(PositionSampling):
    """Some chunks with jumps between them; lengths and jumps are drawn anew for every window.

    The first chunk starts at 0. Chunk i has a length from 1 to what leaves one for each further chunk, and
    is shifted by a skip u_i ~ U{u_(i-1) ... target - W} (equation 3 and figure 6 of the paper).

    Args:
        chunks: How many, or as many as there are tokens. 2 in the paper, 3 did as well; 1 is `true-length`.
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


class RandPos(PositionSampling):
    """Any positions, in order. It fails on LLaMA (table 5 of arXiv:2309.10400): here to compare with."""

    paper = "arXiv:2305.16843"
    name: Literal["randpos"] = "randpos"

    def _sample(self, window: int, target: int, draw: random.Random) -> Tensor:
        return torch.tensor(sorted(draw.sample(range(target), window)))


class CREAM(PositionSampling):
    """A head at the start of the target, a tail at its end and a chunk drawn from between.

    With f = target / W, head and tail have h tokens each, W / 3 or, every other time, 4 f (at most W / 3).
    The chunk ends at e ~ U{h + (M-1) α ... α W - h - 1}, M its length, with α = ⌊x⌋ / 2, x ~ N(1 + f, 3) cut
    off at 2 and 2 f, as the released code does; there f is whole. At the upper cut α is f, whole or not, so
    that no position of the target is left out.
    """

    paper = "arXiv:2406.07138"
    name: Literal["cream"] = "cream"

    def _sample(self, window: int, target: int, draw: random.Random) -> Tensor:
        factor = Fraction(target, window)
        ends = window // 3
        if draw.random() < 0.5:
            ends = min(ends, math.floor(4 * factor))
        middle = window - 2 * ends
        x = draw.gauss(1 + float(factor), 3)
        alpha = factor if x >= 2 * factor else Fraction(max(2, math.floor(x)), 2)
        earliest = ends + math.floor((middle - 1) * alpha)
        last = draw.randint(earliest, math.floor(alpha * window) - ends - 1)
        return torch.cat(
            [
                torch.arange(ends),
                torch.arange(last + 1 - middle, last + 1),
                torch.arange(target - ends, target),
            ]
        )


def _by_name(content: Any) -> Any:
    return {"name": content} if isinstance(content, str) else content


Name = Literal["true-length", "pose", "randpos", "cream"]
Parameters = Annotated[TrueLength | PoSE | RandPos | CREAM, Field(discriminator="name")]
Single = Annotated[Parameters, BeforeValidator(_by_name, json_schema_input_type=Name | Parameters)]


class MixturePart(Settings):
    """One of the samplings of a mixture; in a file one mapping, the sampling's with a weight.

    Args:
        sampling: Any but a mixture.
        weight: Its share of the rows, relative to the other parts.
    """

    sampling: Single
    weight: Amount = 1.0

    @model_validator(mode="before")
    @classmethod
    def _split(cls, content: Any) -> Any:
        if isinstance(content, str):
            return {"sampling": content}
        if not isinstance(content, dict) or "sampling" in content:
            return content
        weight = {"weight": content["weight"]} if "weight" in content else {}
        return {"sampling": {key: content[key] for key in content if key != "weight"}} | weight

    @model_serializer
    def _join(self) -> dict[str, Any]:
        return self.sampling.model_dump() | {"weight": self.weight}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """As a file has it."""
        keys = super().__get_pydantic_json_schema__(core, handler)["properties"]
        mapping = {"type": "object", "properties": {"weight": keys["weight"]}, "required": ["name"]}
        return {"anyOf": [*keys["sampling"]["anyOf"], mapping]}


class Mixture(PositionSampling):
    """Each row draws one of several samplings: with some `true-length` rows, short contexts stay in practice.

    Args:
        parts: At least one.
    """

    paper = ""
    name: Literal["mixture"] = "mixture"
    parts: Several[MixturePart]

    def _sample(self, window: int, target: int, draw: random.Random) -> Tensor:
        return self.for_row(draw).sample(window, target, draw)

    def for_row(self, draw: random.Random) -> PositionSampling:
        """The part that is drawn."""
        (part,) = draw.choices(self.parts, [part.weight for part in self.parts])
        return part.sampling


Sampling = Annotated[TrueLength | PoSE | RandPos | CREAM | Mixture, Field(discriminator="name")]
Positions = Annotated[Sampling, BeforeValidator(_by_name, json_schema_input_type=Name | Sampling)]
POSITIONS: dict[str, type[PositionSampling]] = {
    kind.model_fields["name"].default: kind for kind in (TrueLength, PoSE, RandPos, CREAM, Mixture)
}


def row_positions(
    sampling: PositionSampling, lengths: Sequence[int], target: int, draw: random.Random
) -> Tensor:
    """Positions [W] of a row of segments of these ``lengths``, int64, each sampled for itself."""
    chosen = sampling.for_row(draw)
    return torch.cat([chosen.sample(length, target, draw) for length in lengths])
